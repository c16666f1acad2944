"""The dense program alone: rewritten for one user and many candidates, beside the unrewritten.

Both are compiled by AOTInductor for one thread, with oneDNN's products, and run in turn in one
process. The rewritten is what a node runs for one user, which may be the program for any users. The
unrewritten is given the user's columns repeated for each candidate, which is not counted.

Shapes: B candidates.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import report
from bench.rank.production import production
from embertide.trainer.config import ModelConfig
from embertide.trainer.model import one_sample, products, reduced
from embertide.trainer.model.build import build_net
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.export import named_tensors, private_compiler
from embertide.trainer.model.one_thread import one_thread
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.model.rewrite import programs, reading
from embertide.trainer.model.rewrite.check import Check
from embertide.trainer.model.rewrite.costs import MeasuredCosts, graph_cost
from embertide.trainer.model.rewrite.package import of_one_user
from embertide.trainer.model.rewrite.reading import Contexts
from embertide.trainer.model.rewrite.search import Found, search
from embertide.trainer.presets import PRESETS

_RUNS_S = 0.2  # of each measurement
_CLAIM = "F.2"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, and the features that are the candidate's; all others and DENSE are the user's."""

    name: str
    config: ModelConfig
    candidate: frozenset[str]

    @property
    def contexts(self) -> Contexts:
        """The columns of the net's inputs."""
        columns = zip(self.config.columns, self.config.feature_widths, strict=True)
        return Contexts(
            dense=(True,) * self.config.dense_columns,
            embeddings=tuple(
                column.name not in self.candidate for column, width in columns for _ in range(width)
            ),
        )


def cases() -> tuple[Case, ...]:
    """Return the models that are measured."""
    shown = frozenset({"cand"})
    crossed = shown | {"prev_cand", "ref_cand", "device_cand"}
    of_candidate = frozenset(f"candidate{i}" for i in range(10))
    return (
        Case(name="news", config=PRESETS["news"](), candidate=shown),
        Case(name="news-crossed", config=PRESETS["news-crossed"](), candidate=crossed),
        Case(name="production", config=production(), candidate=of_candidate),
    )


def compiled(
    program: torch.export.ExportedProgram, folder: Path, name: str, **more: Any
) -> Callable[..., Any]:
    """Return a program of AOTInductor for one thread; `more` are settings of the compiler."""
    inductor: Any = torch._inductor
    settings = {"cpp.threads": 1, "cpp.march": "x86-64-v3", "cpp.simdlen": 256, **more}
    path = str(folder / f"{name}.pt2")
    with products.compiled(), reduced.compiled():
        inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=settings)
    loaded: Callable[..., Any] = inductor.aoti_load_package(path)
    return loaded


def microseconds(work: Callable[[], object]) -> float:
    """Return the time of a call, of some tenths of a second."""
    once = report.seconds(work)
    count = max(1, int(_RUNS_S / max(once, 1e-6)))
    return report.seconds(lambda: [work() for _ in range(count)]) / count * 1e6


def _inputs(contexts: Contexts, candidates: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the inputs of a request of one user, as the unrewritten and as the rewritten take."""
    generator = torch.Generator().manual_seed(1)
    rows = (1, 1, candidates, candidates)
    pairs = zip(rows, contexts.widths(), strict=True)
    split = tuple(torch.randn(count, width, generator=generator) for count, width in pairs)
    whole = []
    for of_context, at in ((contexts.dense, 0), (contexts.embeddings, 1)):
        mask = torch.tensor(of_context, dtype=torch.bool)
        columns = torch.empty(candidates, len(of_context))
        columns[:, mask], columns[:, ~mask] = split[at], split[at + 2]
        whole.append(columns)
    return tuple(whole), (*split, torch.zeros(candidates, dtype=torch.int64))


def rewritten(case: Case, net: nn.Module, costs: MeasuredCosts) -> tuple[Any, Found]:
    """Return the exported net of a case, and what a search makes of it."""
    contexts, tensors = case.contexts, named_tensors(net)
    program = reading.exported(net, tensors, contexts)
    graph = reading.read(program, list(tensors), contexts)
    return program, search(graph, costs, Check(graph, contexts, tensors).same)


def rows(candidates: Sequence[int], repetitions: int, costs: Path) -> Iterator[report.Row]:
    """Measure each model at each number of candidates."""
    private_compiler()
    with one_thread(), quiet_torch(), tempfile.TemporaryDirectory() as folder:
        for case in cases():
            for count in candidates:
                yield from _rows(case, count, repetitions, costs, Path(folder))


def _rows(
    case: Case, candidates: int, repetitions: int, costs: Path, folder: Path
) -> Iterator[report.Row]:
    torch.manual_seed(1)
    net = Probability(build_net(case.config)).eval()
    known = MeasuredCosts(costs, candidates=candidates)
    program, found = rewritten(case, net, known)
    tensors = named_tensors(net)
    graph, cost_us, one_user = found.graph, found.cost_us, False
    for_one = of_one_user(found.graph, case.contexts, tensors, known)
    if for_one is not None and candidates >= for_one.first:
        own = known.of_one_user(candidates, own_program=True)
        graph, cost_us, one_user = for_one.graph, graph_cost(for_one.graph, own), True
    known.save()
    run = programs.exported_run(graph, case.contexts, tensors, one_user=one_user)
    name = f"{case.name}-{candidates}"
    before = compiled(products.of(program), folder, f"{name}-before")
    more = one_sample.SETTINGS if one_user else {}
    made = products.of(run, programs.CANDIDATES_INPUT)
    after = compiled(made, folder, f"{name}-after", **more)
    whole, split = _inputs(case.contexts, candidates)
    weights = tuple(tensors.values())
    taken = programs.tensors_for_run(programs.tensors_of(graph), tensors)
    with torch.no_grad():
        scores, now = before(*whole, *weights), after(*split, *taken)
        scores, now = (
            each[0] if isinstance(each, list | tuple) else each for each in (scores, now)
        )
        off = float((scores - now).abs().max() / scores.abs().max())
        ours, peer = [], []
        for _ in range(repetitions):
            peer.append(microseconds(lambda: before(*whole, *weights)))
            ours.append(microseconds(lambda: after(*split, *taken)))
    title = f"{case.name}, {candidates} candidates"
    yield report.compare(
        (title, "dense program", "us"),
        ours,
        peer,
        peer_name="unrewritten",
        better="lower",
        target=1.0,
        claim=_CLAIM,
    )
    yield report.compare(
        (title, "cost by operators", "us"),
        [cost_us],
        [found.before_us],
        peer_name="unrewritten",
        better="lower",
        target=1.0,
        claim=_CLAIM,
    )
    yield report.measure(
        (title, "scores apart", "of the largest"), [off], better="lower", target=1e-6, claim=_CLAIM
    )
