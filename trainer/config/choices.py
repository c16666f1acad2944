"""The check that a setting is one of those that there are."""

from typing import Any, get_args


def check_choice(what: str, value: object, choices: Any, more: str = "") -> None:
    """Refuse a value that a `Literal` does not have.

    Raises:
        ValueError: The message names the value, what there is, and `more`.
    """
    if value not in get_args(choices):
        one_of = " or ".join(map(repr, get_args(choices)))
        if len(get_args(choices)) > 2:
            one_of = "one of " + ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"{what} is {value!r}; use {one_of}{more}")
