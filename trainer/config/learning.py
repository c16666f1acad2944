"""How rows and the dense net learn, and which rows stay."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from embertide.trainer.config.changes import ALLOWED, BEFORE, CHANGE, allowed, fixed
from embertide.trainer.config.choices import check_choice
from embertide.trainer.config.model import check_plain
from embertide.trainer.config.user_objects import name_of

Optimizer = Literal["rowwise_adagrad", "adagrad", "sgd", "rowwise_adam"]  # of rows
Utility = Literal["fisher", "squares", "norms", "accesses"]  # of rows and their chunks

FIRST_RATIO = 2.0
"""Where pruning within a bound begins: half of the bytes of the news cost nothing."""

SCHEDULES = ("warmup_cosine", "step")
"""Those of ours."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the dense net's learning rate changes from step to step.

    Attributes:
        name: "warmup_cosine": a linear rise over `warmup_steps`, then half a cosine down to
            `factor` at `steps`, where it stays. "step": times `factor` after every `steps`. Or a
            class like those of torch.optim.lr_scheduler. It is kept as text, as
            "torch.optim.lr_scheduler:ExponentialLR", which may also be given.
        warmup_steps: Steps of the rise.
        steps: See `name`; a step is a batch that was learned.
        factor: A share of `dense_learning_rate`.
        arguments: Arguments of a class beside the optimizer. Its rates are shares of
            `dense_learning_rate`: the optimizer that it gets has a rate of 1.
    """

    name: str | type = dataclasses.field(metadata={CHANGE: ALLOWED})
    warmup_steps: int = allowed(0)
    steps: int = allowed(0)
    factor: float = allowed(0.0)
    arguments: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, hash=False, metadata={CHANGE: ALLOWED}
    )

    def __post_init__(self) -> None:
        """Refuse what says no rate."""
        name = name_of("schedule", self.name)
        object.__setattr__(self, "name", name)
        if name not in SCHEDULES and ":" not in name:
            raise ValueError(
                f"schedule {name!r}; use one of {', '.join(SCHEDULES)}, or a class as"
                " torch.optim.lr_scheduler:ExponentialLR"
            )
        check_plain(f"schedule {self.name!r}: arguments", self.arguments)
        if self.name not in SCHEDULES:
            return
        if self.arguments:
            raise ValueError(f"schedule {self.name!r} takes no arguments; it has settings")
        least = self.warmup_steps + 1
        if self.warmup_steps < 0 or self.steps < least:
            raise ValueError(
                f"schedule {self.name!r}: warmup_steps is {self.warmup_steps}, steps {self.steps};"
                " give 0 or more, and more than that"
            )
        if not 0 <= self.factor <= 1:
            raise ValueError(
                f"schedule {self.name!r}: factor is {self.factor}; give a share, from 0 to 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """One of the store's exact optimizers for rows, Adam for the dense net.

    The formulas stand in `backend_cpp/include/embertide/optimizer.h`. The default rates are for
    row-wise Adagrad on streams that we do not know; `news_rates` has those of the news stream.

    Attributes:
        name: "rowwise_adagrad", what industry trains tables with, 4 bytes a row; "adagrad", "sgd"
            or "rowwise_adam". A checkpoint of one is refused by another.
        sparse_learning_rate: Learning rate of rows.
        dense_learning_rate: Learning rate of the dense net's Adam.
        schedule: How that rate changes while the net learns; None: it stays.
        epsilon: Added to roots; more than 0, or a gradient of zeros is divided by it.
        initial_accumulator: The start of a new row's sum of squares in both Adagrads. More makes
            its first steps smaller; with 0 the first is as long as the rate.
        beta1: Row-wise Adam's decay of first moments, as published.
        beta2: ... and of second moments.
        max_gradient_norm: Bound on the L2 norm of one row's gradient in a batch; a longer one is
            scaled down to it and counted in `clipped_gradients`. 0: none, for both Adagrads bound a
            step by themselves.
    """

    name: Optimizer = fixed(
        "rowwise_adagrad", "the state of rows is that optimizer's", carried=True
    )
    sparse_learning_rate: float = allowed(0.1)
    dense_learning_rate: float = allowed(0.002)
    schedule: ScheduleConfig | None = allowed(None)
    epsilon: float = allowed(1e-8)
    initial_accumulator: float = allowed(0.0)
    beta1: float = allowed(0.9)
    beta2: float = allowed(0.999)
    max_gradient_norm: float = allowed(0.0)

    def __post_init__(self) -> None:
        """Refuse numbers that cannot learn."""
        check_choice("optimizer", self.name, Optimizer)
        for name in ("sparse_learning_rate", "dense_learning_rate", "epsilon"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a positive number")
        for name in ("initial_accumulator", "max_gradient_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be 0 or a positive number")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more, less than 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionConfig:
    """A running correction of scores, part of each version (model/correction.py).

    Attributes:
        half_life: Events in which what was seen counts half: shorter follows a label rate that
            moves sooner, and is moved more by chance. As many as have some hundreds of positives;
            0: the run chooses, from 100 to 100,000 events or no correction at all, by the log loss.
        bound: The most that is added to a logit, or taken from it: 0.7 doubles or halves small
            scores.
    """

    half_life: int = allowed(100_000)
    bound: float = allowed(0.7)

    def __post_init__(self) -> None:
        """Refuse what corrects nothing."""
        if self.half_life < 0:
            raise ValueError(
                f"correction: half_life is {self.half_life}; give 1 event or more, or 0: the run"
                " chooses"
            )
        if not 0 < self.bound < math.inf:
            raise ValueError(f"correction: bound is {self.bound}; give a number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PruneConfig:
    """Which rows stay while a model learns: those whose use, a byte, is the greatest.

    A table of one chunk is pruned by rows, one of several by chunks: `TableConfig.chunks`. Steps
    are batches. docs/design/0008-pruning.md has the rule and what the defaults were chosen by.

    Attributes:
        bytes: Bound on the memory of rows, with their index entries, optimizer state and utilities,
            and the memory of keys without a row. 0: `ratio` says it.
        ratio: So many times less than the rows of all keys seen so far would take. 0: `bytes` says
            it. With `within`, the ratio that a run begins with; 0: 2.
        within: Bound on the AUC that pruning costs, as 0.001. Net and rows of all keys learn as if
            nothing were pruned; the rows that are served follow them. Each batch is scored with
            both, and the ratio follows the loss, so that loss and standard error together stay
            within the bound. It takes the bytes of all keys' rows beside the run's own, in fp32,
            and some more time. 0: nothing is measured; `bytes` or `ratio` says it all.
        measure_events: Events of a piece of the stream whose loss is measured, after which the
            ratio takes a step; with `within`. The half-life of what was measured is ten pieces.
        tables: Those that are pruned, together; none named: all.
        utility: The utility that a chunk earns in a batch: its squared gradient ("squares"), the
            same by the importance of its table ("fisher"), the occurrences of its key times the
            gradient's norm ("norms", FIITED's), or its occurrences ("accesses").
        counts_worth: The worth of all counts of a table with counters, relative to that of all that
            its rows have learned; a row's share of it is in proportion to its recent events. A key
            may so keep its counts and nothing else. 0: they go with what the row has learned.
        half_life: Steps in which a utility halves: shorter follows a drift sooner, and forgets.
        first: Steps after which a pass is made ...
        every: ... and then after so many each ...
        least: ... or as few, if new rows find little room.
        least_room: The free space that counts as little, as a share of the bytes of rows.
        max_age: Rows that no step updated in so many go, too; 0: none.
        waiting_bytes: For keys without a row, 4 bytes each. 0: a sixteenth of `bytes`, or with
            `ratio` 256 KiB.
    """

    bytes: int = allowed(0)
    ratio: float = allowed(0.0)
    within: float = allowed(0.0)
    measure_events: int = allowed(25_000)
    tables: tuple[str, ...] = fixed((), "what pruning remembers is of those tables")
    utility: Utility = allowed("fisher")
    counts_worth: float = allowed(0.05, **{BEFORE: 0.0})
    half_life: int = allowed(2000)
    first: tuple[int, ...] = allowed((20, 50, 100))
    every: int = allowed(200)
    least: int = allowed(10)
    least_room: float = allowed(0.01)
    max_age: int = allowed(0)
    waiting_bytes: int = fixed(0, "what pruning remembers has that size")

    def __post_init__(self) -> None:
        """Refuse what no pass could do."""
        if not 0 <= self.within < 0.5:
            raise ValueError(f"prune: within is {self.within}; give a loss of AUC, as 0.001")
        if self.within > 0 and self.bytes > 0:
            raise ValueError(
                f"prune: bytes is {self.bytes}, and within {self.within} finds the bytes by itself:"
                " give one of them"
            )
        if self.measure_events < 1:
            raise ValueError(
                f"prune: measure_events is {self.measure_events}; it must be at least 1"
            )
        neither = self.ratio == 0 and self.within == 0
        if self.bytes < 0 or self.ratio < 0 or (self.bytes > 0) == (not neither):
            raise ValueError(
                f"prune: bytes is {self.bytes}, ratio {self.ratio}; give one of them, above 0"
            )
        check_choice("prune: utility", self.utility, Utility)
        if not 0 <= self.counts_worth < math.inf:
            raise ValueError(f"prune: counts_worth is {self.counts_worth}; give 0 or more")
        for name in ("half_life", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"prune: {name} is {getattr(self, name)}; it must be at least 1")
        if 0 < self.bytes <= self.waiting_bytes:
            raise ValueError(
                f"prune: waiting_bytes is {self.waiting_bytes}, which leaves nothing of bytes ="
                f" {self.bytes} for rows"
            )

    @property
    def waiting(self) -> int:
        """Bytes of what remembers keys without a row."""
        return self.waiting_bytes or (self.bytes // 16 if self.bytes else 256 << 10)

    @property
    def first_ratio(self) -> float:
        """The ratio that a run begins with; 0: `bytes` says it."""
        return self.ratio or (FIRST_RATIO if self.within else 0.0)

    def row_bytes(self, seen: int, ratio: float | None = None) -> int:
        """Return what rows may take, if those of all keys would take `seen`.

        `ratio` is the one that a bound has led to; None: the one that a run begins with.
        """
        if self.bytes:
            return self.bytes - self.waiting
        return int(seen / (self.first_ratio if ratio is None else ratio))

    def due(self, step: int, since: int, room: float) -> bool:
        """Whether a pass follows a step.

        Args:
            step: Its number; the first is 1.
            since: Steps since the last pass.
            room: The free space for new rows, as a share of the bytes that rows may take.
        """
        short = room < self.least_room and since >= self.least
        return step in self.first or since >= self.every or short
