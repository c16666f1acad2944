"""Nets as graphs of contexts and candidates, and requests for both.

Shapes: U users, B candidates, D dense columns, E all embedding values of a sample.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig
from embertide.trainer.model.export import named_tensors
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.model.rewrite import programs, reading
from embertide.trainer.model.rewrite.check import Check
from embertide.trainer.model.rewrite.graph import Graph, Value
from embertide.trainer.model.rewrite.reading import Contexts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Net:
    """A module, its graph before rewriting, and what they are compared on.

    Attributes:
        lengths: Of the user's dense columns, those that say how many of so many items there are.
        gaps: Those that hold seconds.
    """

    module: nn.Module
    contexts: Contexts
    graph: Graph
    check: Check
    lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    gaps: Sequence[int] = ()

    @classmethod
    def of(cls, module: nn.Module, contexts: Contexts, **more: Any) -> "Net":
        """Read a module."""
        module.eval()
        tensors = named_tensors(module)
        with quiet_torch():
            program = reading.exported(module, tensors, contexts)
        graph = reading.read(program, list(tensors), contexts)
        check = Check(graph, contexts, tensors)
        return cls(module=module, contexts=contexts, graph=graph, check=check, **more)

    def difference(
        self, graph: Graph, users: int = 3, candidates: int = 7, *, one_user: bool = False
    ) -> float:
        """Return how far a graph's scores lie from the module's, as a share of the largest."""
        split, user_of_row = self.request(users, candidates)
        tensors = programs.tensors_for_run(programs.tensors_of(graph), named_tensors(self.module))
        with torch.no_grad():
            run = programs.Run(graph, one_user=one_user)
            (got,) = run(*split, user_of_row, *tensors)
            want = self.module(*joined(self.contexts, split, user_of_row)).reshape(-1)
        return float((got.reshape(-1) - want).abs().max() / want.abs().max())

    def request(self, users: int, candidates: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the inputs of a program for contexts, and the user of each candidate."""
        generator = torch.Generator().manual_seed(users * 1000 + candidates)
        pairs = zip((users, users, candidates, candidates), self.contexts.widths(), strict=True)
        split = tuple(0.3 * torch.randn(n, width, generator=generator) for n, width in pairs)
        dense = split[0]  # of users
        for column, length in self.lengths.items():
            dense[:, column] = torch.randint(1, length + 1, (users,), generator=generator).float()
        dense[:, list(self.gaps)] = 1e4 * dense[:, list(self.gaps)].abs()
        return split, torch.randint(0, users, (candidates,), generator=generator)


def joined(
    contexts: Contexts, split: tuple[Tensor, ...], user_of_row: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dense_BD and embeddings_BE of a request."""
    whole = []
    for of_context, at in ((contexts.dense, 0), (contexts.embeddings, 1)):
        mask = torch.tensor(of_context, dtype=torch.bool)
        columns = torch.empty(len(user_of_row), len(of_context))
        columns[:, mask], columns[:, ~mask] = split[at][user_of_row], split[at + 2]
        whole.append(columns)
    return whole[0], whole[1]


def of_features(config: ModelConfig, candidate: set[str]) -> Contexts:
    """Return contexts of all columns but those of some features."""
    columns = zip(config.columns, config.feature_widths, strict=True)
    return Contexts(
        dense=(True,) * config.dense_columns,
        embeddings=tuple(c.name not in candidate for c, width in columns for _ in range(width)),
    )


def drawn(seed: int, dense: int, embeddings: int) -> Contexts:
    """Return contexts of columns that are drawn, in runs."""
    draw = random.Random(seed)

    def marks(width: int) -> tuple[bool, ...]:
        found: list[bool] = []
        while len(found) < width:
            found += [draw.random() < 0.6] * draw.randint(1, 6)
        return tuple(found[:width])

    return Contexts(dense=marks(dense), embeddings=marks(embeddings))


def named(graph: Graph, operator: str) -> list[Value]:
    """Return the values of an operator."""
    return [value for value in graph.values if str(value.op).startswith(f"aten.{operator}.")]
