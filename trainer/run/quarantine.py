"""Quarantine of batches that would have made the net not finite: counted, their events kept."""

import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import Batch
from embertide.trainer.data.lines_file import LinesFile
from embertide.trainer.errors import FinalError

_MAX_BYTES = 64 << 20
"""Bound on the file: later batches are counted, and not kept."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class QuarantineStats:
    """Counters since the start; a run that resumes counts again what it learns again."""

    batches: int = 0
    events: int = 0
    events_not_kept: int = 0  # the file, or its drive, is full


class Quarantine:
    """The quarantined batches of one run. Used by one thread.

    Args:
        path: File that their events are appended to, a JSON line each.
        max_in_a_row: Batches without one between that was learned; one more ends the run.
    """

    def __init__(self, path: Path, max_in_a_row: int) -> None:
        """Quarantine nothing yet."""
        self.stats = QuarantineStats()
        self._file = LinesFile(path, _MAX_BYTES)
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self._first = 0  # event index of those in a row

    def learned(self) -> None:
        """Say that a batch was learned."""
        self._in_a_row = 0

    def add(self, batch: Batch, reason: str, *, kept: bool = True) -> None:
        """Quarantine a batch; `kept`: whether this rank is the one that writes it down.

        Raises:
            TrainerError: Too many in a row: it is not the events that are at fault.
            OSError: The file cannot be written, for another reason than a full drive.
        """
        self.stats.batches += 1
        self.stats.events += len(batch)
        log.warning(
            "events %d to %d are put aside: %s", batch.event_B[0], batch.event_B[-1], reason
        )
        if kept:
            self._keep(batch, reason)
        if self._in_a_row == 0:
            self._first = batch.first
        self._in_a_row += 1
        if self._in_a_row > self._max_in_a_row:
            raise FinalError(
                f"{self._in_a_row} batches in a row, events {self._first} to "
                f"{batch.event_B[-1]}, were put aside ({reason}); the last finite state is "
                f"published. Look at {self._file.path}; if the events are right, train on with "
                "lower learning rates, or with a clip step of the dense features"
            )

    def _keep(self, batch: Batch, reason: str) -> None:
        lines = list(_lines(batch, reason))
        self.stats.events_not_kept += len(lines) - self._file.add(lines)


def _lines(batch: Batch, reason: str) -> Iterator[bytes]:
    for b in range(len(batch)):
        dense = [None if math.isnan(value) else value for value in batch.dense_BD[b].tolist()]
        event: dict[str, Any] = {
            "event": int(batch.event_B[b]),
            "reason": reason,
            "ts_ms": int(batch.ts_ms_B[b]),
            "label": int(batch.label_B[b]),
            "keys": batch.keys_BF[b].tolist(),
            "dense": dense,
        }
        if batch.lists:
            event["lists"] = {str(f): _items(bags, b) for f, bags in batch.lists.items()}
        if batch.weight_B is not None:
            event["weight"] = float(batch.weight_B[b])
        if batch.more_labels_BL is not None:
            labels = batch.more_labels_BL[b].tolist()
            event["more_labels"] = [None if math.isnan(each) else int(each) for each in labels]
        yield json.dumps(event).encode() + b"\n"


def _items(bags: Bags, b: int) -> list[Any]:
    """Return the keys of an event's list; of a weighted one [key, weight] of each."""
    begin, end = int(bags.offsets_B1[b]), int(bags.offsets_B1[b + 1])
    keys: list[Any] = bags.keys_N[begin:end].tolist()
    if bags.weights_N is None:
        return keys
    return [list(each) for each in zip(keys, bags.weights_N[begin:end].tolist(), strict=True)]
