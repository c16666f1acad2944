"""What a training run is: model, optimisation, publishing. Configuration as code.

Every class is frozen and checked when it is made; a run is a `RunConfig`; those of the inputs that
we know stand in presets.py. `embertide train --print-config` shows the "Attributes" below as they
stand, so each says in plain words what its setting does and why the default is what it is.

Runs outlive builds: a checkpoint of an older build lacks the settings that are new. So a new
setting's default must mean what runs did before it existed. Where another default is better,
`field(default=..., metadata={BEFORE: ...})` gives the value that means the former behaviour. A run
of an older build then goes on with the same bytes (checkpoint/settings.py compares them).
"""

import dataclasses
import math
from typing import Literal, get_args

DenseStep = Literal["clip", "log1p", "standardise", "quantile", "bucketise"]
Pooling = Literal["sum", "mean"]
FeatureKeys = Literal["one", "list", "weighed"]
Optimizer = Literal["rowwise_adagrad", "adagrad", "sgd", "rowwise_adam"]  # of rows
Net = Literal["dlrm", "dcn_v2", "deepfm", "history"]
RowDtype = Literal["fp32", "fp16", "bf16", "int8"]
Utility = Literal["fisher", "squares", "norms", "accesses"]  # of rows and their chunks
NetDtype = Literal["fp32", "bf16"]
NetDevice = Literal["auto", "cpu", "cuda"]
Codec = Literal["fp32", "bf16", "fp16", "int8"]  # of what ranks exchange

BEFORE = "before"
"""In a field's metadata: the value that means what runs did before the setting existed."""

MOST_PUBLISHED = 496
"""Items of a history that fit a row: 16 chunks of 31 keys, in a block of the SSD tier."""

NO_TIME = 32.0
"""Half-lives before the origin that counts are reckoned from; they tell an event then from none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CountersConfig:
    """How often, of late, each key of a table was there: values of its rows that nobody learns.

    Of each half-life there are two: events, and those with label 1. A net sees log2(1 + count), as
    of the version that it belongs to, as columns of DENSE that no request carries.
    docs/design/0009-counters.md has the arithmetic.

    Attributes:
        feature: Whose events are counted, by its key; of this table.
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
        dtype: What a row is stored and served as: "fp32", "fp16", "bf16" or "int8".
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
    bucket_bits: int = 0
    init_scale: float = 0.05
    counters: CountersConfig | None = None

    def __post_init__(self) -> None:
        """Refuse a table that cannot be cut into chunks, or holds no counts."""
        if self.chunks < 1 or self.dim % self.chunks:
            raise ValueError(f"table {self.name!r}: dim {self.dim} is no multiple of {self.chunks}")
        if self.counters is not None and self.dtype != "fp32":
            raise ValueError(f"table {self.name!r}: counters need rows of fp32, not {self.dtype}")

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
            by the number of keys, weighed or not.
        keys: What an event has of it: "one" key, a "list" of any number of them, or a list of keys
            each with a weight, "weighed". That of the events' schema.
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
        if self.keys not in get_args(FeatureKeys):
            raise ValueError(
                f"feature {self.name!r}: keys is {self.keys!r}; use one of {get_args(FeatureKeys)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceConfig:
    """The items that a user liked last, newest first, made from the stream (data/history.py).

    It takes `length` columns of KEYS, `name`0 and so on, behind those of the features and in the
    table of `item`; and two of DENSE behind the model's own: how many of its places are taken, and
    whether the event's own item is among them.

    Attributes:
        name: What its columns are called by.
        user: The feature that says whose items.
        item: The feature whose keys are kept; its vector attends to the sequence.
        length: Items at most; each place costs a lookup.
        users: Most users remembered, about 300 bytes each; those not seen longest are forgotten.
        published: Whether versions carry the histories, as of their end: nodes then make the
            sequence's columns, and a request carries an event's own alone. It takes 12 bytes, and 8
            an item, of each user who changed since the version before. Off, requests have to carry
            the columns, as they had before there was a choice.
    """

    name: str
    user: str
    item: str
    length: int = 10
    users: int = 1_000_000
    published: bool = False

    def __post_init__(self) -> None:
        """Refuse a sequence of nothing."""
        for name in ("length", "users"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"sequence {self.name!r}: {name} is {getattr(self, name)}; give at least 1"
                )
        if self.published and self.length > MOST_PUBLISHED:
            raise ValueError(
                f"sequence {self.name!r}: length is {self.length}; at most {MOST_PUBLISHED} items "
                "fit a row that is published"
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
    def dense_columns(self) -> tuple[str, ...]:
        """Names of its columns of DENSE."""
        return f"{self.name}_length", f"{self.name}_repeat"


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
        points: Of "quantile", between which it is linear, and edges of "bucketise": 256 tell a
            share to 0.004, which is less than it matters.
        fill: What a missing value (null, NaN) reads as after the steps. Of "standardise", 0 is the
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
            if step not in get_args(DenseStep):
                raise ValueError(
                    f"dense feature {self.name!r}: step {step!r}; use {get_args(DenseStep)}"
                )
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Tables, the columns of a request, and the net over them (trainer/model says which).

    Attributes:
        name: The model's name.
        tables: The embedding tables; a table's place is its id.
        features: The sparse features, in the order of KEYS' columns.
        sequences: For the net "history", which needs one.
        dense: The model's own dense features, in the order of DENSE's columns.
        net: "dlrm", "dcn_v2", "deepfm" or "history".
        bottom_mlp: Hidden widths of the MLP over DENSE; its last layer has the embeddings' dim.
        top_mlp: Hidden widths of the MLP that gives the score; of DeepFM, the deep part.
        top_sees_embeddings: DLRM: whether the top MLP gets the embeddings beside their dot
            products. With few features the dot products alone lose what a single feature says;
            with many, the embeddings mostly make the first layer wide.
        cross_layers: DCN-v2: interactions of up to one feature more than that.
        cross_rank: DCN-v2: of a cross layer's matrix; 0: full.
        attention_mlp: History: hidden widths of what weighs an item.
    """

    name: str
    tables: tuple[TableConfig, ...]
    features: tuple[FeatureConfig, ...]
    sequences: tuple[SequenceConfig, ...] = ()
    dense: tuple[DenseConfig, ...] = ()
    net: Net = "dlrm"
    bottom_mlp: tuple[int, ...] = ()
    top_mlp: tuple[int, ...] = (128, 64)
    top_sees_embeddings: bool = True
    cross_layers: int = 3
    cross_rank: int = 0
    attention_mlp: tuple[int, ...] = (32,)

    def __post_init__(self) -> None:
        """Refuse columns without a table, repeated names, and nets that lack what they need."""
        if not self.features:
            raise ValueError(f"model {self.name!r} has no feature")
        tables, names, dense = (
            [each.name for each in of] for of in (self.tables, self.features, self.dense)
        )
        for what, named in (("tables", tables), ("features", names), ("dense features", dense)):
            if len(set(named)) < len(named):
                raise ValueError(f"model {self.name!r}: {what} repeat in {named}")
        self._check_crosses()
        published = [sequence.published for sequence in self.sequences]
        if published != sorted(published):
            raise ValueError(
                f"model {self.name!r}: sequences that are published stand behind the others, as "
                "nodes make the last columns of DENSE"
            )
        for sequence in self.sequences:
            for name in (sequence.user, sequence.item):
                if name not in names:
                    raise ValueError(
                        f"sequence {sequence.name!r} names feature {name!r}; there are {names}"
                    )
                keys = self.features[self.feature_index(name)].keys
                if keys != "one":
                    raise ValueError(
                        f"sequence {sequence.name!r}: feature {name!r} has keys={keys!r}; user and "
                        "item are one key an event"
                    )
            if sequence.published and sequence.table in tables:
                raise ValueError(
                    f"sequence {sequence.name!r} is published as table {sequence.table!r}, which "
                    "the model has: rename one"
                )
        for feature in self.columns:
            if feature.table not in tables:
                raise ValueError(
                    f"feature {feature.name!r} names table {feature.table!r}; there are {tables}"
                )
        self._check_counters()
        self._check_net()

    def _check_crosses(self) -> None:
        one = {feature.name for feature in self.event_features if feature.keys == "one"}
        for each in self.features[len(self.event_features) :]:
            if len(each.crossed) < 2 or not {*each.crossed} <= one or each.keys != "one":
                raise ValueError(
                    f"feature {each.name!r} crosses {each.crossed}: give two or more of features"
                    f" with keys='one', which are {sorted(one)}, behind all that cross none"
                )

    def _check_counters(self) -> None:
        for table in self.tables:
            if table.counters is None:
                continue
            of_table = [feature.name for feature in self.features if feature.table == table.name]
            for name in (table.counters.feature, *table.counters.readers):
                if name not in of_table:
                    raise ValueError(
                        f"table {table.name!r}: its counters name feature {name!r}; its features "
                        f"are {of_table}"
                    )
                keys = self.features[self.feature_index(name)].keys
                if keys != "one":
                    raise ValueError(
                        f"table {table.name!r}: its counters name feature {name!r}, which has "
                        f"keys={keys!r}; counts are of one key an event"
                    )

    def _check_net(self) -> None:
        if (self.net == "history") != bool(self.sequences):
            raise ValueError(
                f"model {self.name!r}: net {self.net!r} with {len(self.sequences)} sequences; "
                "the net 'history' takes sequences, and no other does"
            )
        if self.cross_layers < 1 or self.cross_rank < 0:
            raise ValueError(
                f"model {self.name!r}: cross_layers is {self.cross_layers}, cross_rank "
                f"{self.cross_rank}; give at least 1 and 0"
            )
        if not (self.top_sees_embeddings or self.dense or len(self.features) > 1):
            raise ValueError(
                f"model {self.name!r} has one feature, which has no dot product:"
                " set top_sees_embeddings"
            )

    def table_index(self, name: str) -> int:
        """Return the position of a table, which is also its id."""
        return next(i for i, table in enumerate(self.tables) if table.name == name)

    def feature_index(self, name: str) -> int:
        """Return the position of a feature, which is its column of KEYS."""
        return next(i for i, feature in enumerate(self.features) if feature.name == name)

    def table_of(self, feature: str) -> int:
        """Return the position of the table of a feature."""
        return self.table_index(self.features[self.feature_index(feature)].table)

    @property
    def event_features(self) -> tuple[FeatureConfig, ...]:
        """The features that events have; the others are crosses of them."""
        return tuple(feature for feature in self.features if not feature.crossed)

    @property
    def columns(self) -> tuple[FeatureConfig, ...]:
        """Every column of KEYS: the features, then the places of each sequence."""
        places = (
            FeatureConfig(name=name, table=self.features[self.feature_index(sequence.item)].table)
            for sequence in self.sequences
            for name in sequence.columns
        )
        return (*self.features, *places)

    @property
    def feature_dims(self) -> tuple[int, ...]:
        """The width of the embedding of each column of KEYS."""
        return tuple(self.tables[self.table_index(f.table)].dim for f in self.columns)

    @property
    def feature_widths(self) -> tuple[int, ...]:
        """What a lookup gives for each column of KEYS: the embedding, then counters."""
        return tuple(self.tables[self.table_index(f.table)].width for f in self.columns)

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The columns of DENSE, of a request as of an event: the model's, those of sequences."""
        sequences = (name for each in self.sequences for name in each.dense_columns)
        return (*(feature.name for feature in self.dense), *sequences)

    @property
    def dense_features(self) -> int:
        """Columns that transforms make of the model's own."""
        return sum(2 if feature.missing else 1 for feature in self.dense)

    @property
    def dense_columns(self) -> int:
        """Columns that the net gets: those that transforms make, and those of sequences."""
        return self.dense_features + len(self.raw_columns) - len(self.dense)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """One of the store's exact optimizers for rows, Adam for the dense net.

    The formulas stand in `backend_cpp/include/embertide/optimizer.h`. The default rates are for
    row-wise Adagrad on streams that we do not know; `globo_rates` has those of the news stream.

    Attributes:
        name: "rowwise_adagrad", what industry trains tables with, 4 bytes a row; "adagrad", "sgd"
            or "rowwise_adam". A checkpoint of one is refused by another.
        sparse_learning_rate: Of rows.
        dense_learning_rate: Of the dense net's Adam.
        epsilon: Added to roots; more than 0, or a gradient of zeros is divided by it.
        initial_accumulator: Of both Adagrads: where a new row's sum of squares begins. More makes
            its first steps smaller; with 0 the first is as long as the rate.
        beta1: Row-wise Adam's decay of first moments, as published.
        beta2: ... and of second moments.
        max_gradient_norm: Of one row's gradient in a batch, the L2 norm that it is scaled down to,
            counted in `clipped_gradients`; 0: none, for both Adagrads bound a step by themselves.
    """

    name: Optimizer = "rowwise_adagrad"
    sparse_learning_rate: float = 0.1
    dense_learning_rate: float = 0.002
    epsilon: float = 1e-8
    initial_accumulator: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    max_gradient_norm: float = 0.0

    def __post_init__(self) -> None:
        """Refuse numbers that cannot learn."""
        if self.name not in get_args(Optimizer):
            raise ValueError(f"optimizer {self.name!r}; use one of {get_args(Optimizer)}")
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
class PruneConfig:
    """Which rows stay while a model learns: those whose use, a byte, is the greatest.

    A table of one chunk is pruned by rows, one of several by chunks: `TableConfig.chunks`. Steps
    are batches. docs/design/0008-pruning.md has the rule and what the defaults were chosen by.

    Attributes:
        bytes: What rows may take, with their index entries, optimizer state and utilities, and what
            remembers keys without a row. 0: `ratio` says it.
        ratio: So many times less than the rows of all keys seen so far would take. 0: `bytes` says
            it.
        tables: Those that are pruned, together; none named: all.
        utility: What a chunk earns in a batch: its squared gradient ("squares"), the same by what
            is at stake in its table ("fisher"), the occurrences of its key times the gradient's
            norm ("norms", FIITED's), or its occurrences ("accesses").
        counts_worth: What the counts of a table with counters are worth, all together, of what its
            rows have learned; each row's in proportion to its events of late. A key may so keep its
            counts and nothing else. 0: they go with what the row has learned.
        half_life: Steps in which a utility halves: shorter follows a drift sooner, and forgets.
        first: Steps after which a pass is made ...
        every: ... and then after so many each ...
        least: ... or as few, if new rows find little room.
        least_room: What is little, as a share of the bytes of rows.
        max_age: Rows that no step updated in so many go, too; 0: none.
        waiting_bytes: For keys without a row, 4 bytes each. 0: a sixteenth of `bytes`, or with
            `ratio` 256 KiB.
    """

    bytes: int = 0
    ratio: float = 0.0
    tables: tuple[str, ...] = ()
    utility: Utility = "fisher"
    counts_worth: float = dataclasses.field(default=0.05, metadata={BEFORE: 0.0})
    half_life: int = 2000
    first: tuple[int, ...] = (20, 50, 100)
    every: int = 200
    least: int = 10
    least_room: float = 0.01
    max_age: int = 0
    waiting_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what no pass could do."""
        if (self.bytes > 0) == (self.ratio > 0) or self.bytes < 0 or self.ratio < 0:
            raise ValueError(
                f"prune: bytes is {self.bytes}, ratio {self.ratio}; give one of them, above 0"
            )
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

    def row_bytes(self, seen: int) -> int:
        """Return what rows may take, if those of all keys would take `seen`."""
        return self.bytes - self.waiting if self.bytes else int(seen / self.ratio)

    def due(self, step: int, since: int, room: float) -> bool:
        """Whether a pass follows a step.

        Args:
            step: Its number; the first is 1.
            since: Steps since the last pass.
            room: What new rows may still take, as a share of what rows may take.
        """
        short = room < self.least_room and since >= self.least
        return step in self.first or since >= self.every or short


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishBudget:
    """A bound on the bytes of versions: rows that moved farthest go first, the others wait.

    docs/design/0012-priority-deltas.md has the rule and what it costs in AUC.

    Attributes:
        bytes_per_s: Of row records, per second of event time. Rows that waited `max_age_versions`,
            and tombstones, go out beside it.
        max_age_versions: A changed row goes out after at most so many versions.
        image_bytes: Memory for the trainer's copy of what nodes hold: every row's payload and
            index a second time.
    """

    bytes_per_s: int
    max_age_versions: int = 1008
    image_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        """Refuse what bounds nothing."""
        for name in ("bytes_per_s", "max_age_versions", "image_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Codecs:
    """How what ranks exchange travels: docs/training.md, "Many ranks", has what each costs in AUC.

    Attributes:
        rows: "fp32"; "bf16" or "fp16", half the bytes; or "int8", a quarter and 4 bytes a row.
        gradients: The same, of rows' gradients; what int8 rounds off goes with a key's next one.
    """

    rows: Codec = "fp32"
    gradients: Codec = "fp32"

    def __post_init__(self) -> None:
        """Refuse a codec that does not exist."""
        for name in ("rows", "gradients"):
            if getattr(self, name) not in get_args(Codec):
                raise ValueError(
                    f"codecs: {name} is {getattr(self, name)!r}; use one of {get_args(Codec)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run. Two runs of equal configs over equal inputs give equal bytes.

    Attributes:
        model: Tables, features and dense net.
        optimizer: How rows and net learn.
        prune: Which rows stay; None: every key keeps its row.
        seed: Of the net and of new rows.
        batch_size: Events of a step, at least: a group of one time is never split. Small batches
            learn more from each event, large ones go faster.
        net_dtype: What the dense net multiplies in while it learns: "fp32", or "bf16", which is
            faster where the CPU has AMX. Weights, rows, and all that is served stay fp32.
        net_device: Where the dense net learns: "cpu", "cuda", or "auto", a GPU where torch has one.
            Rows are in the store on any, and nodes serve the net on the CPU. A run that goes on
            elsewhere learns the same within rounding, and repeats bit for bit on one of them alone.
        threads: Of torch and of the store's step, of each rank; a part of what repeats bit for bit.
        warmup_events: First events of a fresh run that transforms of dense features are fitted on
            before they are learned from, where a feature needs it. 50,000 tell a share to 0.005.
        ahead_bytes: What another thread reads and prepares ahead while a batch is learned, at
            most; 0 reads between steps. 64 MiB hold some chunks of a file, which are read at once.
        publish_every_s: Event time between versions, in seconds: how stale the served model gets.
        publish_budget: Bounds the bytes of versions; None: a version has every row that changed.
        snapshot_every: Versions from one snapshot, with its checkpoint, to the next: what a killed
            trainer learns again, and how many deltas a node that starts reads.
        keep_snapshots: Snapshots kept, with the deltas that follow the oldest. Two, so that nodes
            that load one while the next is written find it, and should one's checkpoint be harmed.
        keep_snapshots_s: Those of the last so many seconds of wall clock are kept, too.
        checkpoint_memory_bytes: Copies of rows that wait to be written as a checkpoint; beyond it
            training waits. The default has room for a model of 10^7 rows of 16 values.
        cpu: Baseline of the compiled dense program: the oldest CPU that is to serve it.
        bus_bytes: What the versions on the bus may take of its Redis; a larger one, and what nodes
            have not applied when newer ones need the room, goes by files alone. 512 MiB hold a
            minute or two of a full write rate.
        devices: CPU arenas that share the budgets; nothing that is learned depends on it, but for
            which of several new rows finds the last room where rows are pruned.
        ddr_budget_bytes: Memory of rows, optimizer state and index, of each rank; what exceeds it
            is refused and counted where there is no SSD.
        ssd_budget_bytes: Disk for rows that memory does not hold; 0 does without.
        ssd_directory: Where they lie; needed with a budget.
        most_set_aside: Batches in a row that may be put aside, as they would make the net not
            finite; one more ends the run.
        codecs: How rows and gradients travel between ranks; of no matter to one rank.
    """

    model: ModelConfig
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    prune: PruneConfig | None = None
    seed: int = 1
    batch_size: int = 256
    net_dtype: NetDtype = "fp32"
    net_device: NetDevice = "auto"
    threads: int = 1
    warmup_events: int = 50_000
    ahead_bytes: int = 64 << 20
    publish_every_s: int = 600
    publish_budget: PublishBudget | None = None
    snapshot_every: int = 6
    keep_snapshots: int = 2
    keep_snapshots_s: int = 0
    checkpoint_memory_bytes: int = 1 << 30
    cpu: str = "x86-64-v3"
    bus_bytes: int = 512 << 20
    devices: int = 1
    ddr_budget_bytes: int = 4 << 30
    ssd_budget_bytes: int = 0
    ssd_directory: str = ""
    most_set_aside: int = 20
    codecs: Codecs = dataclasses.field(default_factory=Codecs)

    def __post_init__(self) -> None:
        """Refuse counts below one."""
        counts = ("batch_size", "threads", "publish_every_s", "snapshot_every", "keep_snapshots")
        for name in (
            *counts,
            "devices",
            "checkpoint_memory_bytes",
            "warmup_events",
            "most_set_aside",
            "bus_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.net_dtype not in get_args(NetDtype):
            raise ValueError(f"net_dtype is {self.net_dtype!r}; use one of {get_args(NetDtype)}")
        if self.net_device not in get_args(NetDevice):
            raise ValueError(f"net_device is {self.net_device!r}; use one of {get_args(NetDevice)}")
        names = [table.name for table in self.model.tables]
        for table in self.prune.tables if self.prune is not None else ():
            if table not in names:
                raise ValueError(f"prune names table {table!r}; there are {names}")
        if self.ahead_bytes < 0:
            raise ValueError(f"ahead_bytes is {self.ahead_bytes}; 0 reads between steps")
