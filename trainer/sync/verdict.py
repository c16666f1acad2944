"""Which failures of ranks are final: the one place that decides whether they start again.

A rank that fails with what stays as it is until a person changes it (a folder that another trainer
has, a configuration, a file that is missing) leaves a verdict with its supervisor, which says it
once and starts nothing. Whatever else ends ranks, one that was killed, Redis away, no room, may be
gone at the next try.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from embertide._common.reporting import Failure, failure_of

ENVIRONMENT = "EMBERTIDE_VERDICT"
"""Names the file of the verdict, in the environment of supervised ranks."""
AGAIN = 75
"""Exit code of ranks that are to be started again, and have not failed."""
_WAIT_S = 1.0  # for the verdict of the rank that another one has lost


def is_supervised() -> bool:
    """Return whether a supervisor started this process, and starts it again."""
    return _place() is not None


def _place() -> Path | None:
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else None


@contextlib.contextmanager
def leaving(as_json: bool) -> Iterator[None]:
    """Leave a verdict if what is done here fails for good; the first of several ranks counts.

    Args:
        as_json: Whether the command prints JSON.
    """
    try:
        yield
    except Exception as error:
        failure, place = failure_of(error), _place()
        if failure is not None and failure.final and place is not None:
            said = {"message": failure.message, "status": failure.status, "as_json": as_json}
            whole = place.with_name(f"{place.name}.{os.getpid()}")
            with contextlib.suppress(OSError):  # the supervisor starts ranks again, then
                whole.write_text(json.dumps(said), encoding="utf-8")
                with contextlib.suppress(FileExistsError):
                    os.link(whole, place)
                whole.unlink()
        raise


def is_left(error: BaseException) -> bool:
    """Return whether the supervisor has a verdict to say, so that who fails with this need not.

    A rank that has lost another one knows of it a little before the other has left it.
    """
    place = _place()
    if place is None:
        return False
    from embertide.trainer.sync.channel import RankError  # which loads torch

    end = time.monotonic() + (_WAIT_S if isinstance(error, RankError) else 0)
    while not place.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def read(place: Path) -> tuple[Failure, bool] | None:
    """Return what ranks have failed with for good, and whether JSON is to say it; None: nothing."""
    try:
        said = json.loads(place.read_text(encoding="utf-8"))
        return Failure(said["message"], said["status"], final=True), said["as_json"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
