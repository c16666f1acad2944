"""How often `train` publishes where nobody says it: as the input deserves, once a run."""

import json
from pathlib import Path

from embertide.trainer.data import is_live
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.columns import Files, count_rows, survey_time
from embertide.trainer.data.files import matching_files
from embertide.trainer.defaults import USUAL_CADENCE, Cadence, cadence, cadence_of_rows
from embertide.trainer.publish.folder import Publication


def pace_of(
    folder: Path,
    source: EventSource,
    data: str | None,
    publish_every_s: int | None,
    snapshot_every: int | None,
) -> Cadence:
    """Return the cadence of a run: what was said, else its checkpoint's, else what suits its input.

    A run that goes on keeps its cadence, for versions are numbered by it, though its files may have
    grown.

    Args:
        folder: The publication.
        source: What is read.
        data: Where it lies; None: it is made up.
        publish_every_s: As the command line says; None: it does not.
        snapshot_every: The same.

    Raises:
        DataError: A file cannot be read.
    """
    found = USUAL_CADENCE
    if publish_every_s is None or snapshot_every is None:
        found = _saved(folder) or _of_input(source, data)
    return Cadence(
        publish_every_s=found.publish_every_s if publish_every_s is None else publish_every_s,
        snapshot_every=found.snapshot_every if snapshot_every is None else snapshot_every,
    )


def _saved(folder: Path) -> Cadence | None:
    from embertide.trainer.checkpoint import checkpoint  # torch takes seconds

    publication = Publication(folder)
    version = checkpoint.newest(publication) if folder.is_dir() else None
    if version is None:
        return None
    try:
        text = (folder / "checkpoints" / version.folder / "checkpoint.json").read_text()
        config = json.loads(text)["config"]
        return Cadence(
            publish_every_s=int(config["publish_every_s"]),
            snapshot_every=int(config["snapshot_every"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # what reads it in earnest says what is wrong


def _of_input(source: EventSource, data: str | None) -> Cadence:
    if data is None or is_live(data):
        return USUAL_CADENCE
    paths = tuple(matching_files(data))
    files = Files(paths=paths, format="parquet" if _is_parquet(source) else "csv")
    read, total = source.total_events(), count_rows(files)
    rows = total if read is None else min(total, read)
    ts = source.schema.ts
    if ts is None:
        return cadence_of_rows(rows)
    clock = survey_time(files, ts)
    unit_s = source.schema.ts_unit_ms / 1000 if clock.is_number else 1e-3
    share = rows / max(1, clock.rows)
    return cadence(rows, max(0.0, clock.last - clock.first) * unit_s * share)


def _is_parquet(source: EventSource) -> bool:
    return source.total_events() is not None
