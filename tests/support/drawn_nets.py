"""Nets drawn by seed, of some operators each: what users might write.

Shapes: B samples.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

_WIDTH = 4  # of the vectors that products are of
_Step = Callable[[list[Tensor]], Tensor]


class DrawnNet(nn.Module):
    """(dense_BD, embeddings_BE) -> scores_B of `operators` operators, and one layer behind them."""

    def __init__(self, seed: int, operators: int, dense: int, embeddings: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self._draw = random.Random(seed)
        self._layers = nn.ModuleList()
        self._widths = [dense, embeddings]
        self._steps: list[_Step] = []
        for _ in range(operators):
            self._add()
        # The end takes the newest value and both inputs.
        self._last = [len(self._widths) - 1, 0, 1]
        self.end = nn.Linear(sum(self._widths[i] for i in self._last), 1)

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        values = [dense_BD, embeddings_BE]
        for step in self._steps:
            values.append(step(values))
        last = torch.cat([values[i] for i in self._last], dim=1)
        scores: Tensor = torch.sigmoid(self.end(last)).squeeze(1)
        return scores

    def _add(self) -> None:
        kinds = [self._linear, self._linear, self._function, self._cat, self._slice, self._norm]
        kinds += [self._pair, self._product, self._vectors, self._sum, self._scale]
        step, width = self._draw.choice(kinds)()
        self._steps.append(step)
        self._widths.append(width)

    def _one(self) -> int:
        return self._draw.randrange(len(self._widths))

    def _module(self, module: nn.Module) -> nn.Module:
        self._layers.append(module)
        return module

    def _linear(self) -> tuple[_Step, int]:
        i, width = self._one(), self._draw.randint(1, 12)
        layer = self._module(nn.Linear(self._widths[i], width, bias=self._draw.random() < 0.7))
        return lambda values: layer(values[i]), width

    def _function(self) -> tuple[_Step, int]:
        i = self._one()
        function = self._draw.choice([torch.relu, torch.tanh, torch.sigmoid, torch.square])
        return lambda values: function(values[i].clamp(-3, 3)), self._widths[i]

    def _cat(self) -> tuple[_Step, int]:
        several = [self._one() for _ in range(self._draw.randint(2, 4))]
        if sum(self._widths[i] for i in several) > 64:
            return self._linear()
        width = sum(self._widths[i] for i in several)
        return lambda values: torch.cat([values[i] for i in several], dim=1), width

    def _slice(self) -> tuple[_Step, int]:
        i = self._one()
        begin = self._draw.randrange(self._widths[i])
        end = self._draw.randint(begin + 1, self._widths[i])
        return lambda values: values[i][:, begin:end], end - begin

    def _norm(self) -> tuple[_Step, int]:
        i = self._one()
        if self._draw.random() < 0.5:
            norm = self._module(nn.LayerNorm(self._widths[i], eps=0.1))
        else:
            batch = nn.BatchNorm1d(self._widths[i])
            nn.init.uniform_(batch.weight, 0.5, 1.5)
            assert batch.running_mean is not None
            assert batch.running_var is not None
            nn.init.normal_(batch.running_mean)
            nn.init.uniform_(batch.running_var, 0.5, 2)
            norm = self._module(batch)
        return lambda values: norm(values[i]), self._widths[i]

    def _pair(self) -> tuple[_Step, int]:
        i = self._one()
        j = self._draw.choice([j for j, n in enumerate(self._widths) if n == self._widths[i]])
        kinds: list[Callable[[Tensor, Tensor], Tensor]]
        kinds = [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y]
        pick = self._draw.choice(kinds)
        return lambda values: pick(values[i], values[j]).clamp(-4, 4), self._widths[i]

    def _product(self) -> tuple[_Step, int]:
        wide = [i for i, n in enumerate(self._widths) if n >= 2 * _WIDTH and n % _WIDTH == 0]
        if not wide:
            return self._linear()
        i = self._draw.choice(wide)
        count = self._widths[i] // _WIDTH

        def products(values: list[Tensor]) -> Tensor:
            x_BFd = values[i].reshape(-1, count, _WIDTH)
            dots = torch.bmm(x_BFd, x_BFd.transpose(1, 2)).flatten(1)
            return dots.clamp(-4, 4)[:, : 4 * _WIDTH]

        return products, min(count * count, 4 * _WIDTH)

    def _vectors(self) -> tuple[_Step, int]:
        """One layer over each vector of a list, beside the first of them."""
        wide = [i for i, n in enumerate(self._widths) if n >= 2 * _WIDTH and n % _WIDTH == 0]
        if not wide:
            return self._linear()
        i = self._draw.choice(wide)
        layer = self._module(nn.Linear(3 * _WIDTH, 2))
        count = self._widths[i] // _WIDTH

        def beside(values: list[Tensor]) -> Tensor:
            x_BFd = values[i].reshape(-1, count, _WIDTH)
            first_BFd = x_BFd[:, :1].expand_as(x_BFd)
            made: Tensor = layer(torch.cat([x_BFd, first_BFd, x_BFd - first_BFd], dim=2))
            return made.flatten(1)

        return beside, 2 * count

    def _sum(self) -> tuple[_Step, int]:
        i = self._one()
        return lambda values: values[i].sum(1, keepdim=True).clamp(-4, 4), 1

    def _scale(self) -> tuple[_Step, int]:
        i = self._one()
        scale = nn.Parameter(torch.rand(self._widths[i]) + 0.5)
        self.register_parameter(f"scale{len(self._widths)}", scale)
        return lambda values: values[i] * scale, self._widths[i]
