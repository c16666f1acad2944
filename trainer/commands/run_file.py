"""A run's file: Python that defines `run`, a RunConfig, and its events, if it likes.

They are `source`, or `schema`, by which the file of `--data` is read.

The other way, `explained` writes the file of a run with every setting and what it means, from the
"Attributes" that the classes of `config` document.
"""

import ast
import dataclasses
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from embertide._common.quoting import python_literal
from embertide.trainer import config
from embertide.trainer.config import RunConfig
from embertide.trainer.config.user_objects import RUN_FILE
from embertide.trainer.data.base import EventSchema, EventSource, EventTimes, FeatureColumn
from embertide.trainer.errors import ConfigurationError, FinalError, TrainerError

_COLUMNS = 100


@dataclasses.dataclass(frozen=True, slots=True)
class RunFile:
    """The definitions in a run's file.

    Attributes:
        run: The run.
        source: Its events; None: `--data` names them.
        schema: The schema for a file that `--data` names; None: that of `source`.
    """

    run: RunConfig
    source: EventSource | None
    schema: EventSchema | None

    @property
    def data_schema(self) -> EventSchema | None:
        """The schema for a file that `--data` names; None: whichever known one fits the file."""
        # Only the impressions of joined events have a schema, and it has no label.
        if self.schema is not None or self.source is None or self.source.joined:
            return self.schema
        return self.source.schema


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a file each time: Python's cache tells files by their second, and lies beside."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load(path: Path) -> RunFile:
    """Import a run's file as the module `run_file`: the net and the loss may be defined there.

    What lies beside it can be imported. A file that fails leaves no module.

    Raises:
        ConfigurationError: It is not there, fails, or defines no run; the message names the line.
        TrainerError: Its source cannot be opened now.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file; --print-config writes one")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    loader = _Loader(RUN_FILE, str(path))
    spec = importlib.util.spec_from_loader(RUN_FILE, loader)
    assert spec is not None, "a loader of files says where its file is"
    module = importlib.util.module_from_spec(spec)
    sys.modules[RUN_FILE] = module
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[RUN_FILE]
        kind: type[TrainerError] = ConfigurationError
        if isinstance(error, TrainerError) and not isinstance(error, ConfigurationError):
            kind = FinalError if error.final else TrainerError
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
        textwrap.wrap(f"from embertide.config import ({names})", _COLUMNS, subsequent_indent="    ")
    )
    return f"{head}\n\n{imports}\n\n{body}\n"


def attributes(kind: type) -> dict[str, str]:
    """Return what docstrings of a class and its bases say of each attribute, on one line each."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        _, _, text = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")
        found |= _attributes(text)
    return found


def _attributes(text: str) -> dict[str, str]:
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
                if not field.init:
                    continue
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
            yield f"{indent}{before}{source_of(value)}{after}"


def _names(value: Any) -> Iterator[str]:
    """Yield the names of all dataclasses in a value."""
    if isinstance(value, tuple):
        for each in value:
            yield from _names(each)
    elif dataclasses.is_dataclass(value):
        yield type(value).__name__
        for field in dataclasses.fields(value):
            yield from _names(getattr(value, field.name))


def source_of(value: Any) -> str:
    """Return Python that makes a value: of the classes of `config` and `data`, or a plain one.

    Names and values from outside become literals, whatever they hold. Its value is the value.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return brief(value)
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        items = ", ".join(map(source_of, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    return python_literal(dict(value) if isinstance(value, Mapping) else value)


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
            said.append(f"{field.name}={source_of(found)}")
    return said


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """A call of `open_events`, which is not made.

    Attributes:
        paths: The paths to open.
        options: How.
    """

    paths: Any
    options: Mapping[str, Any]


def read_plain(text: str) -> dict[str, Any]:
    """Return what a run's file of plain settings defines, by name; nothing of it is executed.

    `source` is an `Opening`.

    Raises:
        ValueError: It holds something else than imports of ours, and assignments of literals and
            of calls of our classes.
    """
    found: dict[str, Any] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ImportFrom) and statement.module in _MODULES:
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            raise ValueError(f"line {statement.lineno} is no assignment")
        (target,) = statement.targets
        if not isinstance(target, ast.Name):
            raise ValueError(f"line {statement.lineno} assigns to no name")
        found[target.id] = _plain(statement.value)
    return found


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(map(_plain, node.elts))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        options = {each.arg or "**": _plain(each.value) for each in node.keywords}
        if name == "open_events" and len(node.args) == 1:
            return Opening(_plain(node.args[0]), options)
        if name == "float":
            return float(ast.literal_eval(node.args[0]))
        kind = _CLASSES.get(name)
        if kind is None or node.args:
            raise ValueError(f"line {node.lineno} calls {name}")
        return kind(**options)
    return ast.literal_eval(node)


# The others are of files that earlier builds wrote.
_MODULES = (
    *("embertide.config", "embertide.data"),
    *("embertide.trainer.config", "embertide.trainer.data", "embertide.trainer.data.base"),
)
_CLASSES: Mapping[str, type] = {
    **{name: each for name, each in vars(config).items() if isinstance(each, type)},
    **{each.__name__: each for each in (EventSchema, EventTimes, FeatureColumn)},
}
