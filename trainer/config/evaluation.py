"""Figures that a run measures of itself, beside those of all events."""

import dataclasses

from embertide.trainer.config.changes import free

HOUR_OF_DAY = "hour_of_day"
"""A slice that every stream has: the hour, 0 to 23, of an event's time."""

MAX_SLICES = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Figures of a run by user and by slice, and events that it never learns from.

    docs/evaluation.md has the formulas and bounds. Nothing that is learned depends on `user`,
    `slices` and `most_values`, so a run may go on with others.

    Attributes:
        user: The feature whose key says which user an event is of, for GAUC. Empty: no GAUC.
        slices: Features by whose values figures are given, 8 at most; or "hour_of_day", which
            needs no feature.
        most_values: Values of a slice that are shown, those with the most events of the day; the
            others are shown as one. 10 fit a screen, and a page of /metrics.
        hold_out: Share of the events that are scored and never learned from, chosen by a hash.
            With 0, every event is learned from, after it was scored.
        hold_out_by: The feature whose key is hashed, as a user's, so that all events of a user are
            held out or none. Empty: the event's place in the input.
    """

    user: str = free("")
    slices: tuple[str, ...] = free(())
    most_values: int = free(10)
    hold_out: float = 0.0
    hold_out_by: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be shown, and shares that leave nothing to learn from."""
        if not 0 <= self.hold_out < 1:
            raise ValueError(f"evaluation: hold_out is {self.hold_out}; give 0 or a share below 1")
        if not 1 <= self.most_values <= 100:
            raise ValueError(f"evaluation: most_values is {self.most_values}; give 1 to 100")
        if len(self.slices) > MAX_SLICES or len(set(self.slices)) < len(self.slices):
            raise ValueError(
                f"evaluation: slices are {', '.join(self.slices)}; give {MAX_SLICES} different "
                "ones at most"
            )
        if self.hold_out_by and not self.hold_out:
            raise ValueError(
                f"evaluation: hold_out_by is {self.hold_out_by!r} and hold_out is 0; give a share"
            )

    def check(self, features: dict[str, str]) -> None:
        """Refuse names that no feature of one key has.

        Args:
            features: The form of each feature in events (`FeatureConfig.keys`), by name.

        Raises:
            ValueError: One of them.
        """
        named = (self.user, self.hold_out_by, *(s for s in self.slices if s != HOUR_OF_DAY))
        for name in named:
            if name and features.get(name) != "one":
                ones = [each for each, keys in features.items() if keys == "one"]
                raise ValueError(
                    f"evaluation names {name!r}; the features of one key are {', '.join(ones)}"
                )
