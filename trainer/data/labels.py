"""Impressions that wait for their labels, which come later as a stream of their own.

An impression is scored when it comes. It is learned once, when `wait_s` has passed, with the label
that it has by then. Positives are not learned sooner than negatives of their time: a model that has
clicks of the last minutes and none of what was not clicked meanwhile promises too much, and most of
all for what is new (docs/design/0021-late-labels.md has how much).

Feedback after the wait, but within `correct_s` of the impression, makes it a positive after all,
and is learned at once. The negative was then false, and such negatives are weighed down so that an
impression still counts once on the average: let p be the chance of feedback, of which a share r
comes after the wait. Of each impression, p are learned as positives and 1 - p (1 - r) as negatives,
of which only 1 - p are true, so a negative weighs

    (1 - p) / (1 - p (1 - r))

With no wait r is 1, and this is the fake negative weighting of Ktena et al. 2019 (Addressing
Delayed Feedback for Continuous Training with Neural Networks in CTR prediction, equation 9) divided
by its 1 + p, by which that counts each impression. p is the score that the impression got when it
came; r is counted from what was learned before.

All decisions are by event time. Impressions come in order of time, so they are decided and
forgotten in the order in which they came.

Shapes: N rows, P rows that a piece of the stream had, R rows that are decided, F features.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import LabelJoin
from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import Batch
from embertide.trainer.data.limit import take
from embertide.trainer.data.rows import Rows, concatenate

_WAITING, _CLICKED, _NEGATIVE, _POSITIVE = range(4)  # the last two: learned
_COUNTS = (
    *("impressions", "positives", "negatives", "corrected"),
    *("unmatched", "repeated", "repeated_ids", "decided_early"),
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclasses.dataclass(slots=True, eq=False)
class _Piece:
    """Impressions that came together; their label in `rows` is the score that they got."""

    rows: Rows
    id_N: Ints
    state_N: NDArray[np.uint8]
    decided: int = 0  # rows before it have waited for long enough
    gone: int = 0  # ... and rows before it are forgotten


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finalized:
    """Impressions whose label is final, in the order in which it became so.

    Attributes:
        batch: They, with the times when it became so.
        score_R: The score of each when it came.
    """

    batch: Batch
    score_R: Floats


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The decisions that a piece of the stream brings.

    Attributes:
        learn: The events to learn, in order of the decisions, whose times it has; None: nothing.
        known: The events to count; None: nothing.
    """

    learn: Batch | None
    known: Finalized | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DelayedLabelState:
    """The state of a `DelayedLabelBuffer`, for a checkpoint: arrays of its rows by name, counts."""

    arrays: Mapping[str, NDArray[np.generic]]
    counts: Mapping[str, int]


class _Pending:
    """Decisions that are not given out yet, in any order."""

    def __init__(self) -> None:
        self._learned: dict[_Piece, list[tuple[int, int, bool]]] = {}  # row, ts_ms, label
        self._final: dict[_Piece, list[tuple[int, int, bool]]] = {}

    def learned(self, piece: _Piece, row: int, ts_ms: int) -> None:
        """Take a decision as it stands in the piece."""
        label = bool(piece.state_N[row] == _POSITIVE)
        self._learned.setdefault(piece, []).append((row, ts_ms, label))

    def final(self, piece: _Piece, row: int, ts_ms: int) -> None:
        """Take a label that nothing can change any more."""
        label = bool(piece.state_N[row] == _POSITIVE)
        self._final.setdefault(piece, []).append((row, ts_ms, label))

    def decided(self, late: float, least: int) -> Resolved:
        """Return it in order, and forget it; what is to be learned stays until there is enough.

        `late` is the share of positives that come after the wait.
        """
        known = None
        if self._final:
            batch, score_R = _in_order(self._final)
            known = Finalized(batch=batch, score_R=score_R)
            self._final = {}
        if sum(len(of) for of in self._learned.values()) < max(least, 1):
            return Resolved(learn=None, known=known)
        learn, score_R = _in_order(self._learned)
        self._learned = {}
        if late:
            p_R = score_R.astype(np.float64)
            weight_R = (1 - p_R) / (1 - p_R * (1 - late))
            weight_R[learn.label_B == 1] = 1.0
            learn = dataclasses.replace(learn, weight_B=weight_R.astype(np.float32))
        return Resolved(learn=learn, known=known)


def _in_order(found: Mapping[_Piece, Sequence[tuple[int, int, bool]]]) -> tuple[Batch, Floats]:
    """Return rows of pieces in order of the times that are given, and their scores."""
    rows = concatenate(
        [piece.rows.at(np.array([row for row, _, _ in of])) for piece, of in found.items()]
    )
    ts_ms_R = np.array([ts_ms for of in found.values() for _, ts_ms, _ in of], np.int64)
    label_R = np.array([label for of in found.values() for _, _, label in of], np.float32)
    order_R = np.lexsort((label_R, rows.events, ts_ms_R))
    event_R, _, keys_RF, dense_RD, score_R = rows.arrays
    ordered = Rows((event_R, ts_ms_R, keys_RF, dense_RD, label_R), rows.lists).at(order_R)
    return ordered.batch(int(event_R.max()) + 1), score_R[order_R]


def split(learn: Batch, batch_size: int) -> Iterator[Batch]:
    """Cut what is to be learned into steps of about one size, `batch_size` at least if it can."""
    pieces = max(1, len(learn) // batch_size)
    ends = [len(learn) * n // pieces for n in range(pieces + 1)]
    for begin, end in itertools.pairwise(ends):
        yield take(learn, begin, end)


class DelayedLabelBuffer:
    """The impressions of one stream whose labels are not final. Used by one thread.

    An id that is held already makes an impression no other: it is counted (`repeated_ids`) and not
    learned. When `most_waiting` are held, the oldest goes as if its time were over, and is counted
    (`decided_early`).
    """

    def __init__(self, config: LabelJoin) -> None:
        """Begin with none."""
        self.config = config
        self._wait_ms = round(config.wait_s * 1000)
        self._keep_ms = max(self._wait_ms, round(config.correct_s * 1000))
        self._pieces: deque[_Piece] = deque()  # that hold a row
        self._open: deque[_Piece] = deque()  # of them, those with rows that are not decided
        self._places: dict[int, tuple[_Piece, int]] = {}
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._found = _Pending()

    def __len__(self) -> int:
        """Impressions held."""
        return len(self._places)

    def counters(self) -> dict[str, int]:
        """Return what became of impressions and feedback, and what waits.

        `waiting` impressions were not learned yet, `waiting_positives` are those of them that have
        feedback. `unmatched` feedback has no impression that is held: it never came, or too long
        ago.
        """
        state_N = [each.state_N[each.gone :] for each in self._pieces]
        return {
            **self._counts,
            "waiting": sum(int((each < _NEGATIVE).sum()) for each in state_N),
            "waiting_positives": sum(int((each == _CLICKED).sum()) for each in state_N),
        }

    def fresh(self, batch: Batch) -> NDArray[np.bool_]:
        """Return which impressions of a batch have an id that none before them has."""
        assert batch.id_B is not None
        ids = batch.id_B.tolist()
        seen: set[int] = set()
        fresh_B = np.ones(len(ids), np.bool_)
        for b, each in enumerate(ids):
            if each in seen or each in self._places:
                fresh_B[b] = False
            seen.add(each)
        self._counts["repeated_ids"] += int((~fresh_B).sum())
        return fresh_B

    def add(self, batch: Batch, score_B: Floats) -> None:
        """Hold impressions that came, with the scores that they got. Requires: all are `fresh`."""
        assert batch.id_B is not None
        arrays = (batch.event_B, batch.ts_ms_B, batch.keys_BF, batch.dense_BD, score_B)
        self._hold(_Piece(Rows(arrays, batch.lists), batch.id_B, np.zeros(len(batch), np.uint8)))
        self._counts["impressions"] += len(batch)

    def _hold(self, piece: _Piece) -> None:
        self._pieces.append(piece)
        self._open.append(piece)
        for row, id in enumerate(piece.id_N.tolist()):
            self._places[id] = piece, row

    def decide(self, id_P: Ints, ts_ms_P: Ints, until_ms: int, least: int = 0) -> Resolved:
        """Take the feedback up to a time, and decide what that decides.

        Args:
            id_P: The impressions that the feedback is on.
            ts_ms_P: When it came, ascending.
            until_ms: All impressions and feedback up to it were given.
            least: Decisions that wait for others until there are so many, for steps of a few events
                learn badly. 0 gives all; so must the last call before `state`.
        """
        late, found = self._late_share(), self._found
        for id, ts_ms in zip(id_P.tolist(), ts_ms_P.tolist(), strict=True):
            self._take(id, ts_ms, found)
        self._close(until_ms, found)
        while len(self._places) > self.config.most_waiting:
            self._give_up(until_ms, found)
        return found.decided(late, least)

    def _late_share(self) -> float:
        corrected, positives = self._counts["corrected"], self._counts["positives"]
        return corrected / (corrected + positives) if corrected else 0.0

    def _take(self, id: int, ts_ms: int, found: "_Pending") -> None:
        piece, row = self._places.get(id, (None, 0))
        if piece is None:
            self._counts["unmatched"] += 1
            return
        if piece.state_N[row] in (_CLICKED, _POSITIVE):
            self._counts["repeated"] += 1
            return
        came_ms = int(piece.rows.times_ms[row])
        if ts_ms > came_ms + self._keep_ms:
            self._counts["unmatched"] += 1  # its piece of the stream is not over, but its time is
            return
        due_ms = came_ms + self._wait_ms
        if ts_ms <= due_ms:
            piece.state_N[row] = _CLICKED
            return
        if piece.state_N[row] == _WAITING:
            self._decide(piece, row, due_ms, found)
        piece.state_N[row] = _POSITIVE
        self._counts["corrected"] += 1
        found.learned(piece, row, ts_ms)

    def _decide(self, piece: _Piece, row: int, ts_ms: int, found: "_Pending") -> None:
        """Have a row learned with the label that it has."""
        clicked = piece.state_N[row] == _CLICKED
        piece.state_N[row] = _POSITIVE if clicked else _NEGATIVE
        self._counts["positives" if clicked else "negatives"] += 1
        found.learned(piece, row, ts_ms)

    def _close(self, until_ms: int, found: "_Pending") -> None:
        """Decide those that have waited for long enough; forget those that nothing can change."""
        while self._open:
            piece = self._open[0]
            times_ms = piece.rows.times_ms
            end = int(np.searchsorted(times_ms, until_ms - self._wait_ms, side="right"))
            for row in range(piece.decided, end):
                if piece.state_N[row] < _NEGATIVE:
                    self._decide(piece, row, int(times_ms[row]) + self._wait_ms, found)
            piece.decided = max(piece.decided, end)
            if piece.decided < len(piece.rows):
                break
            self._open.popleft()
        while self._pieces:
            piece = self._pieces[0]
            times_ms = piece.rows.times_ms
            end = int(np.searchsorted(times_ms, until_ms - self._keep_ms, side="right"))
            while piece.gone < end:
                self._forget(piece, int(times_ms[piece.gone]) + self._keep_ms, found)
            if self._pieces and self._pieces[0] is piece:
                break

    def _give_up(self, now_ms: int, found: "_Pending") -> None:
        piece = self._pieces[0]
        if piece.state_N[piece.gone] < _NEGATIVE:
            self._decide(piece, piece.gone, now_ms, found)
            piece.decided = piece.gone + 1
            if piece.decided == len(piece.rows):
                self._open.remove(piece)
        self._counts["decided_early"] += 1
        self._forget(piece, now_ms, found)

    def _forget(self, piece: _Piece, ts_ms: int, found: "_Pending") -> None:
        """Forget the oldest row."""
        found.final(piece, piece.gone, ts_ms)
        del self._places[int(piece.id_N[piece.gone])]
        piece.gone += 1
        if piece.gone == len(piece.rows):
            self._pieces.popleft()

    # --- checkpoints ------------------------------------------------------------------------------

    def state(self) -> DelayedLabelState:
        """Return a copy of all that is held."""
        counts = dict(self._counts)
        kept = [piece for piece in self._pieces if piece.gone < len(piece.rows)]
        if not kept:
            return DelayedLabelState(arrays={}, counts=counts)
        rows = concatenate([each.rows.cut(each.gone, len(each.rows)) for each in kept])
        names = ("event_N", "ts_ms_N", "keys_NF", "dense_ND", "score_N")
        arrays = dict(zip(names, rows.arrays, strict=True))
        arrays["id_N"] = np.concatenate([each.id_N[each.gone :] for each in kept])
        arrays["state_N"] = np.concatenate([each.state_N[each.gone :] for each in kept])
        for f, bags in rows.lists.items():
            arrays[f"list{f}.keys_I"], arrays[f"list{f}.sizes_N"] = bags.keys_N, bags.sizes_B
            if bags.weights_N is not None:
                arrays[f"list{f}.weights_I"] = bags.weights_N
        return DelayedLabelState(
            arrays={name: array.copy() for name, array in arrays.items()}, counts=counts
        )

    def restore(self, state: DelayedLabelState) -> None:
        """Hold what `state` says, and nothing else."""
        self.__init__(self.config)  # type: ignore[misc]
        self._counts.update(state.counts)
        if not state.arrays:
            return
        lists = {
            int(name[len("list") : -len(".keys_I")]): name[: -len("keys_I")]
            for name in state.arrays
            if name.endswith(".keys_I")
        }
        rows = _rows_of(state.arrays, lists)
        state_N = state.arrays["state_N"].astype(np.uint8)
        self._hold(_Piece(rows, state.arrays["id_N"].astype(np.int64), state_N))


def _rows_of(arrays: Mapping[str, NDArray[np.generic]], lists: Mapping[int, str]) -> Rows:
    names = ("event_N", "ts_ms_N", "keys_NF", "dense_ND", "score_N")
    bags = {
        f: Bags.of(
            arrays[f"{name}keys_I"].astype(np.int64),
            arrays[f"{name}sizes_N"].astype(np.int64),
            arrays[f"{name}weights_I"].astype(np.float32) if f"{name}weights_I" in arrays else None,
        )
        for f, name in lists.items()
    }
    return Rows(tuple(arrays[name] for name in names), bags)
