"""Results of the client's calls."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from embertide._common.kserve import AnswerError
from embertide._common.quoting import shown

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
        keys: The number of such keys.
        of: The number of keys in the call.
    """

    keys: int
    of: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.keys / self.of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The facts that every result carries: all of it is of one version.

    Attributes:
        version: The version of rows and net.
        watermark_ms: Event time that the version has learned up to.
        staleness_ms: Wall clock since it was committed, the most of the requests; None: not known.
        plan_epoch: The epoch of the newest plan that a node answered by.
        nodes: That answered, sorted.
        degraded: None where every key was answered.
        sources: By feature a byte for each of its keys, in their order, as `Source` numbers them;
            None unless asked for.
        requests: That the call was cut into.
        tries: Times that requests were sent, repeats included.
        trace: Trace-id that the requests carried; None: they carried none.
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
    trace: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ranked(Answer, Generic[T]):
    """Scores, in the kind that the features came in: numpy [B], pyarrow Array, pandas Series.

    Attributes:
        scores: Scores of the first head requested; by default the model's first head.
        heads: Scores of each requested head, by its name; "score" for the only head of a model that
            does not name it.
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


_INT64 = range(2**63)
_MAX_NAME = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """The parameters of one response."""

    version: int
    watermark_ms: int
    staleness_ms: int | None
    plan_epoch: int
    node: str
    degraded_keys: int

    @classmethod
    def of(cls, parameters: Mapping[str, Any], keys: int) -> "Said":
        """Read them; the response is of so many keys.

        Raises:
            AnswerError: One is missing, or is none.
        """

        def number(name: str, least: int | None = None) -> int | None:
            value = parameters.get(name, least)
            if value is None and name not in parameters:
                return None
            # A watermark may be before 1970.
            fits = type(value) is int and (value in _INT64 or name == "watermark_ms")
            if not fits:
                raise AnswerError(f"its parameter {name!r} is {shown(value)}")
            return int(value)

        version, watermark_ms = number("version"), number("watermark_ms")
        if version is None or watermark_ms is None:
            missing = "version" if version is None else "watermark_ms"
            raise AnswerError(f"its parameter {missing!r} is missing")
        node, degraded_keys = parameters.get("node"), number("degraded_keys", 0) or 0
        if type(node) is not str or len(node) > _MAX_NAME:
            raise AnswerError(f"its parameter 'node' is {shown(node)}")
        if degraded_keys > keys:
            raise AnswerError(f"{degraded_keys} keys are degraded, of {keys}")
        return cls(
            version=version,
            watermark_ms=watermark_ms,
            staleness_ms=number("staleness_ms"),
            plan_epoch=number("plan_epoch", 0) or 0,
            node=node,
            degraded_keys=degraded_keys,
        )


def facts_of(
    said: Sequence[Said],
    *,
    keys: int,
    sources: Mapping[str, NDArray[np.uint8]] | None,
    tries: int,
    trace: str | None,
) -> dict[str, Any]:
    """Return the fields of `Answer`, from what the responses say."""
    degraded = sum(each.degraded_keys for each in said)
    ages = [each.staleness_ms for each in said if each.staleness_ms is not None]
    return {
        "version": said[0].version,
        "watermark_ms": said[0].watermark_ms,
        "staleness_ms": max(ages) if ages else None,
        "plan_epoch": max(each.plan_epoch for each in said),
        "nodes": tuple(sorted({each.node for each in said})),
        "degraded": Degraded(keys=degraded, of=keys) if degraded else None,
        "sources": sources,
        "requests": len(said),
        "tries": tries,
        "trace": trace,
    }
