"""What a run says of itself while it goes on, and how the figures of its ranks are added up."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run is."""

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
    labels: dict[str, int]  # of impressions that wait for feedback, Waiting.counters; else empty
    dropped: dict[str, int]  # by the store, by counter
    missing: int  # dense values
    set_aside: dict[str, int]  # batches that would have made the net not finite, their events
    storage: dict[str, int] = dataclasses.field(default_factory=dict)  # UploadStats
    storage_behind_s: float = 0.0
    ranks: int = 1
    # Of the current day: Monitor.quality, by whose figures they are; Monitor.slices.
    quality: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    slices: dict[str, dict[str, dict[str, float]]] = dataclasses.field(default_factory=dict)

    def of_rank(self) -> dict[str, Any]:
        """Return what one rank has to add to the run's figures."""
        return {name: getattr(self, name) for name in ("rows", "resident_bytes", "dropped")}

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
        )


def added_up(every: Sequence[Any]) -> Any:
    """Add up what ranks say, number by number; other things are the first one's."""
    first = every[0]
    if isinstance(first, dict):
        return {name: added_up([each[name] for each in every if name in each]) for name in first}
    return sum(every) if isinstance(first, int | float) and not isinstance(first, bool) else first
