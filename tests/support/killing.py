"""A trainer that dies between two batches."""

from pathlib import Path

import pytest

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import EventSource
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"


def unserved(folder: Path) -> Publication:
    """A publication whose program is none, so that no net is compiled: no test may serve it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.pt2").write_bytes(b"nobody runs it")
    return Publication(folder)


class Killed(BaseException):
    """An exception that nobody catches, as nobody catches SIGKILL."""


def train(
    run: RunConfig, source: EventSource, publication: Publication, batches: int = 0
) -> Trainer:
    """Train to the end, or until so many batches are learned, then die."""
    left = batches

    def show(_progress: Progress) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    trainer = Trainer(run, publication, program_cache=CACHE)
    if batches:
        with pytest.raises(Killed):
            trainer.fit(source, progress=show, every_s=0)
    else:
        trainer.fit(source)
    return trainer
