"""How long a checkpoint holds up training, `python -m bench.checkpoints`.

A model is trained on a stream; every second checkpoint is waited for, as if the training thread
wrote it, and every other one is written beside it. So both kinds meet the same rows, the same drive
and the same neighbours. What is timed is the call that makes the checkpoint.

With `--increments N`, the same stream is trained again with one snapshot of all rows in N, and the
bytes that were written a snapshot are compared.
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import parts, report
from bench.report import CONSOLE
from bench.servers import BUILD
from embertide.trainer.commands.inputs import model_for, open_input
from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import EventSource
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer


class _Timed(Trainer):
    """Times each checkpoint, by how it was written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.pauses_s: dict[str, list[float]] = {"waited for": [], "beside training": []}
        super().__init__(*args, **kwargs)
        self._save = self.versions.checkpointer.save
        self.versions.checkpointer.save = self._timed  # type: ignore[method-assign]

    def _timed(self, *version: Any, **how: Any) -> None:
        self.versions.saver.wait()
        kind = min(self.pauses_s, key=lambda name: len(self.pauses_s[name]))
        began = time.monotonic()
        self._save(*version, **how)
        if kind == "waited for":
            self.versions.saver.wait()
        self.pauses_s[kind].append(time.monotonic() - began)


def _trained(run: RunConfig, source: EventSource, folder: Path | None) -> tuple[_Timed, float]:
    """Train on a stream; return the trainer, and the seconds that it took."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        cache = BUILD / "cache" / "dense"
        trainer = _Timed(run, Publication(Path(name)), program_cache=cache)
        began = time.monotonic()
        trainer.fit(source)
        return trainer, time.monotonic() - began


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    source = open_input(given.data, given.events, None if given.data else given.hours, 1)
    run = RunConfig(
        model=model_for(source),
        publish_every_s=given.publish_every_s,
        snapshot_every=given.snapshot_every,
    )
    trainer, took_s = _trained(run, source, given.folder)
    stats, state = trainer.versions.saver.stats, trainer.state
    CONSOLE.print(f"{took_s:.0f} s, {stats.written_s / stats.saved:.2f} s to write one")
    case = f"{state.events:,} events, {state.rows.stats()['rows']:,} rows at the end"
    # The first is of the untrained model.
    waited, beside = ([1000 * each for each in all_s[1:]] for all_s in trainer.pauses_s.values())
    for metric, figures in (
        ("median", (beside, waited)),
        ("largest", ([max(beside)], [max(waited)])),
    ):
        pairs = list(zip(*figures, strict=False))
        yield report.compare(
            (case, f"training stands still, {metric}", "ms"),
            [pair[0] for pair in pairs],
            [pair[1] for pair in pairs],
            peer_name="waited for",
            better="lower",
            target=0,
        )
    if given.increments:
        again = dataclasses.replace(run, full_snapshot_every=given.increments)
        after = _trained(again, source, given.folder)[0].versions.saver.stats
        yield report.compare(
            (f"{case}; {after.increments} of {after.saved} incremental", "a snapshot", "bytes"),
            [after.bytes_written / after.saved],
            [stats.bytes_written / stats.saved],
            peer_name="all rows",
            better="lower",
            target=0,
        )


if __name__ == "__main__":
    parser = parts.options("checkpoints", __doc__)
    parser.add_argument("--data", help="events; default: the generated news stream")
    parser.add_argument("--events", type=int, help="the first alone")
    parser.add_argument("--hours", type=int, default=96, help="of the generated stream")
    parser.add_argument("--increments", type=int, help="of so many snapshots one has all rows")
    parser.add_argument("--publish-every-s", type=int, default=600, help="of event time")
    parser.add_argument("--snapshot-every", type=int, default=6, help="versions")
    parser.add_argument("--folder", type=Path, help="where to publish; default: a temporary folder")
    parts.command("Checkpoints", _measure, parser)
