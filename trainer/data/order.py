"""Which events of a stream are accepted by their time: late ones, and ones from the future.

`Order` looks at the times of events that are good in all other respects, in the order of the
input. Its decisions depend on the events (and on what a Redis Stream says of when they came), never
on this machine's clock or on how many events are read at once: whoever reads again, from any batch,
decides the same.

An event is late if its time is before that of an accepted one. A late event by at most
`max_lateness_s` is accepted with the time of the newest accepted event: it is learned when it
comes, so that no version's watermark goes back.

An event is a suspect if its time is more than `max_jump_s` ahead of the newest accepted one, or if
it is the first of all. The events after it decide, the first 32 that agree: those that are at
most `max_jump_s` behind it confirm it. So a day without events is no obstacle, and one event dated
2033 is rejected alone. Where the input says when an event came (`came_N`), an event that is at
most `max_future_s` ahead of that, and not long past, needs no others; one that is further ahead is
a suspect, unless the stream as a whole is.

Array suffix: N events.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.base import MAX_GROUP, EventTimes

NO_TS_MS = -(1 << 53)
"""Before every event; 2^53, for milliseconds may have gone through float64."""
UNKNOWN_MS = -(1 << 62)
"""In `came_N`: the input does not say when the event came."""

LATE = 1
AHEAD = 2

# This many events after a suspect decide, if they agree.
_AGREEING = 32
MAX_WAITING = 2 * _AGREEING
"""Events that wait for a decision, at most: a suspect, and those after it."""
# Events looked at in one piece: a piece is looked at again after each suspect in it.
_PIECE = 4096
# Late events that get the same time: a group of one time has a bound.
_MAX_LATE = MAX_GROUP // 2

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about the first events.

    Attributes:
        fault_N: 0: accepted; `LATE` or `AHEAD`: rejected.
        ts_ms_N: The times that they are accepted with; they ascend.
    """

    fault_N: NDArray[np.uint8]
    ts_ms_N: Ints


@dataclass(slots=True)
class Order:
    """The order of one stream so far. Used by one thread.

    Attributes:
        times: Bounds on events' times.
        trusts_next: The next event was accepted by whoever read the stream before.
        latest_ms: Time of the newest accepted event; `NO_TS_MS` before the first.
    """

    times: EventTimes
    trusts_next: bool = False
    latest_ms: int = NO_TS_MS
    _group: int = 0  # events at latest_ms, accepted or too many

    def decide(self, ts_ms_N: Ints, came_ms_N: Ints, *, last: bool) -> Decision:
        """Decide the first events, all of them if no more come (`last`).

        Returns:
            The decision; the events that it leaves out, fewer than `MAX_WAITING`, are to be given
            again, before those that come next.
        """
        fault_N, out_N = np.zeros(len(ts_ms_N), np.uint8), ts_ms_N.copy()
        at = 0
        while at < len(ts_ms_N):
            end = min(at + _PIECE, len(ts_ms_N))
            suspect, tolerance_ms = self._find_suspect(ts_ms_N[at:end], came_ms_N[at:end])
            begin, at = at, at + suspect
            self._accept(ts_ms_N[begin:at], fault_N[begin:at], out_N[begin:at])
            if at == end:
                continue
            confirmed = self._is_confirmed(ts_ms_N[at : at + MAX_WAITING], tolerance_ms, last=last)
            if confirmed is None:
                break
            if confirmed:
                self._accept(ts_ms_N[at : at + 1], fault_N[at : at + 1], out_N[at : at + 1])
            else:
                fault_N[at] = AHEAD
            at += 1
        return Decision(fault_N[:at], out_N[:at])

    def close(self, ts_ms: int) -> None:
        """Say that the group of this time is complete: such an event is late from now on."""
        if self.latest_ms != NO_TS_MS:
            ts_ms = min(ts_ms, self.latest_ms)  # the bytes come from outside
        if ts_ms + 1 > self.latest_ms:
            self.latest_ms, self._group, self.trusts_next = ts_ms + 1, 0, False

    def _find_suspect(self, ts_ms_N: Ints, came_ms_N: Ints) -> tuple[int, int]:
        """Return the place of the first suspect, or the end, and how far events may be behind it.

        It assumes that those before it are accepted or late.
        """
        jump_ms = round(self.times.max_jump_s * 1000)
        future_ms = round(self.times.max_future_s * 1000)
        before_N = np.maximum.accumulate(np.append(self.latest_ms, ts_ms_N))[:-1]
        suspect_N = ts_ms_N > before_N + jump_ms
        known_N = came_ms_N != UNKNOWN_MS
        most_N = came_ms_N + future_ms
        suspect_N &= ~(known_N & (ts_ms_N <= most_N) & (ts_ms_N >= came_ms_N - jump_ms))
        ahead_N = known_N & (ts_ms_N > most_N) & (before_N <= most_N)
        suspect_N |= ahead_N
        if self.trusts_next and len(suspect_N):
            suspect_N[0] = False
        if not suspect_N.any():
            return len(ts_ms_N), 0
        first = int(suspect_N.argmax())
        return first, future_ms if ahead_N[first] else jump_ms

    def _is_confirmed(self, ts_ms_N: Ints, tolerance_ms: int, *, last: bool) -> bool | None:
        """Return whether the events after the first one confirm it; None: more must come."""
        agrees_N = ts_ms_N[1:] >= ts_ms_N[0] - tolerance_ms
        for_N, against_N = np.cumsum(agrees_N), np.cumsum(~agrees_N)
        decided_N = np.flatnonzero((for_N == _AGREEING) | (against_N == _AGREEING))
        if len(decided_N):
            return bool(for_N[decided_N[0]] == _AGREEING)
        if not last:
            return None
        yes, no = int(agrees_N.sum()), int((~agrees_N).sum())
        # Nobody speaks against an event that is the only one.
        return yes > no or (yes == no == 0 and self.latest_ms == NO_TS_MS)

    def _accept(self, ts_ms_N: Ints, fault_N: NDArray[np.uint8], out_N: Ints) -> None:
        """Accept events that are no suspects, but for late ones."""
        if not len(ts_ms_N):
            return
        self.trusts_next = False
        out_N[:] = np.maximum.accumulate(np.append(self.latest_ms, ts_ms_N))[1:]
        late_N = ts_ms_N < out_N
        too_late_N = ts_ms_N < out_N - round(self.times.max_lateness_s * 1000)
        fault_N[too_late_N] = LATE
        in_N = np.flatnonzero(~too_late_N)
        if not len(in_N):
            return
        # The places of events in their groups of one time.
        group_N = out_N[in_N]
        begin_N = np.append(0, np.flatnonzero(np.diff(group_N)) + 1)
        place_N = np.arange(len(in_N)) - np.repeat(begin_N, np.diff(np.append(begin_N, len(in_N))))
        place_N[group_N == self.latest_ms] += self._group
        fault_N[in_N[late_N[in_N] & (place_N >= _MAX_LATE)]] = LATE
        self.latest_ms, self._group = int(group_N[-1]), int(place_N[-1]) + 1
