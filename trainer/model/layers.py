"""The parts of nets: MLPs, and the vectors that they begin with.

Shapes: B samples, D dense features, E all embedding values of a sample, F vectors of width d.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from embertide.trainer.config import NO_TIME, ModelConfig

_LN2 = math.log(2)
_COUNT_SCALE = 1 / 8  # so that log2 counts of some hundreds are numbers near 1


def mlp(widths: tuple[int, ...], *, last_relu: bool) -> nn.Sequential:
    """Return linear layers from each width to the next, with ReLUs between them."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if last_relu or i + 2 < len(widths):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def bias_of(layers: nn.Sequential) -> Tensor:
    """Return the bias of the last layer."""
    last = layers[-1]
    assert isinstance(last, nn.Linear)
    return last.bias


def value_names(vectors: Sequence[str], dims: Iterable[int]) -> list[str]:
    """Return the names of the values of vectors, one vector after the other."""
    return [f"{vector}:{d}" for vector, d in itertools.product(vectors, dims)]


class LearnedDefaults(nn.Module):
    """Gives features whose embedding is zeros, as without a row, a vector of the net's own.

    A row that has learned is not of zeros. A bag is without if none of its keys has a row. The
    gradient goes to the embedding as well, so that its key may earn a row by it.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build for the features that ask for one; L of them."""
        super().__init__()
        learned = [f for f, each in enumerate(config.features) if each.learned_default]
        of_LE = torch.zeros(len(learned), sum(config.feature_dims))
        begin = list(itertools.accumulate(config.feature_dims, initial=0))
        for row_E, f in zip(of_LE, learned, strict=True):
            row_E[begin[f] : begin[f + 1]] = 1
        self.register_buffer("of_LE", of_LE, persistent=False)
        self.default_E = nn.Parameter(torch.zeros(of_LE.shape[1]))

    def forward(self, embeddings_BE: Tensor) -> Tensor:
        """Return embeddings_BE with the defaults in them."""
        assert isinstance(self.of_LE, Tensor)
        filled_BE = (embeddings_BE != 0).to(embeddings_BE.dtype)
        lacks_BL = ((filled_BE @ self.of_LE.T) == 0).to(embeddings_BE.dtype)
        return embeddings_BE + lacks_BL @ (self.of_LE * self.default_E)


def _slices(names: Sequence[str], widths: Sequence[int]) -> dict[str, slice]:
    """Return where each of the columns that lie side by side is."""
    ends = itertools.accumulate(widths)
    return {
        name: slice(end - width, end) for name, width, end in zip(names, widths, ends, strict=True)
    }


class Columns(nn.Module):
    """The inputs of a net, in its form: counters are taken out of embeddings, into DENSE.

    Features without a row get their learned default. Its buffer `now_C`, one number a counter that
    is read, belongs to a version as parameters do.

    Attributes:
        embedding: By the name of a feature, or of a place of a sequence: its columns of the
            embeddings that this gives.
        dense: By the name of a dense feature (its value, then whether it is missing if it has that
            column) or of a sequence's column: its columns of what this gives as DENSE.
        dense_width: Columns of that, the counters behind all others counted.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build for the columns of a model."""
        super().__init__()
        self.config = config
        self.widths = list(config.feature_widths)
        self.dims = config.feature_dims
        names = [feature.name for feature in config.columns]
        readers = [
            (names.index(name), table.counters)
            for table in config.tables
            if table.counters is not None
            for name in table.counters.readers
        ]
        self.readers = [(f, counters.values) for f, counters in readers]
        half_lives = [
            half_life
            for _, counters in readers
            for half_life in counters.half_lives_s
            for _ in ("events", "positives")
        ]
        self.counters = len(half_lives)
        if half_lives:
            self.half_lives_C = torch.tensor(half_lives, dtype=torch.float64)
            self.register_buffer("now_C", torch.full((self.counters,), NO_TIME))
        learned = any(feature.learned_default for feature in config.features)
        self.defaults = LearnedDefaults(config) if learned else nn.Identity()
        self.embedding = _slices(names, self.dims)
        own = [2 if feature.missing else 1 for feature in config.dense]
        widths = own + [1] * (len(config.raw_columns) - len(own))
        self.dense = _slices(config.raw_columns, widths)
        self.dense_width = sum(widths) + self.counters

    @property
    def dense_names(self) -> list[str]:
        """Name the dense columns that a net sees: those of DENSE, then counts."""
        names: list[str] = []
        for feature in self.config.dense:
            names += [feature.name, f"{feature.name}?"] if feature.missing else [feature.name]
        names += self.config.raw_columns[len(self.config.dense) :]
        for table in self.config.tables:
            if table.counters is None:
                continue
            for reader, half_life, of in itertools.product(
                table.counters.readers, table.counters.half_lives_s, ("events", "positives")
            ):
                names.append(f"{reader}/{half_life}/{of}")
        return names

    def axes(self) -> dict[str, tuple[list[str] | None, ...]]:
        """Name the positions of the tensors that depend on columns, as carry.py takes them."""
        if isinstance(self.defaults, nn.Identity):
            return {}
        names = [
            f"{column.name}:{d}"
            for column, dim in zip(self.config.columns, self.dims, strict=True)
            for d in range(dim)
        ]
        return {"defaults.default_E": (names,)}

    def set_now(self, since_origin_s: float) -> None:
        """Say which time counts are as of."""
        if self.counters:
            now_C = NO_TIME + since_origin_s / self.half_lives_C
            self.get_buffer("now_C").copy_(now_C)

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> tuple[Tensor, Tensor]:
        """Return dense_BD with the counts that the net sees, and embeddings_BE without any."""
        if not self.counters:
            return dense_BD, self.defaults(embeddings_BE)
        parts = embeddings_BE.split(self.widths, dim=1)
        log_BC = torch.cat([parts[f][:, self.dims[f] :][:, :n] for f, n in self.readers], dim=1)
        assert isinstance(self.now_C, Tensor)
        # log2(1 + 2^(log - now)), of numbers of some ten at most.
        count_BC: Tensor = nn.functional.softplus((log_BC - self.now_C) * _LN2) / _LN2
        vectors = [part[:, :dim] for part, dim in zip(parts, self.dims, strict=True)]
        dense_BD = torch.cat([dense_BD, count_BC * _COUNT_SCALE], dim=1)
        return dense_BD, self.defaults(torch.cat(vectors, dim=1))


class VectorNet(nn.Module):
    """A net that begins with vectors of one width; what becomes of them is the subclass's.

    They are the embeddings of the features. Dense features, through a bottom MLP, are one more
    vector, the first.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build the bottom MLP.

        Raises:
            ValueError: The features' dims differ.
        """
        super().__init__()
        widths = set(config.feature_dims)
        if len(widths) != 1:
            raise ValueError(
                f"net {config.net!r} needs features of one dim, not {sorted(widths)}: give their "
                "tables one"
            )
        self.dim = widths.pop()
        self.columns = Columns(config)
        dense = config.dense_features + self.columns.counters
        self.vectors = len(config.features) + (1 if dense else 0)
        self.bottom = mlp((dense, *config.bottom_mlp, self.dim), last_relu=True) if dense else None

    @property
    def vector_names(self) -> list[str]:
        """Name the vectors, in their order."""
        features = [feature.name for feature in self.columns.config.features]
        return features if self.bottom is None else ["DENSE", *features]

    def axes(self) -> dict[str, tuple[list[str] | None, ...]]:
        """Name the positions of the tensors that depend on columns, as carry.py takes them."""
        named = {f"columns.{name}": axes for name, axes in self.columns.axes().items()}
        if self.bottom is None:
            return named
        last = len(self.bottom) - 2  # a ReLU is behind it
        values = value_names(["DENSE"], range(self.dim))
        named[f"bottom.{last}.weight"] = (values, None)
        named[f"bottom.{last}.bias"] = (values,)
        named["bottom.0.weight"] = (values if last == 0 else None, self.columns.dense_names)
        return named

    def inputs(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return the vectors x_BFd."""
        columns: tuple[Tensor, Tensor] = self.columns(dense_BD, embeddings_BE)
        dense_BD, x_BE = columns
        if self.bottom is not None:
            x_BE = torch.cat([self.bottom(dense_BD), x_BE], dim=1)
        return x_BE.reshape(-1, self.vectors, self.dim)
