"""Progress of a run, and how the figures of its ranks are added up."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run is.

    Attributes:
        traffic: Traffic that ranks have sent since the start, by kind: messages, bytes, and waits
            in s.
        apart: Counters of ranks that are not at the same step (`Apart.counters`); else empty.
        plan: The stage and figures of a search for a plan (`PlanRecord.figures`); else empty.
        window: Figures of rows that are held for batches read ahead (`Window.figures`); else empty.
        hot: Figures of rows with a rank of their own (`HotRows.figures`); else empty.
        pruning: Loss of AUC by pruning, and what follows from it (`Unpruned.figures`), where it is
            measured; else empty.
    """

    events: int
    total_events: int | None
    ts_ms: int
    version: int
    auc: float  # of the current day, prequential; within Prequential.live_auc's bound
    events_per_s: float
    rows: int
    resident_bytes: dict[str, int]  # by tier, the index apart
    checkpoints: int
    checkpoint_s: float  # taken by all of them, their snapshots included
    published: dict[str, int]  # Versions.counters
    rejected: dict[str, int]  # events, by reason; counted where they are read, which is ahead
    source: dict[str, int]  # other counters of the source
    labels: dict[str, int]  # DelayedLabelBuffer.counters, where labels come late; else empty
    dropped: dict[str, int]  # by the store, by counter
    missing: int  # dense values
    set_aside: dict[str, int]  # batches that would have made the net not finite, their events
    storage: dict[str, int] = dataclasses.field(default_factory=dict)  # UploadStats
    storage_behind_s: float = 0.0
    # Tasks beside training, by name: state, failures, error (embertide._common.background).
    background: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    traffic: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    apart: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    window: dict[str, float] = dataclasses.field(default_factory=dict)
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    hot: dict[str, int] = dataclasses.field(default_factory=dict)
    pruning: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The current day: Monitor.quality, by whose figures they are; Monitor.slices.
    quality: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    slices: dict[str, dict[str, dict[str, float]]] = dataclasses.field(default_factory=dict)

    def of_rank(self) -> dict[str, Any]:
        """Return what one rank has to add to the run's figures."""
        names = ("rows", "resident_bytes", "dropped", "traffic", "apart", "hot")
        return {name: getattr(self, name) for name in names}

    def with_others(self, others: Sequence[dict[str, Any]]) -> "Progress":
        """Return the run's: this is the first rank's, `others` are of the other ranks."""

        def total(name: str) -> dict[str, int]:
            mine: dict[str, int] = getattr(self, name)
            return {
                what: count + sum(each[name].get(what, 0) for each in others)
                for what, count in mine.items()
            }

        return dataclasses.replace(
            self,
            ranks=1 + len(others),
            rows=self.rows + sum(each["rows"] for each in others),
            resident_bytes=total("resident_bytes"),
            dropped=total("dropped"),
            hot=total("hot"),
            traffic=_by_name([self.traffic, *(each["traffic"] for each in others)]),
            apart=_by_name([self.apart, *(each["apart"] for each in others)]),
        )


def _by_name(every: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Add up numbers by name and what they are of; each of them one may have and another not."""
    found: dict[str, dict[str, float]] = {}
    for each in every:
        for name, values in each.items():
            sums = found.setdefault(name, {})
            for what, value in values.items():
                sums[what] = sums.get(what, 0) + value
    return found


class Teller:
    """Says where a run is: now and then while it learns, and what is new once nothing comes."""

    def __init__(self, say: Callable[[], None], mark: Callable[[], Any], every_s: float) -> None:
        """Say nothing yet.

        Args:
            say: Says it.
            mark: Returns what differs once there is something new to say.
            every_s: Seconds between two times, at least, while it learns.
        """
        self._say, self._mark, self._every_s = say, mark, every_s
        self._said: Any = None
        self._said_s = -every_s

    def learned(self) -> None:
        """Say it, unless that was just done."""
        if time.monotonic() - self._said_s >= self._every_s:
            self._tell(self._mark())

    def idle(self) -> None:
        """Say it if there is something new; called now and then while nothing comes."""
        if (mark := self._mark()) != self._said:
            self._tell(mark)

    def _tell(self, mark: Any) -> None:
        self._said, self._said_s = mark, time.monotonic()
        self._say()


def added_up(every: Sequence[Any]) -> Any:
    """Add up what ranks say, number by number; other things are the first one's."""
    first = every[0]
    if isinstance(first, dict):
        return {name: added_up([each[name] for each in every if name in each]) for name in first}
    return sum(every) if isinstance(first, int | float) and not isinstance(first, bool) else first
