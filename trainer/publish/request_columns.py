"""Columns of KEYS that a client makes of what its caller has: bins of amounts, keys of texts.

A request has an amount in DENSE, and the number of its bin in KEYS; a text has its hash there. So
that nobody has to work them out by hand, a snapshot has the edges of the bins and the names of
features of text (docs/formats.md, Columns that clients make), nodes tell them to clients, and
`embertide.Client` makes the columns, by the comparison and the hash of `data/assemble.py`.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from embertide.trainer.data.base import EventSchema
from embertide.trainer.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """One feature whose key is the number of edges that are not above a column of DENSE.

    Attributes:
        feature: Its name, as of the model.
        dense: Which column of DENSE.
        edges: Where one bin ends and the next begins, ascending; compared as floats of 32 bits.
    """

    feature: str
    dense: int
    edges: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestColumns:
    """The columns of KEYS that clients make.

    Attributes:
        bins: Of amounts.
        texts: Names of the features whose keys are hashes of texts, as of the model.
    """

    bins: tuple[Bins, ...] = ()
    texts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.bins or self.texts)

    @classmethod
    def of(cls, schema: EventSchema) -> "RequestColumns":
        """Return those of events, under the names that models have.

        A feature is of text if its `FeatureColumn.kind` says so, as in what `init` writes, and its
        keys are not folded to a number of rows.
        """
        bins = tuple(
            Bins(
                feature=each.name.lower(),
                dense=schema.dense.index(each.column),
                edges=each.edges,
            )
            for each in schema.features
            if each.transform == "bin"
        )
        texts = (
            each.name.lower()
            for each in schema.features
            if each.kind == "string" and each.transform in ("key", "keys") and not each.rows
        )
        return cls(bins=bins, texts=tuple(texts))


def check_kept(published: Iterable[Bins], schema: EventSchema) -> None:
    """Refuse other bins for a feature than those that its rows were learned by.

    Clients that run have those, too, and ask once.

    Args:
        published: Those of the run's newest snapshot.
        schema: The schema of the events that the run goes on with.

    Raises:
        ConfigurationError: A feature has other edges than it had.
    """
    edges = {each.name.lower(): each.edges for each in schema.features}
    for before in published:
        now = edges.get(before.feature, before.edges)
        if now != before.edges:
            raise ConfigurationError(
                f"feature {before.feature!r}: its edges are {_brief(now)}; its rows were learned, "
                f"and clients ask, by {_brief(before.edges)}. Use those again; or give the new "
                "bins a feature of another name, and go on with --change-model"
            )


def _brief(edges: Sequence[float]) -> str:
    """Return edges as text: a count and the ends, where there are many."""
    if len(edges) <= 4:
        return str(edges) if edges else "none"
    return f"({edges[0]}, {edges[1]}, ..., {edges[-1]}), {len(edges)} of them"


def to_text(columns: RequestColumns) -> str:
    """Return the file of a snapshot that says them."""
    said = {"format": 1, "bins": [dataclasses.asdict(each) for each in columns.bins]}
    return json.dumps(said | ({"texts": columns.texts} if columns.texts else {}), indent=1)


def from_text(text: bytes) -> RequestColumns:
    """Read what `to_text` wrote."""
    said: dict[str, Any] = json.loads(text)
    bins = (
        Bins(feature=each["feature"], dense=each["dense"], edges=tuple(each["edges"]))
        for each in said.get("bins", ())
    )
    return RequestColumns(bins=tuple(bins), texts=tuple(said.get("texts", ())))
