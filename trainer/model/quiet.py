"""Torch without its warnings, where it tells of its own insides."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

# It warns that a net was compiled for less than this CPU, which is what `--cpu` is for; whether
# the CPU can run it, we look ourselves.
_ARCHIVE = "torch.export.pt2_archive._package"


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Leave out what torch warns of while a net is exported, compiled or loaded.

    Filters of warnings are the process's: for one thread at a time.
    """
    archive = logging.getLogger(_ARCHIVE)
    before = archive.level
    archive.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        archive.setLevel(before)
