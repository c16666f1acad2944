"""Settings of a run by their paths, as `embertide train --set optimizer.dense_learning_rate=0.01`.

A path is the one that checkpoints and messages name a setting by (run/checkpoint/settings.py); of
parts in a list it has the place or the name: `model.tables[2].dim`, `model.tables[item].dim`.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from embertide.trainer.config.run import RunConfig
from embertide.trainer.config.sync import parse_sync
from embertide.trainer.errors import ConfigurationError

_PART = re.compile(r"([^\[\]]+)(?:\[([^\[\]]+)\])?")  # a field, and which of its parts
_BOOLS = {"true": True, "false": False}
_TEXTS: Mapping[str, Callable[[str], Any]] = {"sync": parse_sync}  # settings that have texts


class _Value(str):
    """A text to assign; what leads to it are dictionaries by field and part."""


def assigned(run: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """Return a run with other values of some settings; where two name one, the last counts.

    A group that is None, as `prune`, begins with its defaults once one of its settings is named;
    `prune=none` takes it away.

    Args:
        run: The run.
        assignments: Each is SETTING=VALUE.

    Raises:
        ConfigurationError: There is no such setting, or the value will not do; the message names
            the setting, and what it may be.
    """
    tree: dict[str, Any] = {}
    for path, text in values(assignments).items():
        node, parts = tree, path.split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if isinstance(node, _Value):
                raise ConfigurationError(f"--set {path}: another --set gives all of {part}")
        if isinstance(node.get(parts[-1]), dict):
            raise ConfigurationError(f"--set {path}: another --set gives a part of it")
        node[parts[-1]] = _Value(text)
    return _changed(run, RunConfig, tree, "") if tree else run


def values(assignments: Iterable[str]) -> dict[str, str]:
    """Return the texts of assignments by the paths of their settings.

    Raises:
        ConfigurationError: One is no SETTING=VALUE.
    """
    found: dict[str, str] = {}
    for each in assignments:
        path, is_one, text = each.partition("=")
        if not is_one or not path:
            raise ConfigurationError(
                f"--set {each}: write SETTING=VALUE, as optimizer.dense_learning_rate=0.01"
            )
        found[path] = text
    return found


def _changed(old: Any, kind: type, tree: Mapping[str, Any], path: str) -> Any:
    """Return a configuration with the settings of a tree; `old` is None where there is none yet."""
    hints = typing.get_type_hints(kind)
    changes: dict[str, Any] = {}
    for part, value in tree.items():
        inner = f"{path}.{part}" if path else part
        match = _PART.fullmatch(part)
        name, place = match.groups() if match else (part, None)
        if name not in hints:
            raise ConfigurationError(f"--set {inner}: {_no_such(kind, name, hints)}")
        mine = changes.get(name, None if old is None else getattr(old, name))
        if place is not None:
            changes[name] = _with_part(mine, place, value, inner)
        else:
            changes[name] = _new(mine, hints[name], value, inner)
    try:
        return kind(**changes) if old is None else dataclasses.replace(old, **changes)
    except (TypeError, ValueError) as error:
        names = ", ".join(f"{path}.{each}" if path else each for each in tree)
        raise ConfigurationError(f"--set {names}: {error}") from error


def _no_such(kind: type, name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, names, 2, 0.5) or [n for n in names if name in n]
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names)}"
    return f"{kind.__name__} has no {name!r}; {hint}"


def _new(old: Any, hint: Any, value: Any, path: str) -> Any:
    """Return the new value of a setting: from a text, or with settings of its own changed."""
    kinds = [old.__class__] if dataclasses.is_dataclass(old) else [*_kinds(hint)]
    groups: list[Any] = [each for each in kinds if dataclasses.is_dataclass(each)]
    if not isinstance(value, _Value):
        if len(groups) != 1:
            what = "has no settings of its own" if not groups else "is one of several"
            raise ConfigurationError(f"--set {path}: it {what}; give it in a run's file, --config")
        return _changed(old, groups[0], value, path)
    try:
        return _TEXTS[path](value) if path in _TEXTS else _parsed(hint, str(value))
    except ValueError as error:
        raise ConfigurationError(f"--set {path}={value}: {error}") from error


def _with_part(parts: Any, place: str, value: Any, path: str) -> Any:
    """Return a tuple of configurations with one of them changed."""
    if not isinstance(parts, tuple) or not all(map(dataclasses.is_dataclass, parts)):
        raise ConfigurationError(f"--set {path}: it has no parts; leave [{place}] out")
    names = [str(getattr(each, "name", i)) for i, each in enumerate(parts)]
    i = names.index(place) if place in names else int(place) if place.isdecimal() else len(parts)
    if i >= len(parts):
        raise ConfigurationError(f"--set {path}: there is no such part; there are {names}")
    if isinstance(value, _Value):
        raise ConfigurationError(f"--set {path}: name one of its settings, as {path}.NAME=VALUE")
    return (*parts[:i], _changed(parts[i], type(parts[i]), value, path), *parts[i + 1 :])


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint allows."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _is_plain(items: tuple[Any, ...]) -> bool:
    """Return whether a tuple of those types is a list of texts or numbers."""
    return items[1:] == (...,) and items[0] in (str, int, float)


def _parsed(hint: Any, text: str) -> Any:
    """Return a plain value from its text.

    Raises:
        ValueError: It is none of the type.
    """
    kinds = _kinds(hint)
    if type(None) in kinds and text == "none":
        return None
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            choices = {str(each): each for each in typing.get_args(kind)}
            if text not in choices:
                raise ValueError(f"use one of {', '.join(choices)}")
            return choices[text]
        if typing.get_origin(kind) is tuple and _is_plain(typing.get_args(kind)):
            item = typing.get_args(kind)[0]
            return tuple(_parsed(item, each) for each in text.split(",") if each)
        if kind is bool:
            if text not in _BOOLS:
                raise ValueError("use true or false")
            return _BOOLS[text]
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError as error:
                what = "a whole number" if kind is int else "a number"
                raise ValueError(f"give {what}") from error
    if str in kinds:
        return text
    groups = [each for each in kinds if dataclasses.is_dataclass(each)]
    if len(groups) == 1:
        names = ", ".join(each.name for each in dataclasses.fields(groups[0]))
        raise ValueError(f"it has settings of its own, each with a --set: {names}")
    raise ValueError("it is no plain value: give it in a run's file, --config")
