"""Trains the cost net that the planner `neuroshard` goes by, and says how well it predicts.

It learns from placements drawn by chance, each device's time as the simulator has it: tables whole,
in buckets and in copies, on 2 to 8 devices. Tasks that it is judged by are drawn with other seeds.
Letters of shapes are those of server/core/plan/cost_net.py, and M devices of the training set.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from bench import report
from bench.drift.placed import outcome, placement_of, problem_of
from bench.drift.tasks import Source, Task, tasks
from embertide.server.core.plan import cost_net
from embertide.server.core.plan.cost_net import FEATURES, CostNet
from embertide.server.core.plan.instance import Bools, Instance, instances, owners_of
from embertide.server.core.plan.shard_costs import ShardCosts

_SHARD, _WIDTH, _DEVICE, _LINK = 64, 32, 64, 32
_LEARNED, _HELD_OUT = 160, 8  # tasks
_OWNERSHIPS = 6  # a task
_MIN_SPEARMAN = 0.95
_STEPS, _LINK_STEPS, _BATCH, _RATE, _DECAY = 3000, 8000, 128, 3e-3, 0.1


_NO_NET = CostNet(
    shard=[],
    device=[],
    device_linear_E=np.zeros(0, np.float32),
    link=[],
    link_linear_2=np.zeros(2, np.float32),
    us_per_byte=1.0,
)


class Samples(NamedTuple):
    """Devices: features of their shards one after another, the row each belongs to, and times.

    Attributes:
        features_XF: Features of all shards.
        device_X: The device of each shard.
        traffic_M2: Units sent and received.
        compute_M: Unit time of lookups.
        link_M: Unit time of communication.
    """

    features_XF: Tensor
    device_X: Tensor
    traffic_M2: Tensor
    compute_M: Tensor
    link_M: Tensor


class _Head(nn.Module):
    """A hidden layer and a linear part; zeros cost nothing."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), last)
        self.linear = nn.Linear(inputs, 1, bias=False)

    def forward(self, values_MF: Tensor) -> Tensor:
        nothing_1F = values_MF.new_zeros(1, values_MF.shape[1])
        exceeds_M1 = self.layers(values_MF) - self.layers(nothing_1F) + self.linear(values_MF)
        exceeds_M: Tensor = exceeds_M1[:, 0]
        return exceeds_M


class Net(nn.Module):
    """The networks as torch trains them."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.shard = nn.Sequential(
            nn.Linear(FEATURES, _SHARD), nn.ReLU(), nn.Linear(_SHARD, _WIDTH)
        )
        self.device = _Head(_WIDTH + 2, _DEVICE)
        self.link = _Head(2, _LINK)

    def compute(self, features_XF: Tensor, device_X: Tensor, devices: int) -> Tensor:
        """Return the unit time of lookups of each device."""
        vectors_XE = torch.cat([self.shard(features_XF), features_XF[:, :2]], dim=1)
        sums_ME = vectors_XE.new_zeros(devices, vectors_XE.shape[1])
        sums_ME = sums_ME.index_add(0, device_X, vectors_XE)
        times: Tensor = self.device(sums_ME)
        return times


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
        costs = ShardCosts(instance, _NO_NET)
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
    _train_compute(net, learned, learned.compute_M / us_per_byte)
    link_M = learned.link_M / us_per_byte
    _descend(
        net.link.parameters(),
        _LINK_STEPS,
        lambda: nn.functional.mse_loss(net.link(learned.traffic_M2), link_M),
    )
    return net, us_per_byte


def _train_compute(net: Net, learned: Samples, time_M: Tensor) -> None:
    order_X = torch.argsort(learned.device_X, stable=True)
    features_XF, device_X = learned.features_XF[order_X], learned.device_X[order_X]
    ends_M = torch.bincount(device_X, minlength=len(time_M)).cumsum(0)

    def loss() -> Tensor:
        picked_B = torch.randint(len(time_M), (_BATCH,))
        spans = [(int(ends_M[at - 1]) if at else 0, int(ends_M[at])) for at in picked_B.tolist()]
        rows_X = torch.cat([torch.arange(begin, end) for begin, end in spans])
        sizes_B = torch.tensor([end - begin for begin, end in spans])
        row_of_X = torch.repeat_interleave(torch.arange(_BATCH), sizes_B)
        return nn.functional.mse_loss(
            net.compute(features_XF[rows_X], row_of_X, _BATCH), time_M[picked_B]
        )

    _descend([*net.shard.parameters(), *net.device.parameters()], _STEPS, loss)


def _descend(parameters: Iterable[nn.Parameter], steps: int, loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()


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
        predicted_M = predicted_M + net.link(held_out.traffic_M2)
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
        device=layers(net.device.layers),
        device_linear_E=net.device.linear.weight.detach().numpy()[0].copy(),
        link=layers(net.link.layers),
        link_linear_2=net.link.linear.weight.detach().numpy()[0].copy(),
        us_per_byte=us_per_byte,
    )


def weights_of(net: CostNet) -> bytes:
    """Return the weights file."""
    file = io.BytesIO()
    cost_net.save(net, file)
    return file.getvalue()


def measure(all_sources: Sequence[Source], repetitions: int, file: Path) -> list[report.Row]:
    """Train a net, write its weights, and compare it with the simulator on other tasks.

    To ship it, copy the file over server/core/plan/cost_net.npz.
    """
    torch.set_num_threads(1)
    sizes = (5, 120)
    net, us_per_byte = trained(samples(tasks(all_sources, _LEARNED, 101, sizes), _OWNERSHIPS, 0))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(weights_of(exported(net, us_per_byte)))
    fits = [
        fit(
            net, us_per_byte, samples(tasks(all_sources, _HELD_OUT, seed, sizes), _OWNERSHIPS, seed)
        )
        for seed in range(200, 200 + repetitions)
    ]
    case = "cost net, devices of other tasks"
    return [
        report.measure(
            (case, "rank correlation with the simulator", "Spearman"),
            [each.spearman for each in fits],
            better="higher",
            target=_MIN_SPEARMAN,
            claim="19.5",
        ),
        report.measure(
            (case, "mean squared error, of the squared mean", ""),
            [each.mse for each in fits],
            better="lower",
            target=0,
            claim="19.5",
        ),
        report.measure(
            (case, "largest error, of the mean", ""),
            [each.largest_error for each in fits],
            better="lower",
            target=0,
            claim="19.5",
        ),
    ]
