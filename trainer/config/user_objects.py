"""Objects of the user's own code, named as `package.module:name`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embertide.trainer.errors import ConfigurationError, TrainerError

RUN_FILE = "run_file"
"""The module that a run's file is while it is loaded: `run_file:Tower` is its class Tower."""


def name_of(what: str, given: str | Callable[..., Any]) -> str:
    """Return the text that a checkpoint keeps of a class or function: what `find` finds it by.

    Args:
        what: The setting, for the message.
        given: The object, or that text, which is returned as it is.

    Raises:
        ValueError: Nothing finds it by a name, as it was made within a function.
    """
    if isinstance(given, str):
        return given
    module, name = (getattr(given, each, "") for each in ("__module__", "__qualname__"))
    if not (module and name) or "<" in name:
        raise ValueError(
            f"{what} is {given!r}, which has no name that a run could find it by when it goes on;"
            " define it at the top level of a module or of the run's file"
        )
    return f"{module}:{name}"


def find(target: str, refusal: type[TrainerError] = ConfigurationError) -> Any:
    """Import the module, with the working directory on sys.path, and return what it calls so.

    Raises:
        refusal: There is no such module or name, or importing it fails.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise refusal(f"{target!r} is not module:name, as nets.ranking:make_net")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise refusal(f"importing {module_name!r} failed: {error}") from error
        if module_name == RUN_FILE:
            raise refusal(f"{target!r} is of a run's file, and none is loaded: --config") from error
        raise refusal(
            f"there is no module {error.name!r}; it is looked for in {here} and on PYTHONPATH"
        ) from error
    except Exception as error:
        raise refusal(f"importing {module_name!r} failed: {error!r}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            names = [each for each in vars(found) if callable(getattr(found, each))]
            raise refusal(
                f"{module_name!r} has no {attribute!r}; it has {', '.join(sorted(names)) or 'none'}"
            )
        found = getattr(found, name)
    return found
