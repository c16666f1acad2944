"""Whether a graph gives the scores of another one, on random inputs."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from embertide.trainer.model.rewrite.graph import Graph
from embertide.trainer.model.rewrite.programs import Run, tensors_for_run, tensors_of
from embertide.trainer.model.rewrite.reading import Contexts

TOLERANCE = 1e-6
"""How far scores may lie apart, as a share of the largest: fp32 sums in another order, no more."""

_USERS, _CANDIDATES = 3, 16
_SIZE = 0.3  # of inputs


class Check:
    """Compares graphs with one of the same net, whose scores it keeps.

    Parameters are near the version's own, and of their signs; zeros, which could hide something,
    are small numbers.
    """

    def __init__(
        self,
        graph: Graph,
        contexts: Contexts,
        tensors: Mapping[str, Tensor],
        *,
        one_user: bool = False,
    ) -> None:
        """Take the scores of `graph`.

        Args:
            graph: Before rewriting.
            contexts: Give the columns of its inputs.
            tensors: A version's, by name.
            one_user: Whether graphs are for a program of one user.
        """
        self._one_user = one_user
        users = 1 if one_user else _USERS
        generator = torch.Generator().manual_seed(29)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        rows = (users, users, _CANDIDATES, _CANDIDATES)
        pairs = zip(rows, contexts.widths(), strict=True)
        user_of_row = torch.randint(0, users, (_CANDIDATES,), generator=generator)
        # Small inputs keep sigmoids off their ends, where a score has its logit's absolute error.
        inputs = (_SIZE * random(count, width) for count, width in pairs)
        self._inputs = (*inputs, user_of_row)
        self._tensors = {
            name: torch.where(
                tensor == 0,
                0.05 * random(*tensor.shape),
                tensor * (1 + 0.1 * torch.rand(tensor.shape, generator=generator)),
            )
            for name, tensor in tensors.items()
        }
        self._scores = self._scored(graph)

    def difference(self, graph: Graph) -> float:
        """Return how far scores lie from those before, as a share of the largest of these."""
        largest = 0.0
        for now, before in zip(self._scored(graph), self._scores, strict=True):
            if torch.equal(now.isfinite(), before.isfinite()):
                finite = before.isfinite()
                off = (now - before)[finite].abs().max() if bool(finite.any()) else torch.tensor(0)
                scale = before[finite].abs().max() if bool(finite.any()) else torch.tensor(1)
                largest = max(largest, float(off) / max(float(scale), 1e-30))
            else:
                largest = math.inf
        return largest

    def same(self, graph: Graph) -> bool:
        """Whether scores are within the tolerance."""
        return self.difference(graph) <= TOLERANCE

    def _scored(self, graph: Graph) -> tuple[Tensor, ...]:
        with torch.no_grad():
            scores: tuple[Tensor, ...] = Run(graph, one_user=self._one_user)(
                *self._inputs, *tensors_for_run(tensors_of(graph), self._tensors)
            )
        return scores
