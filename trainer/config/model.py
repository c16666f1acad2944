"""A model: tables, the columns of a request, and the net over them."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from embertide.trainer.config.changes import because, fixed
from embertide.trainer.config.context import check_context
from embertide.trainer.config.tables import (
    DenseConfig,
    FeatureConfig,
    SequenceConfig,
    TableConfig,
)
from embertide.trainer.config.user_objects import name_of

NETS = ("dlrm", "dcn_v2", "deepfm", "history", "hstu")
"""Those of ours."""

NETS_OF_SEQUENCES = ("history", "hstu")
"""Those of them that need sequences; no other takes any."""

MAX_HEADS = 64
"""Heads that a manifest may name."""


def check_plain(what: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a checkpoint cannot keep as JSON."""
    try:
        same = json.loads(json.dumps(arguments)) == arguments
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"{what} is {arguments!r}; give a dict of names to numbers, texts, lists and dicts,"
            " which a checkpoint can keep"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """One of several tasks that a net learns together.

    Attributes:
        name: The column of its label, 0 or 1. A null in that of any head but the first is
            unknown, and this head does not learn from the event.
        weight: The weight of its loss in the sum of all.
    """

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what does not count."""
        if not 0 < self.weight < math.inf:
            raise ValueError(f"head {self.name!r}: weight is {self.weight}; give more than 0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Tables, the columns of a request, and the net over them (trainer/model says which).

    Attributes:
        name: The model's name.
        tables: The embedding tables; a table's place is its id.
        features: The sparse features, in the order of KEYS' columns.
        sequences: For the nets "history" and "hstu", which need one, or a net of your own.
        dense: The model's own dense features, in the order of DENSE's columns.
        net: "dlrm", "dcn_v2", "deepfm", "history" or "hstu"; or a class of your own, an nn.Module
            (docs/training.md). It is kept as text, "package.module:Class", which may also be given;
            the module of a run's file is "run_file".
        net_arguments: Arguments of your class beside the model: names and plain data, as JSON has
            it.
        heads: Tasks, for each of which the net gives a logit: the events' labels, in their order.
            None named: one, of the events' label. Nodes serve the score of each.
        context: Features and columns of DENSE that are the user's, as `serve --context` has them:
            the dense program then computes what depends on them alone once a user. Crosses and
            histories of them are, too.
        bottom_mlp: Hidden widths of the MLP over DENSE; its last layer has the embeddings' dim.
        top_mlp: Hidden widths of the MLP that gives the score; of DeepFM, the deep part.
        top_sees_embeddings: DLRM: whether the top MLP gets the embeddings beside their dot
            products. With few features the dot products alone lose what a single feature says;
            with many, the embeddings mostly make the first layer wide.
        cross_layers: DCN-v2: interactions of up to one feature more than that.
        cross_rank: DCN-v2: of a cross layer's matrix; 0: full.
        attention_mlp: History: hidden widths of what weighs an item.
        sequence_layers: HSTU: layers over a sequence.
        sequence_heads: HSTU: heads of a layer's attention; they divide the tables' dim.
    """

    name: str
    tables: tuple[TableConfig, ...] = dataclasses.field(
        metadata=because("rows of tables have that form, in every snapshot and node")
    )
    features: tuple[FeatureConfig, ...] = dataclasses.field(
        metadata=because("requests and the dense net have those columns")
    )
    sequences: tuple[SequenceConfig, ...] = fixed(
        (), "requests and the dense net have those columns"
    )
    dense: tuple[DenseConfig, ...] = fixed(
        (), "requests have those columns, and their transforms are fitted"
    )
    net: str | type = "dlrm"
    net_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    heads: tuple[HeadConfig, ...] = ()
    context: tuple[str, ...] = fixed((), "the folder's dense program is compiled for it")
    bottom_mlp: tuple[int, ...] = ()
    top_mlp: tuple[int, ...] = (128, 64)
    top_sees_embeddings: bool = True
    cross_layers: int = 3
    cross_rank: int = 0
    attention_mlp: tuple[int, ...] = (32,)
    sequence_layers: int = 2
    sequence_heads: int = 2

    def __post_init__(self) -> None:
        """Refuse columns without a table, repeated names, and nets that lack what they need."""
        object.__setattr__(self, "net", name_of("net", self.net))
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
            if feature.pooling == "none":
                raise ValueError(
                    f"feature {feature.name!r}: pooling is 'none', and a net takes one vector a "
                    "feature: use 'sum' or 'mean'"
                )
        self._check_counters()
        self._check_net()
        self._check_heads()
        check_context(self)

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
        if self.net not in NETS and ":" not in self.net_name:
            raise ValueError(
                f"there is no net {self.net!r}; use one of {', '.join(NETS)}, or a class of your"
                " own: net=Tower, or as text package.module:Class, which is run_file:Class if the"
                " run's file has it"
            )
        self._check_arguments()
        if not self.is_own_net and (self.net in NETS_OF_SEQUENCES) != bool(self.sequences):
            raise ValueError(
                f"model {self.name!r}: net {self.net!r} with {len(self.sequences)} sequences; "
                "of ours the nets 'history' and 'hstu' take sequences, and no other does"
            )
        if self.sequence_layers < 1 or self.sequence_heads < 1:
            raise ValueError(
                f"model {self.name!r}: sequence_layers is {self.sequence_layers}, sequence_heads "
                f"{self.sequence_heads}; give at least 1"
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

    def _check_arguments(self) -> None:
        if self.net_arguments and not self.is_own_net:
            raise ValueError(
                f"model {self.name!r}: net {self.net!r} takes no net_arguments; it has settings"
            )
        check_plain(f"model {self.name!r}: net_arguments", self.net_arguments)

    def _check_heads(self) -> None:
        names = [head.name for head in self.heads]
        if len(set(names)) < len(names):
            raise ValueError(f"model {self.name!r}: heads repeat in {names}")
        if len(names) > MAX_HEADS:
            raise ValueError(
                f"model {self.name!r} has {len(names)} heads; give {MAX_HEADS} at most"
            )
        if len(names) > 1 and self.net == "deepfm":
            raise ValueError(
                f"model {self.name!r}: net 'deepfm' has one output, for {len(names)} heads; use"
                " another net, or one of your own"
            )

    @property
    def net_name(self) -> str:
        """The net as text."""
        return name_of("net", self.net)

    @property
    def is_own_net(self) -> bool:
        """Whether the net is a class of the user's."""
        return self.net not in NETS

    @property
    def outputs(self) -> int:
        """Logits that the net gives a sample."""
        return max(len(self.heads), 1)

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
        """Width of a lookup's result for each column of KEYS: the embedding, then counters."""
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
