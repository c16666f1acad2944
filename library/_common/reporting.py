"""How a command ends when something is wrong: one message on stderr, and an exit status.

docs/cli.md has the table of statuses. With --json stdout has one object, `{"error": ...}`.
"""

import contextlib
import contextvars
import dataclasses
import errno
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator

import typer

from embertide._common.errors import OperatingError
from embertide._common.terminal import print_json, say
from embertide._store import StoreError

FAILED, CONFIGURATION, INTERRUPTED = 1, 2, 130
COMMAND: contextvars.ContextVar[str] = contextvars.ContextVar("command", default="")
"""The command at work, as `embertide serve`; empty: none of ours."""
# A module's package as pip names it, where the two names differ.
_DISTRIBUTIONS = {
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "mlflow": "mlflow-skinny",
    "pytriton": "nvidia-pytriton",
}
_REMEDIES = {
    errno.ENOSPC: "free room there, or give another folder",
    errno.EDQUOT: "free room there, or give another folder",
    errno.EROFS: "give a folder that can be written to",
    errno.EACCES: "give one that this user may use, or change its permissions",
    errno.EPERM: "give one that this user may use, or change its permissions",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a file stands where a folder is needed; give another path",
    errno.EISDIR: "a folder stands where a file is needed; give another path",
    errno.EEXIST: "give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EMFILE: "raise the limit of open files: `ulimit -n 65536`",
    errno.ENFILE: "the machine has too many open files; end what holds them",
    errno.EAGAIN: "raise the limit of processes: `ulimit -u`, or the container's pids limit",
    errno.ENOMEM: "give the machine or the container more memory",
}

# Those of these errors that last until a person changes something.
_LASTING = {
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.EEXIST, errno.ENAMETOOLONG),
}


def system_error(error: OSError) -> str:
    """Return the message of an error of the system: what it concerns, the cause, the remedy."""
    cause = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "`embertide doctor` checks this machine")
    if error.filename:
        return f"{error.filename}: {cause}; {remedy}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{cause}: free room on the drive that is full (`df -h` shows which)"
    return f"{cause}; {remedy}"


def extras_with(module: str) -> list[str]:
    """Return the extras of this package that bring a module, ascending; none: not by an extra."""
    top = module.partition(".")[0]
    wanted = _DISTRIBUTIONS.get(top, top).replace("_", "-").lower()
    extras = set()
    try:
        requirements = importlib.metadata.requires("embertide") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    for line in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"""extra == ['"]([^'"]+)['"]""", line)
        if name and extra and name[0].replace("_", "-").lower() == wanted:
            extras.add(extra[1])
    return sorted(extras - {"dev", "docs"})


def missing_package(what: str, error: ModuleNotFoundError) -> str:
    """Return the message of a package that `what` needs and that is not installed.

    Raises:
        ModuleNotFoundError: It is one of ours: no extra brings it.
    """
    module = error.name or ""
    if module.partition(".")[0] in ("", "embertide"):
        raise error
    extras = [f"'embertide[{extra}]'" for extra in extras_with(module)] or [module]
    return f"{what} needs {module}, which is not installed: pip install {' or '.join(extras)}"


def fail(message: str, status: int = FAILED, *, as_json: bool = False) -> typer.Exit:
    """Print an error, and return what ends the command.

    One line in a log; on a terminal lines that fit, and the command's help where that may help.
    """
    if as_json:
        print_json({"error": message})
    say(f"error: {message}", err=True)
    if status == CONFIGURATION and COMMAND.get() and sys.stderr.isatty():
        say(f"Try '{COMMAND.get()} --help' for help.", err=True)  # as typer says of odd options
    return typer.Exit(status)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The end of a command that failed.

    Attributes:
        message: Value, cause and remedy.
        status: The exit status.
        final: Whether it fails again as long as nobody changes anything.
    """

    message: str
    status: int
    final: bool = False


def failure_of(error: BaseException) -> Failure | None:
    """Return what a command says of an error; None: it is a fault of ours, or no error at all."""
    match error:
        case OperatingError():
            message = "; ".join(filter(None, (str(error), error.remedy)))
            final = error.final or error.exit_status == CONFIGURATION
            return Failure(message, error.exit_status, final)
        case StoreError():
            return Failure(str(error), FAILED)
        case ModuleNotFoundError():
            if (error.name or "").partition(".")[0] in ("", "embertide"):
                return None
            return Failure(missing_package("the command", error), CONFIGURATION, final=True)
        case BrokenPipeError():
            return None  # whoever read our output has gone
        case OSError():
            return Failure(system_error(error), FAILED, error.errno in _LASTING)
        case MemoryError():
            full = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return Failure(system_error(full), FAILED)
    return None


@contextlib.contextmanager
def report_errors(
    as_json: bool = False, is_said: Callable[[BaseException], bool] = lambda _: False
) -> Iterator[None]:
    """Turn what is raised on purpose, and errors of the system, into a message and a status.

    Args:
        as_json: Whether stdout has the message, too.
        is_said: Whether somebody else says it.
    """
    try:
        yield
    except KeyboardInterrupt:
        # Whatever was started has been stopped on the way here.
        say("stopped; nothing is left running", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        if is_said(error):
            raise typer.Exit(failure.status) from error
        raise fail(failure.message, failure.status, as_json=as_json) from error
