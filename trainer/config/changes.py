"""The effect of a changed setting on a run that goes on: a property of its field.

A checkpoint holds the settings of its run, and the run that goes on compares its own with them
(run/checkpoint/settings.py; docs/design/0010-compatibility.md has the promise).

    a field    what happens when its value differs
    free       nothing: no byte depends on it
    allowed    an error, unless `--allow-change` names it: it says how the run learns
    fixed      an error that says why, and how to carry over what was learned
    others     as fixed, for the reason of the group that they are in
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

_Value = TypeVar("_Value")

BEFORE = "before"
"""In a field's metadata: the value that means what runs did before the setting existed."""
CHANGE = "change"
"""In a field's metadata: `FREE`, `ALLOWED`, or why it is fixed, a text."""
CARRIED = "carried"
"""In the metadata of a fixed field: --change-model and --fork carry over what was learned."""
FREE, ALLOWED = object(), object()


def free(default: _Value) -> _Value:
    """Return a field on which no byte depends."""
    made: Any = dataclasses.field(default=default, metadata={CHANGE: FREE})
    return made  # type: ignore[no-any-return]


def allowed(default: _Value, **metadata: Any) -> _Value:
    """Return a field that says how the run learns: it may change if it is named."""
    made: Any = dataclasses.field(default=default, metadata={CHANGE: ALLOWED, **metadata})
    return made  # type: ignore[no-any-return]


def fixed(default: _Value, why: str, *, carried: bool = False) -> _Value:
    """Return a field that cannot change by itself, nor can what is in it."""
    made: Any = dataclasses.field(default=default, metadata=because(why, carried=carried))
    return made  # type: ignore[no-any-return]


def because(why: str, *, carried: bool = False) -> Mapping[str, Any]:
    """Return the metadata of a fixed field that has no plain default."""
    return {CHANGE: why, CARRIED: carried}
