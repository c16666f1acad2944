"""Reduced precision on Criteo's ads: what it costs of AUC, and saves of the program's time.

Each event is scored in fp32 and in each form before it is learned. Forms are those that runs can
choose, and for the curve some that they cannot: fewer layers in int8, and scales that all samples
of a request share. The programs run for one thread, in turn in one process.

Shapes: B events of a batch, N of all.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench import report
from bench.criteo import criteo, schema
from bench.rank.dense import compiled, microseconds
from bench.servers import BUILD
from embertide.trainer.config import ReducedConfig, RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.eval.metrics import auc
from embertide.trainer.model import export, products
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.export import named_tensors, private_compiler
from embertide.trainer.model.learner import Learner
from embertide.trainer.model.one_thread import one_thread
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.model.reduced import PRECISIONS, Int8, Precision, of

_CLAIM = "F.3"
_SEEDS = (1, 2, 3)
_LOSS = 0.0005
"""The AUC that may be lost."""
_SAMPLES = 64
_WIDEST = (512, 367)  # the first layer of the top MLP, [outputs, inputs]; two others are 256 x 512
_FP32 = "fp32"


class _OneScale(Int8):
    """Values of all samples share a scale."""

    def largest(self, values: Any) -> Any:
        return values.amax((-2, -1), keepdim=True)


class _Some(Int8):
    """Some layers multiply in int8, the others in fp32."""

    def __init__(self, chosen: Callable[[tuple[int, ...]], bool]) -> None:
        self._chosen = chosen

    def takes(self, weight: Any) -> bool:
        return super().takes(weight) and self._chosen(tuple(weight.shape))


FORMS: Mapping[str, Precision] = {
    "bf16": PRECISIONS["bf16"],
    "int8": PRECISIONS["int8"],
    "int8, one scale a request": _OneScale(),
    "int8, but the top's first layer": _Some(lambda shape: shape != _WIDEST),
    "int8, the top's first layer alone": _Some(lambda shape: shape == _WIDEST),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """A form's cost by seed: AUC lost, and the largest difference of a score."""

    losses: Sequence[float]
    errors: Sequence[float]


def rows(data: Path) -> Iterator[report.Row]:
    """Learn the file once for each seed; give the AUC that is lost, and how far scores differ."""
    for name, cost in _costs(data, list(PRECISIONS)).items():
        yield from _rows(name, cost)


def _rows(name: str, cost: Cost) -> Iterator[report.Row]:
    case, largest = f"Criteo, {len(cost.losses)} seeds", ReducedConfig().max_error
    yield report.measure(
        (case, f"AUC lost in {name}", "AUC"),
        cost.losses,
        better="lower",
        target=_LOSS,
        claim=_CLAIM,
    )
    yield report.measure(
        (case, f"AUC lost in {name}, of any seed", "AUC"),
        [max(cost.losses)],
        better="lower",
        target=_LOSS,
        claim=_CLAIM,
    )
    yield report.measure(
        (case, f"largest difference of a score in {name}", "score"),
        cost.errors,
        better="lower",
        target=largest,
        claim=_CLAIM,
    )


def _costs(data: Path, names: Sequence[str]) -> dict[str, Cost]:
    found = [_lost(data, seed, names) for seed in _SEEDS]
    return {name: Cost(*zip(*(each[name] for each in found), strict=True)) for name in names}


def _lost(data: Path, seed: int, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return by form the AUC that is lost and the largest difference of a score."""
    run = RunConfig(model=criteo(), seed=seed)
    learner = Learner(run)
    events = open_events(str(data), schema=schema)
    forms = [FORMS[name] for name in names]
    labels: list[NDArray[Any]] = []
    scores: list[list[NDArray[np.float32]]] = []
    for batch in learner.warm_up(events.batches(batch_size=run.batch_size, start=0)):
        labels.append(batch.label_B)
        scores.append([each_BH[:, 0] for each_BH in learner.score_precisions(batch, *forms)])
        learner.learn(batch)
    label_N = np.concatenate(labels)
    exact_N, *reduced = map(np.concatenate, zip(*scores, strict=True))
    exact = auc(label_N, exact_N)
    report.CONSOLE.print(f"seed {seed}: AUC {exact:.5f} of {len(label_N)} events")
    return {
        name: (exact - auc(label_N, reduced_N), float(np.abs(exact_N - reduced_N).max()))
        for name, reduced_N in zip(names, reduced, strict=True)
    }


# --- the curve ------------------------------------------------------------------------------------


def curve(data: Path, repetitions: int) -> Iterator[report.Row]:
    """Measure each form's time and cost; draw the one over the other."""
    times = _times(repetitions)
    costs = _costs(data, list(FORMS))
    exact = times.pop(_FP32)
    for name, series in times.items():
        case = f"Criteo's DLRM, program of {_SAMPLES} samples"
        yield report.compare(
            (case, f"time of {name}", "us"),
            series,
            exact,
            peer_name=_FP32,
            better="lower",
            target=0.0,
            claim=_CLAIM,
        )
        yield from _rows(name, costs[name])
    _draw({_FP32: exact, **times}, costs, BUILD / "bench" / "reduced.svg")


def _times(repetitions: int) -> dict[str, list[float]]:
    """Return microseconds of a call by form, of series in turn."""
    private_compiler()
    torch.manual_seed(1)
    config = criteo()
    net = Probability(Dlrm(config)).eval()
    with one_thread(), quiet_torch(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        programs = _programs(net, Path(folder))
        widths = (config.dense_columns, sum(config.feature_widths))
        inputs = [torch.randn(_SAMPLES, width) for width in widths]
        series: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(repetitions):
            for name, (program, tensors) in programs.items():
                work = functools.partial(program, *inputs, *tensors)
                series[name].append(microseconds(work))
    return series


def _programs(net: Probability, folder: Path) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Return programs as nodes run them, with the tensors that they take."""
    tensors, config = named_tensors(net), criteo()
    widths = (config.dense_columns, sum(config.feature_widths))
    exported = export._programs(net, tensors, *widths, 1)
    any_batch, many = exported["model"], exported[products.NAME]
    plain, packed = list(tensors.values()), list(tensors.values())
    for place in products.packable(any_batch):
        packed[place - 2] = _packed(packed[place - 2])
    made = {_FP32: (compiled(many, folder, "fp32"), packed)}
    for at, (name, form) in enumerate(FORMS.items()):
        reduced = of(any_batch, form)
        assert reduced is not None
        given, scales = list(plain), []
        for place in reduced.weights:
            weight, *scale = form.converted(given[place - 2])
            given[place - 2] = weight if form.scaled else _packed(weight)
            scales += scale
        made[name] = (compiled(reduced.program, folder, f"form{at}"), given + scales)
    return made


def _packed(weight: Any) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight, 256)


def _draw(times: Mapping[str, Sequence[float]], costs: Mapping[str, Cost], path: Path) -> None:
    """Draw what is lost of AUC, and how far a score differs, over the time of a call."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    largest = {
        "AUC lost, mean of the seeds": {n: float(np.mean(c.losses)) for n, c in costs.items()},
        "largest difference of a score": {n: max(c.errors) for n, c in costs.items()},
    }
    for at, (label, by_form) in enumerate(largest.items()):
        axes = figure.add_subplot(2, 1, at + 1)
        for name, series in times.items():
            x, y = float(np.median(series)), by_form.get(name, 0.0)
            axes.plot([x], [y], "o", markersize=5)
            axes.annotate(name, (x, y), (5, 4), textcoords="offset points", fontsize=7)
        axes.set_xlabel(f"us a call of {_SAMPLES} samples, one thread")
        axes.set_ylabel(label)
        axes.grid(linewidth=0.3)
        axes.margins(0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    report.CONSOLE.print(f"{path}")
