"""The changes that a test leaves in its process, where those that run after it would find them.

A worker runs hundreds of tests in one process. What commands change of a process by right, as the
handler of a signal, is put back after each test. A test that sets a global of one of our modules
and leaves it fails: others would pass or fail depending on which files their worker had before.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in ("typings", "tests", "bench", "k8s"))
# Kept by embertide.trainer.model.export.private_compiler for as long as the process lasts.
_KEPT = "TORCHINDUCTOR_CACHE_DIR"
_NOTHING = object()

Names = dict[ModuleType, dict[str, Any]]


@contextlib.contextmanager
def process_put_back() -> Iterator[None]:
    """Put back, at the end, what the process has one of.

    The environment, the working directory, the umask, the path of modules, handlers of signals,
    the root logger, and how many threads torch has.
    """
    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    mask, level, handlers = _umask(), logging.root.level, list(logging.root.handlers)
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    threads = _torch_threads()
    yield
    if _KEPT in os.environ:
        environment.setdefault(_KEPT, os.environ[_KEPT])
    environment.pop("PYTEST_CURRENT_TEST", None)
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    os.umask(mask)
    logging.root.setLevel(level)
    for handler in set(logging.root.handlers) - set(handlers):
        logging.root.removeHandler(handler)
    for number, before in signals.items():
        if before is not None and signal.getsignal(number) is not before:
            signal.signal(number, before)
    if threads is not None and threads != _torch_threads():
        sys.modules["torch"].set_num_threads(threads)


def names() -> Names:
    """Return functions, classes and constants of our modules, and of the classes in them."""
    found: Names = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(file, str) and file.startswith(_OURS):
            _add(found.setdefault(module, {}), module.__name__, module)
    return found


def changes(before: Names, after: Names) -> list[str]:
    """Return what is not as it was, a line each.

    What has come beside it is none, nor is a module that is gone or that another one of its name
    has replaced, as files of runs do.
    """
    return [
        f"{name} is {_short(now[name]) if name in now else 'another thing'}, was {_short(was)}"
        for module, values in before.items()
        if (now := after.get(module)) is not None
        for name, was in values.items()
        if now.get(name, _NOTHING) is not was and now.get(name, _NOTHING) != was
    ]


def _add(found: dict[str, Any], of: str, holder: ModuleType | type) -> None:
    for name, value in list(vars(holder).items()):
        if name.startswith("__"):
            continue
        constant = name.isupper() and isinstance(value, bool | int | float | str | bytes | tuple)
        if constant or isinstance(value, FunctionType | type | staticmethod | classmethod):
            found[f"{of}.{name}"] = value
        if isinstance(value, type) and value.__module__ == of:
            _add(found, f"{of}.{name}", value)


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("/proc/self/status says no umask")


def _torch_threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
