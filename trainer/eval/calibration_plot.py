"""The picture of a calibration: mean label against mean score, by bins of equally many events."""

from pathlib import Path
from typing import TYPE_CHECKING

from embertide.trainer.eval.metrics import Array, calibration_curve
from embertide.trainer.eval.picture import write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(picture: "Figure", label_B: Array, score_B: Array, title: str, output: Path) -> None:
    """Draw into a picture of `new_picture`, and write it.

    Raises:
        ConfigurationError: It cannot be written.
    """
    events_S, score_S, label_S = calibration_curve(label_B, score_B)
    # Two standard errors of a mean label.
    error_S = 2 * (label_S * (1 - label_S) / events_S) ** 0.5
    axes = picture.add_subplot()
    top = max(float(score_S.max()), float(label_S.max()))
    axes.plot([0, top], [0, top], "--", color="black", label="calibrated")
    axes.errorbar(score_S, label_S, yerr=error_S, marker="o", markersize=3, label=title)
    axes.set(xlabel="mean score", ylabel="mean label (± 2 s.e.)", title="calibration")
    write_picture(picture, output)
