"""A run's file: Python that defines `run`, a RunConfig, and its events, if it likes.

They are `source`, or `schema`, by which the file of `--data` is read.

The other way, `explained` writes the file of a run with every setting and what it means, from the
"Attributes" that the classes of `config` document.
"""

import dataclasses
import inspect
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import EventSchema, EventSource
from embertide.trainer.errors import ConfigurationError, TrainerError
from embertide.trainer.named import RUN_FILE

_COLUMNS = 100


@dataclasses.dataclass(frozen=True, slots=True)
class RunFile:
    """What a run's file defines.

    Attributes:
        run: The run.
        source: Its events; None: `--data` names them.
        schema: What is read of a file that `--data` names; None: that of `source`.
    """

    run: RunConfig
    source: EventSource | None
    schema: EventSchema | None

    @property
    def data_schema(self) -> EventSchema | None:
        """What is read of a file that `--data` names; None: whichever known one it fits."""
        # Of joined events impressions alone have a schema, and no label.
        if self.schema is not None or self.source is None or self.source.joined:
            return self.schema
        return self.source.schema


def load(path: Path) -> RunFile:
    """Execute a run's file, as the module `run_file`: the net and the loss may be defined there.

    What lies beside it can be imported.

    Raises:
        ConfigurationError: It is not there, fails, or defines no run; the message names the line.
        TrainerError: Its source cannot be opened now.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file; --print-config writes one")
    module = types.ModuleType(RUN_FILE)
    module.__file__ = str(path)
    sys.modules[RUN_FILE] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except Exception as error:
        passing = isinstance(error, TrainerError) and not isinstance(error, ConfigurationError)
        kind = TrainerError if passing else ConfigurationError
        what = str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
        raise kind(f"{path}:{_line(path, error)}: {what}") from error
    run, source = getattr(module, "run", None), getattr(module, "source", None)
    if not isinstance(run, RunConfig):
        what = "defines no run" if run is None else f"defines run as a {type(run).__name__}"
        raise ConfigurationError(f"{path} {what}; write run = RunConfig(model=...)")
    if source is not None and not isinstance(source, EventSource):
        raise ConfigurationError(
            f"{path} defines source as a {type(source).__name__}; write source = open_events(...)"
        )
    schema = getattr(module, "schema", None)
    if not isinstance(schema, EventSchema | None):
        raise ConfigurationError(
            f"{path} defines schema as a {type(schema).__name__}; write schema = EventSchema(...)"
        )
    return RunFile(run, source, schema)


def _line(path: Path, error: Exception) -> int:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 1 for f in reversed(frames) if f.filename == str(path)), 1)


def explained(run: RunConfig) -> str:
    """Return a run's file that defines `run`, each setting below what it means."""
    explainer = _Explainer()
    body = "\n".join(explainer.lines(run, "run = ", "", ""))
    names = ", ".join(sorted(explainer.seen))
    head = '"""A run of embertide train --config: every setting, its value, what it means."""'
    imports = "\n".join(
        textwrap.wrap(
            f"from embertide.trainer.config import ({names})", _COLUMNS, subsequent_indent="    "
        )
    )
    return f"{head}\n\n{imports}\n\n{body}\n"


def attributes(kind: type) -> dict[str, str]:
    """Return what a class's docstring says of each attribute, on one line each."""
    _, _, text = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for line in text.splitlines():
        named = re.match(r"    (\w+): (.*)", line)
        if named:
            name = named[1]
            found[name] = named[2]
        elif line.strip() and found:
            found[name] += " " + line.strip()
    return found


class _Explainer:
    """Writes values as Python; a class is explained where it first comes."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def lines(self, value: Any, before: str, after: str, indent: str) -> Iterator[str]:
        """Yield the lines of `before`, a value and `after`."""
        inner = indent + "    "
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            name = type(value).__name__
            if self.seen.issuperset(_names(value)):
                yield f"{indent}{before}{brief(value)}{after}"
                return
            self.seen.add(name)
            says = attributes(type(value))
            yield f"{indent}{before}{name}("
            for field in dataclasses.fields(value):
                for line in textwrap.wrap(says[field.name], _COLUMNS - len(inner) - 2):
                    yield f"{inner}# {line}"
                yield from self.lines(getattr(value, field.name), f"{field.name}=", ",", inner)
            yield f"{indent}){after}"
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            yield f"{indent}{before}("
            for each in value:
                yield from self.lines(each, "", ",", inner)
            yield f"{indent}){after}"
        else:
            yield f"{indent}{before}{value!r}{after}"


def _names(value: Any) -> Iterator[str]:
    """Yield the names of all dataclasses in a value."""
    if isinstance(value, tuple):
        for each in value:
            yield from _names(each)
    elif dataclasses.is_dataclass(value):
        yield type(value).__name__
        for field in dataclasses.fields(value):
            yield from _names(getattr(value, field.name))


def brief(value: Any) -> str:
    """Return a dataclass as Python, its defaults left out."""
    return f"{type(value).__name__}({', '.join(changed(value))})"


def changed(value: Any, without: Collection[str] = ()) -> list[str]:
    """Return the settings of a dataclass that are not their defaults, as Python."""
    said = []
    for field in dataclasses.fields(value):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found = getattr(value, field.name)
        if field.name not in without and found != default:
            said.append(f"{field.name}={found!r}")
    return said
