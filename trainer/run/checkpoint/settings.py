"""Whether a run of these settings may go on from a checkpoint of others.

A checkpoint holds the settings of its run as JSON. They are compared with today's, field by field:

    a field                         what happens
    has another value               refused; or ignored, or allowed by name, if the field says so
                                    (config/changes.py)
    is new, the checkpoint lacks it its former behaviour counts: BEFORE in its metadata, else its
                                    default (config/__init__.py has it)
    is gone, this build lacks it    refused if it was changed from its default then

`sync` is one setting: a strategy is compared as a whole, by its name and its values.

A setting is named by its path, as `optimizer.sparse_learning_rate` or `model.tables[2].dim`.
docs/design/0010-compatibility.md has the promise that this keeps.
"""

import dataclasses
import difflib
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from embertide.trainer.config import RunConfig
from embertide.trainer.config.changes import ALLOWED, BEFORE, CARRIED, CHANGE, FREE
from embertide.trainer.config.sync import STRATEGIES
from embertide.trainer.errors import ConfigurationError

_Config = TypeVar("_Config")
_MAX_CHANGES = 256  # remembered of a run; one a day for most of a year


def _declared(kind: type, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the metadata of a configuration's fields, and of those within, by their paths."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = f"{path}.{field.name}" if path else field.name
        yield inner, field.metadata
        for each in (hints[field.name], *typing.get_args(hints[field.name])):
            if dataclasses.is_dataclass(each):
                yield from _declared(each, inner)  # type: ignore[arg-type]


_SETTINGS = dict(_declared(RunConfig))

FREE_TO_CHANGE = frozenset(path for path, each in _SETTINGS.items() if each.get(CHANGE) is FREE)
"""Settings on which no byte depends: a run may go on with others."""

_SYNC = "sync"

ALLOWED_TO_CHANGE = frozenset(p for p, each in _SETTINGS.items() if each.get(CHANGE) is ALLOWED)
"""Settings that say how a run learns: a run may go on with others if it is told to."""

_OPTIONS = frozenset({"seed", "batch_size", "threads", "cpu", "publish_every_s", "snapshot_every"})
"""Settings that the command has an option for, of the same name."""

_FIXED = {p: each[CHANGE] for p, each in _SETTINGS.items() if isinstance(each.get(CHANGE), str)}
"""Why other settings cannot change: by the longest prefix of a path."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A setting that a checkpoint and a run disagree on.

    Attributes:
        path: Its name.
        saved: The checkpoint's value, as JSON.
        value: The run's value, as JSON.
        is_known: Whether this build has the setting.
    """

    path: str
    saved: Any
    value: Any
    is_known: bool = True

    @property
    def may_change(self) -> bool:
        """Whether a run can be told to go on nevertheless."""
        return self.path in ALLOWED_TO_CHANGE

    @property
    def changes_the_model(self) -> bool:
        """Whether a run can go on with it by carrying over what it has learned (run/fork.py)."""
        return (
            self.is_known
            and self.path != "model.name"
            and any(_is_of(self.path, p) for p, each in _SETTINGS.items() if each.get(CARRIED))
        )

    def change(self) -> str:
        """Say what has changed; of lists of named parts, which ones."""
        if not (_are_named(self.saved) and _are_named(parts := _json(self.value))):
            return f"{self.path} changes from {self.saved!r} to {self.value!r}"
        before, after = ({part["name"]: part for part in each} for each in (self.saved, parts))
        said = [f"{name} is added" for name in after if name not in before]
        said += [f"{name} is dropped" for name in before if name not in after]
        for name in before:
            for field in [f for f in after.get(name, {}) if after[name][f] != before[name].get(f)]:
                said.append(f"{name}.{field} is {after[name][field]!r}")
        return f"{self.path} changes: {', '.join(said) or 'another order'}"

    def _option(self) -> str:
        """Say how the command line has the former value, if it has an option for the setting."""
        if self.path not in _OPTIONS:
            return ""
        return f" (--{self.path.replace('_', '-')} {self.saved})"

    def __str__(self) -> str:
        """Return the difference, its meaning, and how to go on; the old folder is of use still."""
        if not self.is_known:
            return (
                f"{self.path} = {self.saved!r}, which this build does not have: go on with the"
                " build that trained it, or train in a new folder and keep this one"
            )
        what = f"{self.path} = {self.saved!r}, this run has {self.value!r}"
        same = f"use the same{self._option()}"
        if self.may_change:
            return f"{what}: {same}, or allow it: --allow-change {self.path}"
        prefixes = [p for p in _FIXED if _is_of(self.path, p)]
        why = _FIXED[max(prefixes, key=len)] if prefixes else "what was learned depends on it"
        how = "--change-model, or " if self.changes_the_model else ""
        return (
            f"{what}: it cannot change by itself, for {why}; {same}, or carry over what was"
            f" learned: {how}--fork into a new folder"
        )


def settings(run: RunConfig) -> dict[str, Any]:
    """Return what a checkpoint keeps of a run's settings: those on which bytes depend."""
    return {name: v for name, v in _json(run).items() if name not in FREE_TO_CHANGE}


def parsed(kind: type[_Config], saved: Mapping[str, Any]) -> _Config:
    """Return a configuration from what `settings` kept of it.

    A setting that this build lacks is left out; one that the older build lacked is what runs did
    before it existed.

    Raises:
        ValueError: The values are none of such a configuration.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if not field.init:
            continue
        if field.name in saved:
            values[field.name] = _value(hints[field.name], saved[field.name])
        elif BEFORE in field.metadata:
            values[field.name] = field.metadata[BEFORE]
    return kind(**values)


def _value(hint: Any, saved: Any) -> Any:
    """Return a value of a type from JSON: configurations, tuples of them, and plain values."""
    kinds = [each for each in typing.get_args(hint) if each is not type(None)]
    if isinstance(saved, list):
        return tuple(_value(kinds[0] if kinds else Any, each) for each in saved)
    if isinstance(saved, dict):
        named = STRATEGIES.get(saved.get("strategy", ""))
        for each in (hint, *kinds) if named is None else (named,):
            if dataclasses.is_dataclass(each) and isinstance(each, type):
                return parsed(each, saved)
    return saved


def changed_from_default(run: RunConfig) -> list[str]:
    """Return the paths of settings that are not their defaults, FREE_TO_CHANGE excepted.

    A build that has one of the others no more can so tell that the run never used it.
    """
    return [path for path in _changed(run, "") if path not in FREE_TO_CHANGE]


def differences(
    saved: dict[str, Any], run: RunConfig, changed: Sequence[str] | None = None
) -> list[Difference]:
    """Compare a checkpoint's settings with those of a run.

    Args:
        saved: `settings` of the run that was saved.
        run: Who is to go on.
        changed: `changed_from_default` of it; None: its build did not say, so any may be.
    """
    return [
        each
        for each in _compare(saved, run, "")
        if each.path not in FREE_TO_CHANGE
        and (each.is_known or changed is None or _covers(each.path, changed))
    ]


def check_allowed(paths: Sequence[str]) -> None:
    """Refuse names that no setting has, and settings that cannot change.

    Raises:
        ConfigurationError: One of them.
    """
    for path in paths:
        if path in ALLOWED_TO_CHANGE:
            continue
        near = difflib.get_close_matches(path, sorted(ALLOWED_TO_CHANGE), 2, 0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        names = ", ".join(sorted(ALLOWED_TO_CHANGE))
        raise ConfigurationError(f"--allow-change {path}: {hint}what can change is {names}")


def remember(
    changes: Sequence[dict[str, Any]], number: int, found: Sequence[Difference]
) -> list[dict[str, Any]]:
    """Return a run's list of changes with those made after version `number`; the oldest go."""
    new = [
        {"after": number, "setting": each.path, "from": each.saved, "to": each.value}
        for each in found
    ]
    return [*changes, *new][-_MAX_CHANGES:]


def _json(value: Any) -> Any:
    """Return a value as JSON has it; configurations may be in tuples."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _covers(path: str, changed: Sequence[str]) -> bool:
    return any(_is_of(each, path) for each in changed)


def _is_of(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith((f"{prefix}.", f"{prefix}["))


def _are_parts(value: Any) -> bool:
    """Whether it is a tuple of configurations, as the tables of a model."""
    return isinstance(value, tuple) and bool(value) and dataclasses.is_dataclass(value[0])


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(e, dict) and "name" in e for e in value)


def _changed(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, tuple):
        for i, each in enumerate(value):
            yield from _changed(each, f"{path}[{i}]")
        return
    for field in dataclasses.fields(value):
        mine, name = getattr(value, field.name), f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(mine) and _is_another_kind(mine, _default(field)):
            yield name
        elif dataclasses.is_dataclass(mine) or _are_parts(mine):
            yield from _changed(mine, name)
        elif _is_required(field) or mine != _default(field):
            yield name


def _compare_sync(saved: dict[str, Any], value: Any) -> Iterator[Difference]:
    """Yield one difference at most: what two strategies have does not compare."""
    is_same_kind = saved.get("strategy") == value.strategy
    inner = list(_compare(saved, value, "")) if is_same_kind else []
    if inner or not is_same_kind:
        is_known = all(each.is_known for each in inner)
        yield Difference(_SYNC, saved, _json(value), is_known=is_known)


def _is_another_kind(value: Any, default: Any) -> bool:
    return dataclasses.is_dataclass(default) and type(value) is not type(default)


def _compare(saved: Any, value: Any, path: str) -> Iterator[Difference]:
    """Yield what differs between a value of a checkpoint, as JSON, and one of a run."""
    if path == _SYNC and isinstance(saved, dict):
        yield from _compare_sync(saved, value)
    elif dataclasses.is_dataclass(value) and isinstance(saved, dict):
        fields = {field.name: field for field in dataclasses.fields(value)}
        for name in {**saved, **fields}:
            inner = f"{path}.{name}" if path else name
            if name not in fields:
                yield Difference(inner, saved[name], None, is_known=False)
                continue
            before = fields[name].metadata.get(BEFORE, _default(fields[name]))
            yield from _compare(saved.get(name, _json(before)), getattr(value, name), inner)
    elif _are_parts(value) and isinstance(saved, list) and len(saved) == len(value):
        for i, (one, other) in enumerate(zip(saved, value, strict=True)):
            yield from _compare(one, other, f"{path}[{i}]")
    elif saved != _json(value):
        yield Difference(path, saved, _json(value))
