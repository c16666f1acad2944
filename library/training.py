"""`train`: a run of the trainer, as a function."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from embertide.server.adapters.triton import find_programs
from embertide.trainer.commands.inputs import check_model, open_input, run_for
from embertide.trainer.commands.publish_schedule import schedule_of
from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.errors import TrainerError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

__all__ = ["Progress", "Trained", "TrainerError", "train"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The result of a run.

    Attributes:
        folder: The publication: what `serve` takes.
        events: Learned by the run, those before it was resumed among them.
        version: The newest that is published.
        auc_by_day: AUC of each day's events, each scored before it was learned.
        stopped: Whether it ended before the events did.
        figures: Counters of rows, bytes, drops and refusals (docs/training.md).
    """

    folder: Path
    events: int
    version: int
    auc_by_day: Mapping[int, float]
    stopped: bool
    figures: Mapping[str, Any]


def train(
    run: RunConfig | str | None = None,
    *,
    data: str | EventSource | None = None,
    folder: Path | str,
    events: int | None = None,
    hours: int | None = None,
    bus: str | None = None,
    program_cache: Path | str | None = None,
    allow_change: Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Trained:
    """Learn from events and publish versions; a run that was stopped goes on where it was.

    By this process and this thread; `embertide train --nproc` has several.

    Args:
        run: The model and its settings, or the name of a preset; None: the preset whose features
            are those of the events.
        data: A source of events, or a text as `embertide train --data` takes it; None: `hours` is
            used.
        folder: The publication's folder.
        events: Read the first ones alone; None: all.
        hours: In place of data: length of a synthetic stream of news, to try things out.
        bus: URL of a Redis that nodes follow; None: versions go by files alone.
        program_cache: A folder of compiled dense nets; None: the user's, or a checkout's build/.
        allow_change: Settings that may differ from the checkpoint's, as "optimizer.name".
        progress: Called twice a second.

    Raises:
        TrainerError: The events, the settings or the folder cannot be trained with; the message
            says why and what to do.
    """
    path = Path(folder)
    if data is None or isinstance(data, str):
        source = open_input(data, events, hours, 1, group=path.resolve().name)
    else:
        source = data if events is None else FirstEvents(data, events)
    schedule = None
    if isinstance(run, RunConfig):
        check_model(run.model, source)
    else:
        schedule = schedule_of(source, data if isinstance(data, str) else None)
        run = run_for(run, source)
    trainer = Trainer(
        run,
        Publication(path),
        bus=bus,
        program_cache=find_programs() if program_cache is None else Path(program_cache),
        allow_change=allow_change,
        publish_schedule=schedule,
    )
    trainer.fit(source, progress=progress)
    days = trainer.state.prequential.daily_summaries()
    return Trained(
        folder=path,
        events=trainer.state.events,
        version=trainer.state.number,
        auc_by_day={day: each.auc for day, each in days.items()},
        stopped=trainer.stopped,
        figures=trainer.figures(),
    )
