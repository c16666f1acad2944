"""Parallel layers of one input, merged by our rule, beside torch's own fusions.

The peer is AOTInductor with its `pre_grad_fusion_options` and `post_grad_fusion_options` on.
The net is a mixture of experts without a user: eight layers of 256 x 64 over one input, and a gate.
Both are compiled for one thread, and run in turn in one process.

Shapes: B samples.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import report
from bench.rank.dense import compiled, microseconds
from bench.servers import BenchError
from embertide.trainer.model.export import named_tensors, private_compiler
from embertide.trainer.model.one_thread import one_thread
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.model.rewrite import programs, reading
from embertide.trainer.model.rewrite.check import Check
from embertide.trainer.model.rewrite.costs import MeasuredCosts
from embertide.trainer.model.rewrite.reading import Contexts
from embertide.trainer.model.rewrite.search import search

_EXPERTS, _INPUTS, _WIDTH, _SAMPLES = 8, 256, 64, 256
_BEFORE_GRAD = ("batch_linear", "batch_linear_lhs", "batch_layernorm", "batch_relu", "batch_tanh")
_FUSIONS: dict[str, Any] = {
    "pre_grad_fusion_options": {name: {} for name in (*_BEFORE_GRAD, "batch_sigmoid")},
    "post_grad_fusion_options": {
        "batch_linear_post_grad": {"require_fbgemm": False},
        "batch_aten_relu": {},
    },
}


class Experts(nn.Module):
    """(dense_B1, embeddings_BE) -> score_B: a gate weighs layers of one input."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(_INPUTS, _WIDTH) for _ in range(_EXPERTS))
        self.gate, self.end = nn.Linear(_INPUTS, _EXPERTS), nn.Linear(_WIDTH, 1)

    def forward(self, dense_B1: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return the scores."""
        made = torch.stack([torch.relu(each(embeddings_BE)) for each in self.experts], dim=1)
        weight = torch.softmax(self.gate(embeddings_BE), dim=1).unsqueeze(2)
        return torch.sigmoid(self.end((made * weight).sum(1)) + dense_B1).squeeze(1)


def rows(repetitions: int, costs: Path) -> Iterator[report.Row]:
    """Measure the merged net beside torch's fusions.

    Raises:
        BenchError: No layers were merged.
    """
    private_compiler()
    torch.manual_seed(1)
    net = Experts().eval()
    contexts = Contexts(dense=(True,), embeddings=(False,) * _INPUTS)
    tensors = named_tensors(net)
    with one_thread():
        with quiet_torch(), tempfile.TemporaryDirectory() as folder:
            program = reading.exported(net, tensors, contexts)
            graph = reading.read(program, list(tensors), contexts)
            known = MeasuredCosts(costs, candidates=_SAMPLES)
            found = search(graph, known, Check(graph, contexts, tensors).same)
            known.save()
            if "merge linears" not in found.steps:
                raise BenchError(f"the search merged nothing: it took {', '.join(found.steps)}")
            run = programs.exported_run(found.graph, contexts, tensors)
            merged = compiled(run, Path(folder), "merged")
            fused = compiled(program, Path(folder), "fused", **_FUSIONS)
        taken = programs.tensors_for_run(programs.tensors_of(found.graph), tensors)
        embeddings = torch.randn(_SAMPLES, _INPUTS)
        whole = (torch.zeros(_SAMPLES, 1), embeddings, *tensors.values())
        user = (torch.zeros(1, 1), torch.zeros(1, 0))
        of_user = torch.zeros(_SAMPLES, dtype=torch.int64)
        split = (*user, torch.zeros(_SAMPLES, 0), embeddings, of_user, *taken)
        ours, peer = list[float](), list[float]()
        with torch.no_grad():
            for _ in range(repetitions):
                peer.append(microseconds(lambda: fused(*whole)))
                ours.append(microseconds(lambda: merged(*split)))
    yield report.compare(
        (f"{_EXPERTS} layers of one input, {_SAMPLES} samples", "dense program", "us"),
        ours,
        peer,
        peer_name="AOTInductor with its own fusions",
        better="lower",
        target=1.0,
        claim="F.2",
    )
