"""Which columns are the user's: those that a request may carry once for all of its candidates.

A node makes the same of the names that `embertide serve --context` gives it
(backend_cpp/node/context_columns.h); a program for contexts is used where both agree.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embertide.trainer.config.model import ModelConfig


def check_context(model: "ModelConfig") -> None:
    """Refuse names that no request carries, and what leaves a side without a feature.

    Raises:
        ValueError: One of them.
    """
    if not model.context:
        return
    made = {name for each in model.sequences if each.published for name in each.columns}
    made_dense = {n for each in model.sequences if each.published for n in each.dense_columns}
    keys = [each.name for each in model.columns if not each.crossed and each.name not in made]
    dense = [name for name in model.raw_columns if name not in made_dense]
    unknown = sorted({*model.context} - {*keys, *dense})
    if unknown:
        raise ValueError(
            f"model {model.name!r}: context names {', '.join(map(repr, unknown))}; name columns"
            f" that a request carries: {', '.join(keys + dense)}"
        )
    if not {*keys} & {*model.context} or {*keys} <= {*model.context}:
        raise ValueError(
            f"model {model.name!r}: context is {model.context}; name at least one of the features"
            f" {', '.join(keys)}, and leave at least one to the candidates"
        )


def context_features(model: "ModelConfig") -> frozenset[str]:
    """Return the columns of KEYS that are the user's, those that nodes make among them."""
    own = {*model.context}
    crossed = {each.name for each in model.features if each.crossed and {*each.crossed} <= own}
    places = {
        name
        for each in model.sequences
        if each.published and each.user in own
        for name in each.columns
    }
    names = own | crossed | places
    return frozenset(each.name for each in model.columns if each.name in names)


def context_columns(model: "ModelConfig") -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return whether columns of the net's two inputs, dense and embeddings, are the user's."""
    features = context_features(model)
    dense = {*model.context}
    for each in model.sequences:
        if each.published and each.user in features:
            length, repeat, *gaps = each.dense_columns
            dense |= {length, *gaps} | ({repeat} if each.item in features else set())
    marks = [each.name in dense for each in model.dense for _ in range(2 if each.missing else 1)]
    marks += [name in dense for name in model.raw_columns[len(model.dense) :]]
    widths = zip(model.columns, model.feature_widths, strict=True)
    return tuple(marks), tuple(
        each.name in features for each, width in widths for _ in range(width)
    )
