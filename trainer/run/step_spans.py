"""When the parts of a real step begin and end, for a picture beside that of the predicted one."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from embertide.trainer.model.learner import Learner

Span = tuple[str, str, float, float]
"""(lane, name, begin_s, end_s), the step's begin at 0 by this rank's clock."""


class StepSpans:
    """Records parts of one step of a learner; what it finds is of this rank alone.

    Parts are told apart by what the trainer's thread calls, so `rows` has the wait for keys,
    lookups, the exchange and pooling in one, and `sum` is the wait for the net's last gradients.
    """

    def __init__(self, learner: Learner) -> None:
        """Record nothing yet."""
        self.found: list[Span] = []
        self._learner = learner
        self._rank = learner.ranks.rank
        self._lock = threading.Lock()
        self._began = 0.0
        self._forward_ended = 0.0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step that is taken meanwhile, and whatever is asked for beside it."""
        learner = self._learner
        rows, begun = learner.rows, dict[str, float]()

        def begins(name: str) -> Callable[..., None]:
            return lambda *_: begun.__setitem__(name, time.perf_counter())

        def ends(name: str) -> Callable[..., None]:
            return lambda *_: self._note("core", name, begun[name])

        def forward_ends(*_: Any) -> None:
            self._note("core", "forward", begun["forward"])
            self._forward_ended = time.perf_counter()

        def optimizer_begins(*_: Any) -> None:
            self._backward_ends()
            begins("adam")()

        hooks = [
            rows.register_forward_pre_hook(begins("rows")),
            rows.register_forward_hook(ends("rows")),
            learner.net.register_forward_pre_hook(begins("forward")),
            learner.net.register_forward_hook(forward_ends),
            learner.optimizer.register_step_pre_hook(optimizer_begins),
            learner.optimizer.register_step_post_hook(ends("adam")),
        ]
        finish = learner.sync.finish

        def finished(*given: Any) -> Callable[[], Any]:
            self._backward_ends()
            return self._timed("core", "sum", finish(*given))

        replaced = [
            (rows, "ask", self._timed("asker", "route", rows.ask)),
            (rows, "step", self._timed("core", "apply", rows.step)),
            (learner.sync, "finish", finished),
        ]
        self._began, self._forward_ended = time.perf_counter(), 0.0
        for of, name, timed in replaced:
            setattr(of, name, timed)
        try:
            yield
        finally:
            for of, name, _ in replaced:
                delattr(of, name)
            for hook in hooks:
                hook.remove()

    def _backward_ends(self) -> None:
        if self._forward_ended:
            self._note("core", "backward", self._forward_ended)
            self._forward_ended = 0.0

    def _timed(self, lane: str, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self._note(lane, name, began)

        return timed

    def _note(self, lane: str, name: str, began: float) -> None:
        span = f"rank {self._rank} {lane}", name, began - self._began
        with self._lock:  # keys are asked for by a thread of their own
            self.found.append((*span, time.perf_counter() - self._began))
