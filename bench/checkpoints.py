"""How long a checkpoint holds up training, `python -m bench.checkpoints`.

A model is trained on a stream; every second checkpoint is waited for, as if the training thread
wrote it, and every other one is written beside it. So both kinds meet the same rows, the same drive
and the same neighbours. What is timed is the call that makes the checkpoint.

With `--increments N`, the same stream is trained again with one snapshot of all rows in N, and the
bytes that were written a snapshot are compared.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.servers import BUILD
from embertide.trainer.commands.inputs import model_for, open_input
from embertide.trainer.config import RunConfig
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.run.checkpoint.increment import Increment
from embertide.trainer.run.checkpoint.saver import SaverStats
from embertide.trainer.run.loop import Trainer


class _Timed(Trainer):
    """Times each checkpoint, by how it was written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.pauses_s: dict[str, list[float]] = {"waited for": [], "beside training": []}
        super().__init__(*args, **kwargs)
        self._whole = self.versions._snapshot
        self.versions._snapshot = self._timed  # type: ignore[method-assign]

    def _timed(
        self,
        version: VersionId,
        watermark_ms: int,
        dense: bytes,
        increment: Increment | None = None,
    ) -> None:
        self.versions.saver.wait()
        kind = min(self.pauses_s, key=lambda name: len(self.pauses_s[name]))
        began = time.monotonic()
        self._whole(version, watermark_ms, dense, increment)
        if kind == "waited for":
            self.versions.saver.wait()
        self.pauses_s[kind].append(time.monotonic() - began)


def main() -> None:
    """Print a table of pauses and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="events; default: the generated news stream")
    parser.add_argument("--events", type=int, help="the first alone")
    parser.add_argument("--hours", type=int, default=96, help="of the generated stream")
    parser.add_argument("--increments", type=int, help="of so many snapshots one has all rows")
    parser.add_argument("--publish-every-s", type=int, default=600, help="of event time")
    parser.add_argument("--snapshot-every", type=int, default=6, help="versions")
    parser.add_argument("--out", type=Path, help="where to publish; default: a temporary folder")
    given = parser.parse_args()
    source = open_input(given.data, given.events, None if given.data else given.hours, 1)
    with tempfile.TemporaryDirectory(dir=given.out) as folder:
        run = RunConfig(
            model=model_for(source),
            publish_every_s=given.publish_every_s,
            snapshot_every=given.snapshot_every,
        )
        cache = BUILD / "cache" / "dense"
        trainer = _Timed(run, Publication(Path(folder)), program_cache=cache)
        began = time.monotonic()
        trainer.fit(source)
        took_s = time.monotonic() - began
    stats, state = trainer.versions.saver.stats, trainer.state
    table = Table(
        "checkpoint",
        "n",
        "median ms",
        "largest ms",
        title=f"{state.events:,} events, {state.rows.stats()['rows']:,} rows at the end, "
        f"{took_s:.0f} s, {stats.written_s / stats.saved:.2f} s to write one",
    )
    medians = []
    for kind, all_s in trainer.pauses_s.items():
        # The first is of the untrained model.
        pauses_ms = [1000 * each for each in all_s[1:]]
        medians.append(statistics.median(pauses_ms))
        row = (str(len(pauses_ms)), f"{medians[-1]:.1f}", f"{max(pauses_ms):.1f}")
        table.add_row(kind, *row)
    Console(width=110).print(table)
    print(f"ratio of the medians: {medians[1] / medians[0]:.3f}")
    if given.increments:
        with tempfile.TemporaryDirectory(dir=given.out) as folder:
            again = dataclasses.replace(run, full_snapshot_every=given.increments)
            other = Trainer(again, Publication(Path(folder)), program_cache=cache)
            other.fit(source)
        _compare(stats, other.versions.saver.stats)


def _compare(before: SaverStats, after: SaverStats) -> None:
    """Print the bytes that were written a snapshot, without increments and with them."""
    a, b = (each.bytes_written / each.saved for each in (before, after))
    print(
        f"bytes written a snapshot: {a:,.0f} of all rows; {b:,.0f} with {after.increments} of "
        f"{after.saved} incremental; ratio {b / a:.3f}"
    )


if __name__ == "__main__":
    main()
