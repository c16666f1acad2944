"""`describe`: what a stream of events holds, and how large its model will be."""

from collections import Counter
from typing import Annotated, Any

import numpy as np
import typer

from embertide.trainer.commands import print_json, refusals
from embertide.trainer.commands.inputs import (
    Data,
    Events,
    Hours,
    StreamSeed,
    model_for,
    open_input,
)

_BATCH = 65_536


def command(
    data: Data = None,
    events: Events = None,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    every_s: Annotated[
        int, typer.Option(help="Count the rows that change in this much event time, in seconds.")
    ] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read a stream once: events, time, and the rows and bytes of the model over it."""
    from embertide.trainer.embedding.store import EmbeddingStore  # torch takes seconds

    with refusals(as_json):
        source = open_input(data, events, hours, stream_seed)
        model = model_for(source)
        store = EmbeddingStore(model).store
        said: dict[str, Any] = {"model": model.name, "events": 0, "row_bytes": 0}
        rows = 0
        changed: Counter[int] = Counter()
        for batch in source.batches(batch_size=_BATCH):
            said.setdefault("first_ts_ms", int(batch.ts_ms_B[0]))
            said["last_ts_ms"] = batch.watermark_ms
            said["events"] += len(batch)
            intervals, interval_B = np.unique(
                batch.ts_ms_B // (every_s * 1000), return_inverse=True
            )
            for column, feature in enumerate(model.features):
                table = model.table_index(feature.table)
                keys, key_B = np.unique(batch.keys_BF[:, column], return_inverse=True)
                store.ensure_rows(table, keys)
                before, rows = rows, store.stats()["rows"]
                said["row_bytes"] += (rows - before) * model.tables[table].width * 4
                pairs = np.unique(key_B * len(intervals) + interval_B)
                for at, count in enumerate(np.bincount(pairs % len(intervals)).tolist()):
                    changed[int(intervals[at])] += count
        # An interval over two batches counts its keys twice: too many is the safe side.
        said["changed_rows"] = max(changed.values(), default=0)
        said["rows"] = rows
        said["index_bytes"] = store.stats()["index_bytes"]
        said["rejected"] = source.dead_letters.by_reason
    if as_json:
        print_json(said)
        return
    days = (said.get("last_ts_ms", 0) - said.get("first_ts_ms", 0)) / 86_400_000
    typer.echo(f"{said['events']:,} events over {days:.1f} days, {said['rows']:,} keys")
