"""The parts of a model: tables, features, sequences, dense features and counters."""

import dataclasses
import math
from typing import Literal

from embertide.trainer.config.choices import check_choice

DenseStep = Literal["clip", "log1p", "standardise", "quantile", "bucketise"]
Pooling = Literal["sum", "mean", "none"]
FeatureKeys = Literal["one", "list", "weighed"]
RowDtype = Literal["fp32", "fp16", "bf16", "int8"]
ServedDtype = Literal["fp32", "fp16", "bf16", "int8", "int4"]

_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}  # of a value

MAX_PUBLISHED = 496
"""Items of a history that fit a row: 16 chunks of 31 keys, in a block of the SSD tier."""

MAX_PUBLISHED_TIMED = 320
"""The same with times, two of which take a key: 16 chunks of 20 items and 10 keys of times."""

NO_TIME = 32.0
"""Half-lives before the origin that counts are reckoned from; they tell an event then from none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CountersConfig:
    """How often, of late, each key of a table was there: values of its rows that nobody learns.

    Of each half-life there are two: events, and those with label 1. A net sees log2(1 + count), as
    of the version that it belongs to, as columns of DENSE that no request carries.
    docs/design/0009-counters.md has the arithmetic.

    Attributes:
        feature: The feature whose events are counted, by its key; one of this table.
        read_by: Features of this table whose key's counts the net sees; none named: `feature`.
        half_lives_s: Seconds of event time in which a count halves. From minutes, for what is new,
            to a day, for what is popular at this hour; each takes 8 bytes a row.
    """

    feature: str
    read_by: tuple[str, ...] = ()
    half_lives_s: tuple[int, ...] = (600, 3600, 6 * 3600, 24 * 3600)

    def __post_init__(self) -> None:
        """Refuse half-lives that nothing decays by."""
        if not self.half_lives_s or min(self.half_lives_s) < 1:
            raise ValueError(
                f"counters of {self.feature!r}: half_lives_s is {self.half_lives_s}; give one or "
                "more, each at least 1"
            )

    @property
    def values(self) -> int:
        """Counters of a row."""
        return 2 * len(self.half_lives_s)

    @property
    def longest(self) -> int:
        """The counter of all events that halves most slowly."""
        return 2 * self.half_lives_s.index(max(self.half_lives_s))

    @property
    def readers(self) -> tuple[str, ...]:
        """The features whose counts the net sees."""
        return self.read_by or (self.feature,)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One embedding table.

    Attributes:
        name: Its name in snapshots, metrics and features.
        dim: Width of a row.
        chunks: Parts of a row that can be pruned apart; they divide dim. 1 prunes whole rows.
        dtype: The type in which a row is trained: "fp32", "fp16", "bf16" or "int8".
        served_dtype: The type in which versions and nodes have it, of fewer bits than `dtype`, or
            "int4": each version encodes what was trained, which stays in the trainer. None:
            `dtype`.
        bucket_bits: The table has 2^bucket_bits buckets for ever, the units of files, devices and
            moves: as many as give each about 10^5 of the rows expected. 0 suits small tables.
        init_scale: A new row's values lie between this and its negative, drawn from the key.
        counters: Counts of its keys' events, kept in chunks of their own behind the others; rows
            of fp32 only. None: none.
    """

    name: str
    dim: int = 16
    chunks: int = 1
    dtype: RowDtype = "fp32"
    served_dtype: ServedDtype | None = None
    bucket_bits: int = 0
    init_scale: float = 0.05
    counters: CountersConfig | None = None

    def __post_init__(self) -> None:
        """Refuse a table that cannot be cut into chunks, or holds no counts."""
        more = ", and served_dtype='int4': no step is large enough to train such rows"
        check_choice(
            f"table {self.name!r}: dtype",
            self.dtype,
            RowDtype,
            more if str(self.dtype) == "int4" else "",
        )
        if self.chunks < 1 or self.dim % self.chunks:
            raise ValueError(f"table {self.name!r}: dim {self.dim} is no multiple of {self.chunks}")
        served = self.served_dtype
        if served is not None:
            check_choice(f"table {self.name!r}: served_dtype", served, ServedDtype)
            if served != self.dtype and _BITS[served] >= _BITS[self.dtype]:
                raise ValueError(
                    f"table {self.name!r}: served_dtype is {served!r}, which has no fewer bits than"
                    f" {self.dtype!r}, in which rows are trained: leave it out, or train in fp32"
                )
        if served == "int4" and self.chunk_dim % 2:
            raise ValueError(
                f"table {self.name!r}: served_dtype is 'int4', which has two values a byte, and a"
                f" chunk has {self.chunk_dim}: give it an even number by dim and chunks, or 'int8'"
            )
        if self.counters is not None and (self.dtype, self.served) != ("fp32", "fp32"):
            other = self.served if self.dtype == "fp32" else self.dtype
            raise ValueError(
                f"table {self.name!r}: counters need rows of fp32, trained and served, not {other}"
            )

    @property
    def served(self) -> ServedDtype:
        """The type in which versions and nodes have a row."""
        return self.served_dtype or self.dtype

    @property
    def chunk_dim(self) -> int:
        """Values of a chunk."""
        return self.dim // self.chunks

    @property
    def counter_chunks(self) -> int:
        """Chunks that hold counters."""
        return 0 if self.counters is None else math.ceil(self.counters.values / self.chunk_dim)

    @property
    def width(self) -> int:
        """Values of a row: what is learned, then counters."""
        return self.dim + self.counter_chunks * self.chunk_dim


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FeatureConfig:
    """One sparse feature: a column of KEYS, the table of its keys, how a bag is pooled.

    Attributes:
        name: The feature's name; that of the events' schema, in lower case.
        table: The table of its keys; features may share one.
        pooling: How a bag of several keys becomes one embedding: "sum" or "mean"; a mean is divided
            by the number of keys, weighed or not. "none", the row of each key, is for models
            without a net, which `import` makes.
        keys: The form of it in an event: "one" key, a "list" of any number of them, or a list of
            keys each with a weight, "weighed". That of the events' schema.
        learned_default: Whether the net learns a vector for keys without a row, which else read as
            zeros. It pays where keys stay for good, and costs where each is new for a while: most
            steps then see its first use alone, which is not as the others.
        crossed: Features of one key an event whose keys together are this one's. Neither events
            nor requests need a column of it: trainer and nodes make it (data/crosses.py). Crosses
            stand behind other features.
    """

    name: str
    table: str
    pooling: Pooling = "sum"
    keys: FeatureKeys = "one"
    learned_default: bool = False
    crossed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what an event cannot have."""
        check_choice(f"feature {self.name!r}: pooling", self.pooling, Pooling)
        check_choice(f"feature {self.name!r}: keys", self.keys, FeatureKeys)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceConfig:
    """The items that a user liked last, newest first, made from the stream (data/history.py).

    It takes `length` columns of KEYS, `name`0 and so on, behind those of the features and in the
    table of `item`; and two of DENSE behind the model's own: how many of its places are taken, and
    whether the event's own item is among them. With `times` it takes `length` more: the seconds
    from each item to the newest one, `name`_gap0 and so on.

    Attributes:
        name: The prefix of its columns' names.
        user: The feature that says whose items.
        item: The feature whose keys are kept; its vector attends to the sequence.
        length: Items at most; each place costs a lookup.
        users: Most users remembered, about 300 bytes each; those not seen longest are forgotten.
        published: Whether versions carry the histories, as of their end: nodes then make the
            sequence's columns, and a request carries an event's own alone. It takes 12 bytes, and 8
            an item, 12 with times, of each user who changed since the version before. Off, requests
            have to carry the columns, as they had before there was a choice.
        times: Whether the time of each item is kept, too, for the net "hstu" or one of your own: 8
            bytes more an item.
    """

    name: str
    user: str
    item: str
    length: int = 10
    users: int = 1_000_000
    published: bool = False
    times: bool = False

    def __post_init__(self) -> None:
        """Refuse a sequence of nothing."""
        for name in ("length", "users"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"sequence {self.name!r}: {name} is {getattr(self, name)}; give at least 1"
                )
        most = MAX_PUBLISHED_TIMED if self.times else MAX_PUBLISHED
        if self.published and self.length > most:
            timed = " with times" if self.times else ""
            raise ValueError(
                f"sequence {self.name!r}: length is {self.length}; at most {most} items{timed} fit"
                " a row that is published"
            )

    @property
    def table(self) -> str:
        """The table of histories that versions carry, if it is published."""
        return f"{self.name}_of_{self.user}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of its columns of KEYS."""
        return tuple(f"{self.name}{place}" for place in range(self.length))

    @property
    def gap_columns(self) -> tuple[str, ...]:
        """Names of the columns of DENSE that say when items were liked; none without times."""
        return tuple(f"{self.name}_gap{place}" for place in range(self.length if self.times else 0))

    @property
    def dense_columns(self) -> tuple[str, ...]:
        """Names of its columns of DENSE."""
        return (f"{self.name}_length", f"{self.name}_repeat", *self.gap_columns)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """One dense feature: a column of DENSE, and what is done to it before the net sees it.

    What steps need to know of the values is fitted once, on a run's first events
    (`RunConfig.warmup_events`), and is from then on a part of the model: nodes do the same to what
    requests carry. `backend_cpp/include/embertide/transform.h` has the formulas.

    Attributes:
        name: The feature's name; that of the events' schema, in lower case.
        steps: Done one after the other: "clip", "log1p", "standardise" (mean 0, deviation 1),
            "quantile" (the share of values below) or "bucketise" (the same in steps). The default
            suits counts and prices, which are more even on a logarithmic scale, and fits nothing.
        clip: The shares of the values that "clip" cuts at: a thousandth at either end, so that
            few values that are far from all others do not rule mean and deviation.
        points: Points of "quantile", between which it is linear, and edges of "bucketise": 256 tell
            a share to 0.004, which is less than it matters.
        fill: The value for a missing one (null, NaN) after the steps. Of "standardise", 0 is the
            mean.
        missing: Whether the net gets a second column, 1 where the value is missing and else 0.
    """

    name: str
    steps: tuple[DenseStep, ...] = ("log1p",)
    clip: tuple[float, float] = (0.001, 0.999)
    points: int = 256
    fill: float = 0.0
    missing: bool = False

    def __post_init__(self) -> None:
        """Refuse what the store's library would."""
        for step in self.steps:
            check_choice(f"dense feature {self.name!r}: a step", step, DenseStep)
        if len(self.steps) > 8:
            raise ValueError(
                f"dense feature {self.name!r} has {len(self.steps)} steps; give 8 at most"
            )
        if not 0 <= self.clip[0] < self.clip[1] <= 1:
            raise ValueError(
                f"dense feature {self.name!r}: clip is {self.clip}; give two shares from 0 to 1"
            )
        if not 2 <= self.points <= 256:
            raise ValueError(f"dense feature {self.name!r}: points is {self.points}; give 2 to 256")
        if not abs(self.fill) <= 3e38:
            raise ValueError(f"dense feature {self.name!r}: fill is {self.fill}; give a number")

    @property
    def fitted(self) -> bool:
        """Whether a step is fitted."""
        return any(step != "log1p" for step in self.steps)
