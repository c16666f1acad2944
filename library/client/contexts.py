"""Which columns of a call a request carries once, for all of its rows."""

from collections.abc import Mapping
from typing import Any

from embertide.client.schema import Feature, Schema


def once(schema: Schema, common: Mapping[str, Any], dense: Any, *, own: bool) -> frozenset[str]:
    """Return the names of the columns that requests carry once; empty: each row carries all.

    A request with a context has all columns that the model lets it have, and none that nodes make.

    Args:
        schema: The model's.
        common: The caller's context.
        dense: As the caller gave it.
        own: Whether columns that the node makes are left out.
    """
    names = frozenset(schema.context)
    made = any(feature.made for feature in schema.features) or bool(schema.dense_made)
    if not names or not schema.ranking or (made and not own):
        return frozenset()
    columns = names & {*(schema.dense or ())}
    features = [feature for feature in schema.features if feature.name in names]
    if {feature.name for feature in features} | columns != names:  # the model has changed
        return frozenset()
    named_by_schema = dense is None or not columns
    known = all(_is_common(schema, common, feature) for feature in features)
    return names if known and named_by_schema and columns <= {*common} else frozenset()


def _is_common(schema: Schema, common: Mapping[str, Any], feature: Feature) -> bool:
    """Whether a context has a feature, or the amount that it is a bin of."""
    bins = feature.bins
    return feature.name in common or (bins is not None and schema.amount_of(bins) in common)
