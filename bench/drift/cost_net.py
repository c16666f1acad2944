"""Trains the cost net that the planner `neuroshard` goes by, and says how well it predicts.

It learns from placements drawn by chance, each device's time as the simulator has it: tables whole,
in buckets and in copies, on 2 to 8 devices. Tasks that it is judged by are drawn with other seeds.
Letters of shapes are those of server/core/plan/cost_net.py, and M devices of the training set.
"""

import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from bench.drift.placed import outcome, placement_of, problem_of
from bench.drift.tasks import Source, Task, tasks
from embertide.server.core.plan import cost_net
from embertide.server.core.plan.cost_net import FEATURES, CostNet
from embertide.server.core.plan.instance import Bools, Instance, instances, owners_of
from embertide.server.core.plan.shard_costs import ShardCosts

_SHARD, _WIDTH, _DEVICE, _LINK = 64, 32, 64, 32
_STEPS, _BATCH, _RATE = 4000, 128, 2e-3


class Samples(NamedTuple):
    """Devices: features of their shards one after another, the row each belongs to, and times.

    Attributes:
        features_XF: Of all shards.
        device_X: Whose shard it is.
        traffic_M2: Units sent and received.
        compute_M: Unit time of lookups.
        link_M: Unit time of communication.
    """

    features_XF: Tensor
    device_X: Tensor
    traffic_M2: Tensor
    compute_M: Tensor
    link_M: Tensor


class Net(nn.Module):
    """The networks as torch trains them."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.shard = _layers(FEATURES, _SHARD, _WIDTH)
        self.device = _layers(_WIDTH, _DEVICE, 1)
        self.link = _layers(2, _LINK, 1)

    def compute(self, features_XF: Tensor, device_X: Tensor, devices: int) -> Tensor:
        """Return the unit time of lookups of each device."""
        vectors_XE = self.shard(features_XF)
        sums_ME = vectors_XE.new_zeros(devices, vectors_XE.shape[1])
        sums_ME = sums_ME.index_add(0, device_X, vectors_XE)
        times: Tensor = self.device(sums_ME)[:, 0]
        return times


def _layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def drawn(instance: Instance, random: np.random.Generator) -> Bools:
    """Draw an ownership; memory is not minded."""
    devices = len(instance.places_D)
    owned_DB = np.zeros((devices, len(instance.buckets_B)), np.bool_)
    favoured = random.dirichlet(np.full(devices, random.choice([1.0, 5.0, 50.0])))
    kinds = random.dirichlet([2, 1, 1])  # whole, in buckets, in copies
    for table in range(len(instance.tables)):
        at = np.flatnonzero(instance.table_B == table)
        kind = random.choice(3, p=kinds)
        if kind == 0:
            owned_DB[random.choice(devices, p=favoured), at] = True
        elif kind == 1:
            owned_DB[random.choice(devices, len(at), p=favoured), at] = True
        else:
            copies = random.choice(devices, random.integers(2, devices + 1), replace=False)
            owned_DB[np.ix_(copies, at)] = True
    return owned_DB


def samples(drawn_tasks: Iterator[Task], each: int, seed: int) -> Samples:
    """Draw ownerships of tasks, and let the simulator say what they come to."""
    random = np.random.default_rng(seed)
    features, devices, traffic, compute, link = [], [], [], [], []
    count = 0
    for task in drawn_tasks:
        problem = problem_of(task)
        [instance] = instances(problem)
        costs = ShardCosts(instance, cost_net.CostNet(shard=[], device=[], link=[], us_per_byte=1))
        for _ in range(each):
            owned_DB = drawn(instance, random)
            owners = {at: held.owners for at, held in problem.layout.items()}
            owners.update(owners_of(instance, owned_DB, owners))
            came = outcome(task, placement_of(task, owners))
            sum_D2 = np.zeros((task.devices, 2))
            for table in range(len(task.tables)):
                at = costs.buckets_of(table)
                features_CDF, traffic_CD2 = costs.features(table, owned_DB[None, :, at])
                sum_D2 += traffic_CD2[0]
                has_D = features_CDF[0, :, 0] > 0
                features.append(features_CDF[0, has_D])
                devices.append(count + np.flatnonzero(has_D))
            count += task.devices
            traffic.append(sum_D2)
            compute.append(came.compute_us_D / costs.unit_us)
            link.append(came.link_us_D / costs.unit_us)
    return Samples(
        torch.from_numpy(np.concatenate(features)),
        torch.from_numpy(np.concatenate(devices)),
        torch.from_numpy(np.concatenate(traffic)).float(),
        torch.from_numpy(np.concatenate(compute)).float(),
        torch.from_numpy(np.concatenate(link)).float(),
    )


def trained(learned: Samples, seed: int = 0) -> tuple[Net, float]:
    """Return nets trained on samples, and the time of a unit's byte by which these are scaled."""
    torch.manual_seed(seed)
    # A device that does the mean of all lookups has the time 1.
    us_per_byte = float(learned.compute_M.mean())
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    order_X = torch.argsort(learned.device_X, stable=True)
    features_XF, device_X = learned.features_XF[order_X], learned.device_X[order_X]
    ends_M = torch.bincount(device_X, minlength=len(learned.compute_M)).cumsum(0)
    dice = torch.Generator().manual_seed(seed)
    for _ in range(_STEPS):
        picked_M = torch.randint(len(learned.compute_M), (_BATCH,), generator=dice)
        spans = [(int(ends_M[at - 1]) if at else 0, int(ends_M[at])) for at in picked_M.tolist()]
        rows_X = torch.cat([torch.arange(begin, end) for begin, end in spans])
        row_of_X = torch.repeat_interleave(
            torch.arange(_BATCH), torch.tensor([end - begin for begin, end in spans])
        )
        compute_M = net.compute(features_XF[rows_X], row_of_X, _BATCH)
        link_M = net.link(learned.traffic_M2[picked_M])[:, 0]
        loss = nn.functional.mse_loss(compute_M, learned.compute_M[picked_M] / us_per_byte)
        loss = loss + nn.functional.mse_loss(link_M, learned.link_M[picked_M] / us_per_byte)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net, us_per_byte


class Fit(NamedTuple):
    """How well nets predict devices that they did not learn from; times relative to the mean."""

    mse: float
    spearman: float
    largest_error: float


def fit(net: Net, us_per_byte: float, held_out: Samples) -> Fit:
    """Compare predictions with the simulator's times."""
    with torch.no_grad():
        devices = len(held_out.compute_M)
        predicted_M = net.compute(held_out.features_XF, held_out.device_X, devices)
        predicted_M = predicted_M + net.link(held_out.traffic_M2)[:, 0]
    actual_M = (held_out.compute_M + held_out.link_M) / us_per_byte
    error_M = (predicted_M - actual_M).numpy() / float(actual_M.mean())
    return Fit(
        float((error_M**2).mean()),
        float(stats.spearmanr(predicted_M.numpy(), actual_M.numpy()).statistic),
        float(np.abs(error_M).max()),
    )


def exported(net: Net, us_per_byte: float) -> CostNet:
    """Return the nets as numpy evaluates them."""

    def layers(of: nn.Sequential) -> cost_net.Layers:
        return [
            (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy())
            for layer in of
            if isinstance(layer, nn.Linear)
        ]

    return CostNet(
        shard=layers(net.shard),
        device=layers(net.device),
        link=layers(net.link),
        us_per_byte=us_per_byte,
    )


def learning_tasks(all_sources: Sequence[Source], seed: int, count: int) -> Iterator[Task]:
    """Yield tasks of all sizes."""
    yield from tasks(all_sources, count, seed, tables=(5, 120))


def weights_of(net: CostNet) -> bytes:
    """Return the weights file."""
    file = io.BytesIO()
    cost_net.save(net, file)
    return file.getvalue()
