"""What is done to a dense feature: the part of a model's configuration (config.py) for it."""

import dataclasses
from typing import Literal, get_args

DenseStep = Literal["clip", "log1p", "standardise", "quantile", "bucketise"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """One dense feature: a column of DENSE, and what is done to it before the net sees it.

    What steps need to know of the values is fitted once, on a run's first events
    (`RunConfig.warmup_events`), and is from then on a part of the model: nodes do the same to what
    requests carry. `backend_cpp/include/embertide/transform.h` has the formulas.

    Attributes:
        name: The feature's name; that of the events' schema, in lower case.
        steps: Done one after the other: "clip", "log1p", "standardise" (mean 0, deviation 1),
            "quantile" (the share of values below) or "bucketise" (the same in steps). The default
            suits counts and prices, which are more even on a logarithmic scale, and fits nothing.
        clip: The shares of the values that "clip" cuts at: a thousandth at either end, so that
            few values that are far from all others do not rule mean and deviation.
        points: Of "quantile", between which it is linear, and edges of "bucketise": 256 tell a
            share to 0.004, which is less than it matters.
        fill: What a missing value (null, NaN) reads as after the steps. Of "standardise", 0 is the
            mean.
        missing: Whether the net gets a second column, 1 where the value is missing and else 0.
    """

    name: str
    steps: tuple[DenseStep, ...] = ("log1p",)
    clip: tuple[float, float] = (0.001, 0.999)
    points: int = 256
    fill: float = 0.0
    missing: bool = False

    def __post_init__(self) -> None:
        """Refuse what the store's library would."""
        for step in self.steps:
            if step not in get_args(DenseStep):
                raise ValueError(
                    f"dense feature {self.name!r}: step {step!r}; use {get_args(DenseStep)}"
                )
        if len(self.steps) > 8:
            raise ValueError(
                f"dense feature {self.name!r} has {len(self.steps)} steps; give 8 at most"
            )
        if not 0 <= self.clip[0] < self.clip[1] <= 1:
            raise ValueError(
                f"dense feature {self.name!r}: clip is {self.clip}; give two shares from 0 to 1"
            )
        if not 2 <= self.points <= 256:
            raise ValueError(f"dense feature {self.name!r}: points is {self.points}; give 2 to 256")
        if not abs(self.fill) <= 3e38:
            raise ValueError(f"dense feature {self.name!r}: fill is {self.fill}; give a number")

    @property
    def fitted(self) -> bool:
        """Whether a step is fitted."""
        return any(step != "log1p" for step in self.steps)
