"""The inputs of a model, as its configuration in Triton tells; `embertide serve` wrote it there."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from embertide._common.quoting import shown
from embertide.client.bins import Bins
from embertide.client.errors import ClientError

# The backend's defaults where the configuration says nothing (docs/serving.md, Parameters).
_MAX_SAMPLES, _MAX_KEYS, _MAX_OUTPUT_BYTES = 4096, 1 << 18, 256 << 20
# Bounds on the figures that a server tells; a server beyond them is not one of ours.
_COUNTS = range(1, 1 << 40)
_MAX_COLUMNS, _MAX_DIM, _MAX_EDGE = 1 << 16, 1 << 20, 3.5e38
_OF_FEATURE = {"name", "dim", "pooling", "weighed", "made"}
_POOLINGS = ("sum", "mean", "none")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One column of KEYS.

    Attributes:
        name: As the trainer calls it.
        dim: Length of its vector.
        pooling: "sum", "mean", or "none": a row for each key.
        weighed: Each key has a weight.
        made: The node can make the column, so that a call may leave it out.
        bins: The client makes the column, of one of DENSE: its key is a bin of that; else None.
        text: Keys are hashes of texts, which the client makes where a caller has those.
    """

    name: str
    dim: int
    pooling: str = "sum"
    weighed: bool = False
    made: bool = False
    bins: Bins | None = None
    text: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The inputs and outputs of a model. Immutable.

    Attributes:
        model: Its name in Triton.
        ranking: Whether it gives scores; else embeddings.
        features: In the order of KEYS' columns.
        dense: Names of DENSE's columns that requests carry; None: it has `dense_columns`, unnamed.
        dense_columns: The number of them.
        dense_made: The number of further ones that the node makes, behind those.
        max_batch: Samples of a request, [B, F].
        max_samples: Samples of a request of either form.
        max_keys: Keys of a request.
        max_output_bytes: Bound on the bytes of its answer.
        lengths: Name of the tensor of the bags' lengths; `output`: of the answer.
        heads: Names of the scores, the first one's in `output`; "score" of one without a name.
        context: Features and columns of DENSE that requests may carry once a user.
    """

    model: str
    ranking: bool
    features: tuple[Feature, ...]
    dense: tuple[str, ...] | None = None
    dense_columns: int = 0
    dense_made: int = 0
    max_batch: int = 1
    max_samples: int = _MAX_SAMPLES
    max_keys: int = _MAX_KEYS
    max_output_bytes: int = _MAX_OUTPUT_BYTES
    lengths: str = "LENGTHS"
    output: str = "SCORE"
    heads: tuple[str, ...] = ("score",)
    context: tuple[str, ...] = ()

    def output_of(self, head: str) -> str:
        """Name the tensor of a head's scores."""
        return self.output if head == self.heads[0] else f"SCORE_{head}"

    def amount_of(self, bins: Bins) -> str:
        """Name the column of DENSE that bins are of."""
        return f"column {bins.dense} of dense" if self.dense is None else self.dense[bins.dense]

    @property
    def names(self) -> list[str]:
        """The features' names."""
        return [feature.name for feature in self.features]

    @classmethod
    def of(cls, config: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> "Schema":
        """Read Triton's configuration of a model; `given` is the schema of one that tells none.

        Raises:
            ClientError: It is no model of Embertide's, or tells no features and none are given.
        """
        name = str(config.get("name", ""))
        if config.get("backend") != "embertide":
            backend = config.get("backend") or config.get("platform")
            raise ClientError(
                f"model {name!r} is of backend {shown(backend)}: KServe v2 alone asks it"
            )
        try:
            return _read(cls, name, config, given)
        except _SchemaError as error:
            raise ClientError(f"model {name!r} does not tell its columns right: {error}") from None

    @classmethod
    def told(
        cls, response: Any, model: str, given: Mapping[str, Mapping[str, Any]] | None = None
    ) -> "Schema":
        """Read a ModelConfigResponse to the question for `model`; `given` are schemas by model.

        Raises:
            ClientError: As of `of`, or it is of another model.
        """
        config = json_format.MessageToDict(response.config, preserving_proto_field_name=True)
        if response.config.name != model:
            raise ClientError(
                f"model {model!r} was asked for, and the server told of "
                f"{shown(response.config.name)}"
            )
        return cls.of(config, (given or {}).get(model))


class _SchemaError(ValueError):
    """A model's description of itself cannot be right; the message says why."""


def _read(
    cls: type[Schema], name: str, config: Mapping[str, Any], given: Mapping[str, Any] | None
) -> Schema:
    said = {key: value.get("string_value", "") for key, value in config["parameters"].items()}
    told = dict(given) if given else _object(said.get("schema", ""))
    if not told:
        raise ClientError(
            f"model {name!r} does not tell its features: start it by `embertide serve` of this "
            f"release, or give schemas={{{name!r}: ...}} (docs/serving.md, Schema)"
        )
    dense = _field(told, "dense", dict, {})
    columns = _number(dense, "columns", 0, range(_MAX_COLUMNS + 1))
    names = _names(dense, "names") if dense.get("names") is not None else None
    if names is not None and len(names) != columns:
        raise _SchemaError(f"dense has {columns} columns, and {len(names)} names")
    inputs, outputs = (
        [str(tensor.get("name")) for tensor in config.get(kind, ())] for kind in ("input", "output")
    )
    return cls(
        model=name,
        ranking=said.get("kind") == "ranking",
        features=_features(told, columns, names),
        dense=names,
        dense_columns=columns,
        dense_made=_number(dense, "made", 0, range(_MAX_COLUMNS + 1)),
        max_batch=_number(config, "max_batch_size", 1, _COUNTS),
        max_samples=_number(said, "max_samples", _MAX_SAMPLES, _COUNTS),
        max_keys=_number(said, "max_keys", _MAX_KEYS, _COUNTS),
        max_output_bytes=_number(said, "max_output_bytes", _MAX_OUTPUT_BYTES, _COUNTS),
        lengths=_named(inputs, "LENGTHS", "NUMKEYS"),
        output=_named(outputs, "SCORE", "EMBEDDING", "OUTPUT0"),
        heads=_heads(_names(told, "heads"), outputs),
        context=_context(said.get("context", "")),
    )


def _object(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise _SchemaError(f"its schema is no JSON: {shown(text)}") from None
    if not isinstance(told, dict):
        raise _SchemaError(f"its schema is {shown(told)}")
    return told


def _field(told: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = told.get(name, default)
    if kind is list and isinstance(value, tuple):  # of a schema that the caller gives
        value = list(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _SchemaError(f"{name} is {shown(value)}")
    return value


def _number(told: Mapping[str, Any], name: str, default: int | None, allowed: range) -> int:
    value = told.get(name, default)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if type(value) is not int or value not in allowed:
        raise _SchemaError(f"{name} is {shown(value)}")
    return value


def _names(told: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = _field(told, name, list, [])
    wrong = [each for each in names if not isinstance(each, str) or not each]
    if wrong or len({*names}) != len(names) or len(names) > _MAX_COLUMNS:
        raise _SchemaError(f"{name} are {shown(names)}")
    return tuple(names)


def _features(
    told: Mapping[str, Any], columns: int, dense: tuple[str, ...] | None
) -> tuple[Feature, ...]:
    bins = {}
    for each in _field(told, "bins", list, []):
        if not isinstance(each, dict):
            raise _SchemaError(f"a bin is {shown(each)}")
        bins[_field(each, "feature", str, None)] = _bins(each, columns, dense)
    texts, features = {*_names(told, "texts")}, []
    for each in _field(told, "features", list, []):
        if not isinstance(each, dict):
            raise _SchemaError(f"a feature is {shown(each)}")
        unknown = sorted({*each} - _OF_FEATURE, key=str)
        if unknown:
            raise _SchemaError(
                f"a feature has {shown(unknown[0])}, which this client does not know"
            )
        pooling = _field(each, "pooling", str, "sum")
        if pooling not in _POOLINGS:
            raise _SchemaError(f"pooling is {shown(pooling)}")
        name = _field(each, "name", str, None)
        features.append(
            Feature(
                name=name,
                dim=_number(each, "dim", None, range(1, _MAX_DIM + 1)),
                pooling=pooling,
                weighed=_field(each, "weighed", bool, False),
                made=_field(each, "made", bool, False),
                bins=bins.pop(name, None),
                text=name in texts,
            )
        )
    names = {feature.name for feature in features}
    if not texts <= names:
        raise _SchemaError(f"texts are {shown(sorted(texts))}, which are not all features")
    if not features or len(names) != len(features) or len(features) > _MAX_COLUMNS or bins:
        raise _SchemaError(f"features are {shown(told.get('features'))}, bins of {shown([*bins])}")
    return tuple(features)


def _bins(each: Mapping[str, Any], columns: int, dense: tuple[str, ...] | None) -> Bins:
    within = range(_MAX_COLUMNS if dense is None and not columns else columns)
    edges = _field(each, "edges", list, [])
    numbers = all(type(edge) in (int, float) and abs(edge) < _MAX_EDGE for edge in edges)
    if not numbers or sorted(edges) != edges or len(edges) > _MAX_COLUMNS:
        raise _SchemaError(f"edges are {shown(edges)}")
    return Bins(dense=_number(each, "dense", None, within), edges=tuple(map(float, edges)))


def _context(text: str) -> tuple[str, ...]:
    names = text.split(",") if text else []
    return _names({"context": names}, "context")


def _heads(told: Sequence[str], outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the heads that have an output: not all have where people write the configuration."""
    return (*told[:1], *(head for head in told[1:] if f"SCORE_{head}" in outputs)) or ("score",)


def _named(there: Sequence[str], *known: str) -> str:
    return next((name for name in known if name in there), known[0])
