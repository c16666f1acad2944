"""Features whose key is the bin of an amount: what a snapshot says of them.

A request has the amount in DENSE, and the bin's number in KEYS. So that nobody has to work it out
by hand, a snapshot has the edges of the bins (docs/formats.md, Bins), nodes tell them to clients,
and `embertide.Client` makes the column from the amount, by the comparison of `data/assemble.py`.
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


def bins_of(schema: EventSchema) -> tuple[Bins, ...]:
    """Return the bins of the events' features, under the names that models have."""
    return tuple(
        Bins(
            feature=each.name.lower(),
            dense=schema.dense.index(each.column),
            edges=each.edges,
        )
        for each in schema.features
        if each.transform == "bin"
    )


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


def to_text(bins: Iterable[Bins]) -> str:
    """Return the file of a snapshot that says them."""
    return json.dumps({"format": 1, "bins": [dataclasses.asdict(each) for each in bins]}, indent=1)


def from_text(text: bytes) -> tuple[Bins, ...]:
    """Read what `to_text` wrote."""
    said: dict[str, Any] = json.loads(text)
    return tuple(
        Bins(feature=each["feature"], dense=each["dense"], edges=tuple(each["edges"]))
        for each in said.get("bins", ())
    )
