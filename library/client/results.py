"""What calls return."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class Source(enum.IntEnum):
    """Where a key's row came from (docs/serving.md, Answers)."""

    HBM = 0
    DDR = 1
    SSD = 2
    REMOTE = 3
    DEFAULT = 4
    PRUNED = 5
    UNANSWERED = 6
    HOT = 7


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Degraded:
    """Keys that no owner answered: they were read as default rows.

    Attributes:
        keys: How many.
        of: Of how many keys in the call.
    """

    keys: int
    of: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.keys / self.of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What every result says: all of it is of one version.

    Attributes:
        version: Of rows and net.
        watermark_ms: Event time that the version has learned up to.
        staleness_ms: Wall clock since it was committed, the most of the requests; None: not known.
        plan_epoch: Of the newest plan that a node answered by.
        nodes: That answered, sorted.
        degraded: None where every key was answered.
        sources: By feature a byte for each of its keys, in their order, as `Source` numbers them;
            None unless asked for.
        requests: That the call was cut into.
        tries: Times that requests were sent, repeats included.
    """

    version: int
    watermark_ms: int
    staleness_ms: int | None
    plan_epoch: int
    nodes: tuple[str, ...]
    degraded: Degraded | None
    sources: Mapping[str, NDArray[np.uint8]] | None
    requests: int
    tries: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ranked(Answer, Generic[T]):
    """Scores, in the kind that the features came in: numpy [B], pyarrow Array, pandas Series.

    Attributes:
        scores: Of the first head that was asked for: the model's first, unless others were.
        heads: Of each that was asked for, by its name; "score" of the one head of a model that does
            not name it.
    """

    scores: T
    heads: Mapping[str, T]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Looked(Answer, Generic[T]):
    """Vectors by feature, in the kind that the features came in.

    numpy: a dict of arrays [B, dim], and of lists of arrays [n, dim] where pooling is none;
    pyarrow: a Table of fixed-size lists, or lists of them; pandas: a DataFrame whose cells are
    arrays.
    """

    embeddings: T


def facts_of(
    said: list[Mapping[str, Any]],
    *,
    keys: int,
    sources: Mapping[str, NDArray[np.uint8]] | None,
    tries: int,
) -> dict[str, Any]:
    """Return the fields of `Answer`, from the parameters of the responses."""
    degraded = sum(int(each.get("degraded_keys", 0)) for each in said)
    ages = [int(each["staleness_ms"]) for each in said if "staleness_ms" in each]
    return {
        "version": int(said[0]["version"]),
        "watermark_ms": int(said[0]["watermark_ms"]),
        "staleness_ms": max(ages) if ages else None,
        "plan_epoch": max(int(each.get("plan_epoch", 0)) for each in said),
        "nodes": tuple(sorted({str(each["node"]) for each in said})),
        "degraded": Degraded(keys=degraded, of=keys) if degraded else None,
        "sources": sources,
        "requests": len(said),
        "tries": tries,
    }
