"""`describe`: what a stream of events holds, and how large its model will be."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.trainer.commands.inputs import (
    Data,
    Demo,
    Events,
    Hours,
    Preset,
    StreamSeed,
    open_input,
    preset_for,
)
from embertide.trainer.config import SequenceConfig
from embertide.trainer.data.base import PADDING_KEY, Batch

if TYPE_CHECKING:
    from embertide.trainer.data.base import EventSource
    from embertide.trainer.data.history import History
    from embertide.trainer.embedding.store import EmbeddingStore

_BATCH = 65_536
_LEAST_EVERY_S = 20


class _Sizes:
    """Counts rows, their bytes, and how many change in an interval of event time."""

    def __init__(self, rows: "EmbeddingStore", every_s: int) -> None:
        self.row_bytes = 0
        self._rows, self._every_ms = rows, every_s * 1000
        self._changed: Counter[int] = Counter()

    @property
    def rows(self) -> int:
        return int(self._rows.stats()["rows"])

    @property
    def changed_rows(self) -> int:
        """The most in one interval. One over two batches counts its keys twice: the safe side."""
        return max(self._changed.values(), default=0)

    def add(self, batch: Batch) -> None:
        """Give each key of each feature its row."""
        model = self._rows.config
        for column, feature in enumerate(model.features):
            table = model.table_index(feature.table)
            before = self.rows
            self._rows.store.ensure_rows(table, np.unique(batch.keys_BF[:, column]))
            self.row_bytes += (self.rows - before) * model.tables[table].width * 4
            self._change(batch, column, np.ones(len(batch), np.bool_))

    def add_liked(self, batch: Batch, sequence: SequenceConfig) -> None:
        """Count the users whose history changes."""
        user = self._rows.config.feature_index(sequence.user)
        self._change(batch, user, batch.label_B > 0)

    def add_histories(self, histories: "Sequence[History]") -> None:
        """Give each user the row of a published history, as it is at the end."""
        from embertide.trainer.embedding.histories import put_histories

        put_histories(histories, self._rows)
        for history in histories:
            self.row_bytes += 8 * int((history.state().items_UL != PADDING_KEY).sum())

    def _change(self, batch: Batch, column: int, of_B: Any) -> None:
        intervals, interval_B = np.unique(batch.ts_ms_B // self._every_ms, return_inverse=True)
        _, key_B = np.unique(batch.keys_BF[:, column], return_inverse=True)
        pairs = np.unique((key_B * len(intervals) + interval_B)[of_B])
        for at, count in enumerate(np.bincount(pairs % len(intervals)).tolist()):
            self._changed[int(intervals[at])] += count


def _interval_s(source: "EventSource", every_s: int, versions: int) -> int:
    """Return the interval by which a stream has so many versions, within bounds."""
    first_ms = last_ms = 0
    for n, batch in enumerate(source.batches(batch_size=_BATCH)):
        first_ms = first_ms if n else int(batch.ts_ms_B[0])
        last_ms = batch.watermark_ms
    return min(every_s, max(_LEAST_EVERY_S, (last_ms - first_ms) // (1000 * versions)))


def command(
    data: Data = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    preset: Preset = None,
    every_s: Annotated[
        int, typer.Option(help="Count the rows that change in this much event time, in seconds.")
    ] = 600,
    versions: Annotated[
        int | None,
        typer.Option(
            help="Take shorter intervals, by which the stream has so many, of "
            f"{_LEAST_EVERY_S} s at least; the stream is read twice then.",
            min=1,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read a stream: events, time, and the rows and bytes of the model over it."""
    from embertide.trainer.data.crosses import crossed
    from embertide.trainer.data.history import History
    from embertide.trainer.embedding.store import EmbeddingStore  # torch takes seconds

    with report_errors(as_json):
        source = open_input(data, events, hours if demo else None, stream_seed)
        model = preset_for(preset, source)
        if versions is not None:
            again = open_input(data, events, hours if demo else None, stream_seed)
            every_s = _interval_s(again, every_s, versions)
        source = crossed(source, model)
        store = EmbeddingStore(model)
        sizes = _Sizes(store, every_s)
        names = [feature.name for feature in model.features]
        histories = [History(each, names) for each in model.sequences if each.published]
        said: dict[str, Any] = {"model": model.name, "every_s": every_s, "events": 0}
        for batch in source.batches(batch_size=_BATCH):
            said.setdefault("first_ts_ms", int(batch.ts_ms_B[0]))
            said["last_ts_ms"] = batch.watermark_ms
            said["events"] += len(batch)
            sizes.add(batch)
            for history in histories:
                sizes.add_liked(batch, history.config)
                history.extend(batch)
        sizes.add_histories(histories)
        said["row_bytes"] = sizes.row_bytes
        said["changed_rows"] = sizes.changed_rows
        said["rows"] = sizes.rows
        said["index_bytes"] = store.stats()["index_bytes"]
        said["rejected"] = source.dead_letters.by_reason
    if as_json:
        print_json(said)
        return
    days = (said.get("last_ts_ms", 0) - said.get("first_ts_ms", 0)) / 86_400_000
    say(f"{said['events']:,} events over {days:.1f} days, {said['rows']:,} keys")
