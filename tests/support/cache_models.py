"""The cache policies once more, as plainly as Python says them: what the C++ ones are held to.

Each model is asked for one key after another and says whether it was a hit. None has a bound on its
memory, a sketch or a sample; where the C++ has one, the two agree only nearly.
"""

import bisect
import math
from collections import Counter, OrderedDict, deque
from typing import Protocol

import numpy as np


class Model(Protocol):
    def ask(self, key: int) -> bool: ...


def hits(model: Model, keys: list[int]) -> int:
    return sum(model.ask(key) for key in keys)


class Lru:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.rows: OrderedDict[int, None] = OrderedDict()

    def ask(self, key: int) -> bool:
        hit = key in self.rows
        if not hit and len(self.rows) == self._capacity:
            self.rows.popitem(last=False)
        self.rows[key] = None
        self.rows.move_to_end(key)
        return hit


class Lfu:
    """(count, stamp) a row; the least leaves. Halving keeps the order of (count, stamp)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: dict[int, tuple[int, int]] = {}
        self._accesses = 0

    def ask(self, key: int) -> bool:
        self._accesses += 1
        if self._accesses % (10 * self._capacity) == 0:
            ordered = sorted(self._rows.items(), key=lambda item: item[1])
            stamps = range(-len(ordered), 0)
            self._rows = {
                k: (count // 2, self._accesses + stamp)
                for stamp, (k, (count, _)) in zip(stamps, ordered, strict=True)
            }
        hit = key in self._rows
        if not hit and len(self._rows) == self._capacity:
            del self._rows[min(self._rows, key=lambda k: self._rows[k])]
        count = min(self._rows[key][0] + 1, 255) if hit else 1
        self._rows[key] = (count, self._accesses)
        return hit


class Clock:
    def __init__(self, capacity: int) -> None:
        self._keys: list[int | None] = [None] * capacity
        self._counts = [0] * capacity
        self._hand = 0
        self._used = 0

    def ask(self, key: int) -> bool:
        if key in self._keys:
            at = self._keys.index(key)
            self._counts[at] = min(self._counts[at] + 1, 255)
            return True
        if self._used < len(self._keys):
            at, self._used = self._used, self._used + 1
        else:
            at = self._evict()
        self._keys[at], self._counts[at] = key, 1
        return False

    def _evict(self) -> int:
        while True:
            at, self._hand = self._hand, (self._hand + 1) % len(self._keys)
            before, self._counts[at] = self._counts[at], self._counts[at] // 2
            if before <= 1:
                return at


class S3Fifo:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_target = max(1, capacity // 10)
        self._main_target = capacity - self._small_target
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: deque[int] = deque(maxlen=self._main_target)
        self._counts: dict[int, int] = {}

    def ask(self, key: int) -> bool:
        if key in self._counts:
            self._counts[key] = min(self._counts[key] + 1, 3)
            return True
        if len(self._counts) == self._capacity:
            self._evict()
        if key in self._ghosts:
            self._ghosts[self._ghosts.index(key)] = -1  # its place stays taken
            self._main.append(key)
        else:
            self._small.append(key)
        self._counts[key] = 0
        return False

    def _evict(self) -> None:
        while self._small and (len(self._small) >= self._small_target or not self._main):
            key = self._small.popleft()
            if self._counts[key] < 2:
                del self._counts[key]
                self._ghosts.append(key)
                return
            self._counts[key] = 0
            self._main.append(key)
            if len(self._main) > self._main_target:
                break
        while True:
            key = self._main.popleft()
            if self._counts[key] == 0:
                del self._counts[key]
                return
            self._counts[key] -= 1
            self._main.append(key)


class AgedCounts:
    """Counts up to 15, all halved as a FrequencySketch of so many slots does."""

    def __init__(self, slots: int) -> None:
        self._period = 5 * (1 << max(slots - 1, 63).bit_length())
        self._until = 2 * self._period
        self._counts: Counter[int] = Counter()

    def add(self, key: int) -> int:
        if self._until == 0:
            self._counts = Counter({k: count // 2 for k, count in self._counts.items()})
            self._until = self._period
        else:
            self._until -= 1
        self._counts[key] = min(self._counts[key] + 1, 15)
        return self._counts[key]

    def of(self, key: int) -> int:
        return self._counts[key]


class FrequencyAdmission:
    """Before an LRU."""

    def __init__(self, capacity: int, accesses: int) -> None:
        self._inner = Lru(capacity)
        self._counts = AgedCounts(capacity)
        self._accesses = accesses

    def ask(self, key: int) -> bool:
        if key in self._inner.rows:
            return self._inner.ask(key)
        if self._counts.add(key) >= self._accesses:
            self._inner.ask(key)
        return False


class TinyLfu:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._window_target = max(1, capacity // 100)
        self._counts = AgedCounts(capacity)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._step, self._last_rate = 0.0625 * capacity, 0.0
        self._accesses = self._hits = 0

    def ask(self, key: int) -> bool:
        hit = any(key in rows for rows in (self._window, self._probation, self._protected))
        self._counts.add(key)
        self._accesses, self._hits = self._accesses + 1, self._hits + hit
        if self._accesses == 10 * self._capacity:
            self._climb()
        if key in self._window:
            self._window.move_to_end(key)
        elif hit:
            self._probation.pop(key, None)
            self._protected[key] = None
            self._protected.move_to_end(key)
        else:
            if len(self._window) + len(self._probation) + len(self._protected) == self._capacity:
                self._evict()
            self._window[key] = None
        self._shrink()
        return hit

    def _shrink(self) -> None:
        while len(self._window) > self._window_target:
            self._probation[self._window.popitem(last=False)[0]] = None
        while len(self._protected) > int(0.8 * (self._capacity - self._window_target)):
            self._probation[self._protected.popitem(last=False)[0]] = None

    def _climb(self) -> None:
        rate = self._hits / self._accesses
        change, self._last_rate = rate - self._last_rate, rate
        self._accesses = self._hits = 0
        if change < 0:
            self._step = -self._step
        most = max(1, 0.8 * self._capacity)
        self._window_target = int(min(max(round(self._window_target + self._step), 1), most))
        full = math.copysign(0.0625 * self._capacity, self._step)
        self._step = full if abs(change) >= 0.05 else 0.98 * self._step
        while len(self._window) < self._window_target and self._probation:
            self._window[self._probation.popitem(last=False)[0]] = None
        self._shrink()

    def _evict(self) -> None:
        main = self._probation or self._protected
        if not main:
            self._window.popitem(last=False)
            return
        candidate, last = next(iter(self._window)), next(iter(main))
        if self._counts.of(candidate) > self._counts.of(last):
            del self._window[candidate]
            self._probation[candidate] = None
            main.pop(last)
        else:
            del self._window[candidate]


class Utility:
    def __init__(self, capacity: int, version_accesses: int) -> None:
        self._rows: list[int] = []
        self._capacity = capacity
        self._version_accesses = version_accesses
        self._accesses = 0
        self._since: Counter[int] = Counter()
        self._utility: dict[int, np.float32] = {}

    def ask(self, key: int) -> bool:
        self._see(key)
        if key in self._rows:
            return True
        if len(self._rows) < self._capacity:
            self._rows.append(key)
            return False
        least = min(range(self._capacity), key=lambda slot: self._of(self._rows[slot]))
        if self._of(self._rows[least]) < self._of(key):
            self._rows[least] = key
        return False

    def _of(self, key: int) -> np.float32:
        return self._utility.get(key, np.float32(0))

    def _see(self, key: int) -> None:
        self._since[key] += 1
        self._accesses += 1
        if self._accesses % self._version_accesses == 0:
            for k in {*self._utility, *self._since}:
                self._utility[k] = np.float32(0.9) * self._of(k) + np.float32(self._since[k])
            self._since.clear()


class ReuseDensity:
    """Ranks every row and every ghost, and finds the index by its definition."""

    BINS, CLASSES = 56, 1 + 8 * 5

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._resident: set[int] = set()
        self._ghosts: set[int] = set()
        # For both: last access, and counts that halve every 64 and every 8 accesses a slot.
        self._rows: dict[int, tuple[int, float, float]] = {}
        self._now = 0
        self._until, self._period = 8192, max(8192, 8 * capacity)
        self._asked = np.zeros((self.CLASSES, self.BINS))
        self._forgotten = np.zeros((self.CLASSES, self.BINS))
        self._begin = [0.0, *(2.0 ** (b // 2) * (1 + b % 2 / 2) for b in range(2, 57))]
        self._density = np.tile(1 / (1 + np.array(self._begin)), (self.CLASSES, 1))

    def ask(self, key: int) -> bool:
        hit = key in self._resident
        if key in self._rows:
            last, long, recent = self._rows[key]
            self._asked[self._cell(key)] += 1
            slots = (self._now - last) / self._capacity
            self._rows[key] = (
                self._now,
                1 + long * 2 ** (-slots / 64),
                1 + recent * 2 ** (-slots / 8),
            )
        else:
            self._rows[key] = (self._now, 1.0, 1.0)
        if not hit:
            self._enter(key)
        self._now += 1
        self._until -= 1
        if self._until == 0:
            self._learn()
        return hit

    def _enter(self, key: int) -> None:
        if len(self._resident) == self._capacity:
            least = min(self._resident, key=self._rank)
            if self._rank(least) >= self._rank(key):
                return self._leave(key)
            self._resident.remove(least)
            self._leave(least)
        self._ghosts.discard(key)
        self._resident.add(key)

    def _leave(self, key: int) -> None:
        self._ghosts.discard(key)
        if len(self._ghosts) == max(64, 3 * self._capacity):
            ghost = min(self._ghosts, key=self._rank)
            self._forgotten[self._cell(ghost)] += 1
            self._ghosts.remove(ghost)
            del self._rows[ghost]
        self._ghosts.add(key)

    def _rank(self, key: int) -> float:
        return float(self._density[self._cell(key)])

    def _cell(self, key: int) -> tuple[int, int]:
        last, long, recent = self._rows[key]
        age_bin = bisect.bisect_right(self._begin, self._now - last) - 1
        octaves = min(7, int(math.log2(long))), min(4, int(math.log2(recent)))
        of_class = 0 if long == 1 else 1 + octaves[0] * 5 + octaves[1]
        return of_class, min(self.BINS - 1, age_bin)

    def _learn(self) -> None:
        reached = (self._asked + self._forgotten)[:, ::-1].cumsum(axis=1)[:, ::-1]
        prior = (self._asked.sum(axis=0) + 1e-6) / (reached.sum(axis=0) + 1e-3)
        hazard = (self._asked + 4 * prior) / (reached - self._forgotten / 2 + 4)
        widths = np.diff(self._begin)
        for b in range(self.BINS - 1):
            stays = np.cumprod(1 - hazard[:, b:-1], axis=1)
            before = np.hstack([np.ones((self.CLASSES, 1)), stays[:, :-1]])
            held = np.cumsum(widths[b:] * (before + stays) / 2, axis=1)
            self._density[:, b] = ((1 - stays) / held).max(axis=1)
        self._density[:, -1] = 0
        self._asked *= 0.9
        self._forgotten *= 0.9
        self._until = self._period
