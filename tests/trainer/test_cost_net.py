"""The cost net: numpy evaluates what torch trained."""

import numpy as np
import torch

from bench.drift.cost_net import Net, exported
from embertide.server.core.plan.cost_net import FEATURES

SHARDS, DEVICES = 40, 7


def test_numpy_evaluates_the_net_as_torch_does() -> None:
    torch.manual_seed(3)
    net = Net()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    random = np.random.default_rng(3)
    features_XF = random.random((SHARDS, FEATURES), dtype=np.float32) + 0.01
    device_X = random.integers(DEVICES, size=SHARDS)
    traffic_D2 = random.random((DEVICES, 2), dtype=np.float32)
    with torch.no_grad():
        expected_D = net.compute(torch.from_numpy(features_XF), torch.from_numpy(device_X), DEVICES)
        expected_D = expected_D + net.link(torch.from_numpy(traffic_D2))
    ours = exported(net, 1.0)
    vectors_XE = ours.vectors(features_XF)
    sums_DE = np.zeros((DEVICES, ours.width), np.float32)
    np.add.at(sums_DE, device_X, vectors_XE)
    np.testing.assert_allclose(ours.costs(sums_DE, traffic_D2), expected_D, rtol=1e-5, atol=1e-5)
