"""A simulator of tasks on devices: when each begins and ends, and again after some have changed.

A task is ready when the tasks that it follows have ended. A device does one task at a time, in the
order of (when it is ready, its number). A task may have a lead, as the receiving end of a message
has: that much of its work may lie before the moment when it is ready.

    ready  = max(end of each task before it; 0)
    begin  = max(ready - lead, end of the task before it on its device)
    end    = max(begin + seconds, ready), which rounding might else pass by

A task follows only tasks of smaller numbers, and its lead is not larger than its seconds. So times
that satisfy the three lines are unique: take the tasks in the order of (ready, number), and each
follows from those before it. `simulate_all` computes them in that order. `retime` starts from the
tasks that changed, and repeats the lines for those whose inputs changed, until none is left; by
uniqueness its times are those of `simulate_all`, bit for bit.

Pure: no clock, no chance, no input or output. An object belongs to one thread.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence

_MAX_VISITS = 0.125
"""Share of the tasks that `retime` visits at most, before it computes all of them in their order.

A visit costs three or four times what a task of `simulate_all` does.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Work of a device.

    Attributes:
        name: For people; it need not be unique.
        device: Number of the device, from 0.
        seconds: The time that it takes; not negative.
        after: Numbers of the tasks that it follows, each smaller than its own.
        lead: Seconds of its work that may lie before it is ready; from 0 to `seconds`.
    """

    name: str
    device: int
    seconds: float
    after: tuple[int, ...] = ()
    lead: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One task in time.

    Attributes:
        task: Its number.
        begin_s: When it begins.
        end_s: When it ends.
    """

    task: int
    begin_s: float
    end_s: float


class Timeline:
    """The times of some tasks, kept up to date while the tasks change.

    Attributes:
        tasks: In the order of their numbers, with their first seconds and leads.
        visits: Tasks that the last `retime` visited; one may count more than once.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        """Simulate the tasks.

        Raises:
            ValueError: A task follows one that does not come before it, or has a negative time or
                a lead that is longer than it.
        """
        self.tasks = tuple(tasks)
        self.visits = 0
        devices = 1 + max((task.device for task in tasks), default=-1)
        self._device = [task.device for task in tasks]
        self._after = [task.after for task in tasks]
        self._before: list[list[int]] = [[] for _ in tasks]  # the tasks that follow each
        self._seconds, self._lead = [0.0] * len(tasks), [0.0] * len(tasks)
        for number, task in enumerate(tasks):
            if any(not 0 <= other < number for other in task.after):
                raise ValueError(
                    f"task {number} ({task.name}) follows {task.after}: give numbers below its own"
                )
            self._set(number, task.seconds, task.lead)
            for other in set(task.after):
                self._before[other].append(number)
        self._ready = [0.0] * len(tasks)
        self._begin = [0.0] * len(tasks)
        self._end = [0.0] * len(tasks)
        # A device does its tasks in the order of (ready, number).
        self._order: list[list[tuple[float, int]]] = [[] for _ in range(devices)]
        self.simulate_all()

    def _set(self, number: int, seconds: float, lead: float) -> None:
        if not (0 <= lead <= seconds < float("inf")):
            name = self.tasks[number].name
            raise ValueError(
                f"task {number} ({name}) takes {seconds} s with a lead of {lead} s: give a time"
                " of 0 or more, and a lead from 0 to that"
            )
        self._seconds[number], self._lead[number] = seconds, lead

    # --- what is known ----------------------------------------------------------------------------

    @property
    def makespan_s(self) -> float:
        """When the last task ends; 0 without tasks."""
        return max(self._end, default=0.0)

    def end_s(self, tasks: Iterable[int]) -> float:
        """Return when the last of some tasks ends."""
        return max(self._end[number] for number in tasks)

    def seconds_of(self, task: int) -> tuple[float, float]:
        """Return a task's seconds and its lead, as they are now."""
        return self._seconds[task], self._lead[task]

    def spans(self) -> list[Span]:
        """Return when each task begins and ends, in the order of their numbers."""
        times = zip(self._begin, self._end, strict=True)
        return [Span(number, begin, end) for number, (begin, end) in enumerate(times)]

    def critical_path(self, last: int | None = None) -> list[int]:
        """Return the tasks that decide when one ends, the last that ends by default; first to last.

        Each either follows the one before it, or waits for it on their device.
        """
        if not self.tasks:
            return []
        at: int | None = self._end.index(self.makespan_s) if last is None else last
        path: list[int] = []
        while at is not None:
            path.append(at)
            at = self._cause(at)
        return path[::-1]

    def _cause(self, number: int) -> int | None:
        """Return the task whose end decides when one begins; None: nothing does."""
        begin = self._begin[number]
        if begin <= 0:
            return None
        order = self._order[self._device[number]]
        place = bisect.bisect_left(order, (self._ready[number], number))
        if place and self._end[order[place - 1][1]] >= begin:
            return order[place - 1][1]
        return max(self._after[number], key=lambda other: self._end[other], default=None)

    # --- simulation -------------------------------------------------------------------------------

    def simulate_all(self) -> None:
        """Compute the times of all tasks anew."""
        seconds, lead, device = self._seconds, self._lead, self._device
        missing = [len(set(after)) for after in self._after]
        free = [0.0] * len(self._order)
        order: list[list[tuple[float, int]]] = [[] for _ in self._order]
        ready = [0.0] * len(self.tasks)
        heap = [(0.0, number) for number, count in enumerate(missing) if not count]
        while heap:
            key = heapq.heappop(heap)
            at, number = key
            on = device[number]
            begin = max(at - lead[number], free[on])
            end = max(begin + seconds[number], at)
            self._begin[number], self._end[number] = begin, end
            free[on] = end
            order[on].append(key)
            for other in self._before[number]:
                missing[other] -= 1
                if end > ready[other]:
                    ready[other] = end
                if not missing[other]:
                    heapq.heappush(heap, (ready[other], other))
        self._ready, self._order = ready, order

    def retime(self, changes: Mapping[int, tuple[float, float]]) -> None:
        """Give some tasks other seconds and leads, and bring all times up to date.

        Args:
            changes: By number of a task: its seconds, and its lead.

        Raises:
            ValueError: A time that a task cannot have; some of the tasks may have theirs then, and
                `simulate_all` brings the times up to date.
        """
        for number, (took, lead) in changes.items():
            self._set(number, took, lead)
        seconds, leads, device, ends = self._seconds, self._lead, self._device, self._end
        ready, after, before = self._ready, self._after, self._before
        # Tasks whose inputs changed, soonest first: then most are visited once. The time in the
        # heap is a guess, and what is right does not depend on it.
        waiting = set(changes)
        heap = [(ready[number], number) for number in waiting]
        heapq.heapify(heap)

        def look_at(other: int, at: float) -> None:
            if other not in waiting:
                waiting.add(other)
                heapq.heappush(heap, (max(at, ready[other]), other))

        self.visits = 0
        most = max(8.0, _MAX_VISITS * len(self.tasks))
        while heap:
            self.visits += 1
            if self.visits > most:
                self.simulate_all()
                return
            _, number = heapq.heappop(heap)
            waiting.discard(number)
            order = self._order[device[number]]
            old = ready[number]
            new = 0.0
            for other in after[number]:
                if ends[other] > new:
                    new = ends[other]
            place = bisect.bisect_left(order, (old, number))
            if new != old:
                del order[place]
                if place < len(order):
                    look_at(order[place][1], 0.0)
                place = bisect.bisect_left(order, (new, number))
                order.insert(place, (new, number))
                ready[number] = new
            free = ends[order[place - 1][1]] if place else 0.0
            begin = max(new - leads[number], free)
            end = max(begin + seconds[number], new)
            self._begin[number] = begin
            moved = end != ends[number]
            ends[number] = end
            following = order[place + 1][1] if place + 1 < len(order) else None
            if following is not None and (moved or new != old):
                look_at(following, 0.0)
            if moved:
                for other in before[number]:
                    look_at(other, end)
