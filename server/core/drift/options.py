"""Options of the decisions about drift, which an operator sets when the control plane starts."""

import dataclasses
import re
from typing import Literal

from embertide.server.core.demand import HALF_LIVES_S
from embertide.v1 import control_pb2

ModeName = Literal["off", "advise", "auto"]
MODES: dict[str, "control_pb2.DriftMode.ValueType"] = {
    "off": control_pb2.DRIFT_MODE_OFF,
    "advise": control_pb2.DRIFT_MODE_ADVISE,
    "auto": control_pb2.DRIFT_MODE_AUTO,
}
_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_DAY_MIN = 24 * 60
_MIN_MS = 60_000


@dataclasses.dataclass(frozen=True, slots=True)
class FreezeWindow:
    """A time of each day, in UTC, in which no operation may begin; it may span midnight.

    Attributes:
        begin_min: First minute of the day.
        end_min: First minute after it.
    """

    begin_min: int
    end_min: int

    @classmethod
    def parse(cls, text: str) -> "FreezeWindow":
        """Read HH:MM-HH:MM.

        Raises:
            ValueError: It is not of that form, or is empty.
        """
        found = _WINDOW.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"freeze window is {text!r}; use HH:MM-HH:MM in UTC, as 22:00-06:00")
        hours = [int(part) for part in found.groups()]
        begin, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
        if begin == end:
            raise ValueError(f"freeze window {text!r} is empty; use mode advise to never act")
        return cls(begin, end)

    def covers(self, now_ms: int) -> bool:
        """Whether a wall clock lies in it."""
        minute = now_ms // _MIN_MS % _DAY_MIN
        if self.begin_min < self.end_min:
            return self.begin_min <= minute < self.end_min
        return minute >= self.begin_min or minute < self.end_min

    def __str__(self) -> str:
        """Write it as it is read."""
        return "-".join(
            f"{each // 60:02}:{each % 60:02}" for each in (self.begin_min, self.end_min)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DriftOptions:
    """Options of the decisions about drift. Times are of the wall clock unless they say otherwise.

    Attributes:
        mode: Whether it acts, until an operator sets another mode.
        planner: The planner that is asked for a better plan.
        interval_s: From one look to the next.
        half_life_s: Reads count half after this long in the demand's clock; one of
            demand.HALF_LIVES_S.
        horizon_s: Time that a new plan is expected to stay good; its gain is counted over it.
        cooldown_s: From the begin of one operation to the begin of the next, at least.
        look_again_s: A planner is asked this often even if no detector fires.
        min_gain: Share of the cost that a plan must save.
        probe_share: Share of the buckets of a plan that move while no operation's gain is on
            record; 0: all of them.
        confirmations: Looks in a row that must agree before it acts.
        operations_per_day: At most this many in any 24 hours.
        bytes_per_day: Bytes moved in any 24 hours, at most; 0: no bound.
        bytes_per_s: Bandwidth of an operation; 0: no bound.
        p99_us: An operation waits while a node's p99 is above it; 0: no bound.
        freeze: Times of the day in which no operation begins.
    """

    mode: ModeName = "advise"
    planner: str = "auto"
    interval_s: float = 60.0
    half_life_s: int = 600
    horizon_s: float = 3600.0
    cooldown_s: float = 1800.0
    look_again_s: float = 3600.0
    min_gain: float = 0.05
    probe_share: float = 0.0
    confirmations: int = 2
    operations_per_day: int = 48
    bytes_per_day: int = 0
    bytes_per_s: int = 0
    p99_us: int = 0
    freeze: tuple[FreezeWindow, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; use {', '.join(MODES)}")
        if self.half_life_s not in HALF_LIVES_S:
            known = ", ".join(map(str, HALF_LIVES_S))
            raise ValueError(f"half_life_s is {self.half_life_s}; use one of {known}")
        if not 0 <= self.min_gain < 1:
            raise ValueError(f"min_gain is {self.min_gain}; use a share from 0 to below 1")
        if not 0 <= self.probe_share < 1:
            raise ValueError(f"probe_share is {self.probe_share}; use a share from 0 to below 1")
        for name in ("interval_s", "horizon_s", "look_again_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")
        for name in ("confirmations", "operations_per_day"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least 1")
