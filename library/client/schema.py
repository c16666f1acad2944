"""What a model takes, as its configuration in Triton tells; `embertide serve` wrote it there."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from embertide.client.bins import Bins
from embertide.client.errors import ClientError

# What the backend takes where the configuration says nothing (docs/serving.md, Parameters).
_MAX_SAMPLES, _MAX_KEYS, _MAX_OUTPUT_BYTES = 4096, 1 << 18, 256 << 20


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
    """

    name: str
    dim: int
    pooling: str = "sum"
    weighed: bool = False
    made: bool = False
    bins: Bins | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """What a model takes and gives. Immutable.

    Attributes:
        model: Its name in Triton.
        ranking: Whether it gives scores; else embeddings.
        features: In the order of KEYS' columns.
        dense: Names of DENSE's columns that requests carry; None: it has `dense_columns`, unnamed.
        dense_columns: How many they are.
        dense_made: How many further ones the node makes, behind those.
        max_batch: Samples of a request, [B, F].
        max_samples: Samples of a request of either form.
        max_keys: Keys of a request.
        max_output_bytes: Of its answer.
        lengths: Name of the tensor of the bags' lengths; `output`: of the answer.
        heads: Names of the scores, the first one's in `output`; "score" of one without a name.
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
            raise ClientError(f"model {name!r} is of backend {backend!r}: KServe v2 alone asks it")
        said = {key: value.get("string_value", "") for key, value in config["parameters"].items()}
        told = given or json.loads(said.get("schema") or "{}")
        if not told:
            raise ClientError(
                f"model {name!r} does not tell its features: start it by `embertide serve` of this "
                f"release, or give schemas={{{name!r}: ...}} (docs/serving.md, Schema)"
            )
        bins = {each["feature"]: _bins(each) for each in told.get("bins", ())}
        features = [Feature(**each, bins=bins.get(each["name"])) for each in told["features"]]
        dense = told.get("dense", {})
        names = dense.get("names")
        return cls(
            model=name,
            ranking=said.get("kind") == "ranking",
            features=tuple(features),
            dense=None if names is None else tuple(names),
            dense_columns=int(dense.get("columns", 0)),
            dense_made=int(dense.get("made", 0)),
            max_batch=int(config.get("max_batch_size", 1)),
            max_samples=int(said.get("max_samples", _MAX_SAMPLES)),
            max_keys=int(said.get("max_keys", _MAX_KEYS)),
            max_output_bytes=int(said.get("max_output_bytes", _MAX_OUTPUT_BYTES)),
            lengths=_named(config["input"], "LENGTHS", "NUMKEYS"),
            output=_named(config["output"], "SCORE", "EMBEDDING", "OUTPUT0"),
            heads=_heads(told.get("heads", ()), config["output"]),
        )


def _bins(told: Mapping[str, Any]) -> Bins:
    return Bins(dense=int(told["dense"]), edges=tuple(map(float, told["edges"])))


def _heads(told: Sequence[str], outputs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the heads that have an output: not all have where people write the configuration."""
    there = {str(tensor["name"]) for tensor in outputs}
    return (*told[:1], *(head for head in told[1:] if f"SCORE_{head}" in there)) or ("score",)


def _named(tensors: Sequence[Mapping[str, Any]], *known: str) -> str:
    there = [str(tensor["name"]) for tensor in tensors]
    return next((name for name in known if name in there), known[0])
