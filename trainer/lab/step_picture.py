"""The picture of a step: what each device of each rank does when, predicted and measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embertide.trainer.eval.picture import write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Spans = Sequence[tuple[str, str, float, float]]  # (lane, name, begin_s, end_s)

_LANE_INCHES = 0.28
_WORDS_SHARE = 0.04  # of the width, from where on a span's name fits into it


def draw(figure: "Figure", predicted: Spans, measured: Spans, output: Path) -> None:
    """Draw spans, a lane a device; measured ones, if there are, above predicted ones.

    Raises:
        ConfigurationError: The picture cannot be written.
    """
    both = [(f"measured: {lane}", name, begin, end) for lane, name, begin, end in measured]
    both += [
        (f"predicted: {lane}" if measured else lane, name, begin, end)
        for lane, name, begin, end in predicted
    ]
    from matplotlib import colormaps

    colors = colormaps["tab20"]
    lanes = list(dict.fromkeys(lane for lane, *_ in both))
    names = list(dict.fromkeys(name.split()[0] for _, name, *_ in both))
    axes = figure.add_subplot()
    figure.set_size_inches(10, 1.5 + _LANE_INCHES * len(lanes))
    last = max(until for *_, until in both)
    seen: set[str] = set()
    for lane, name, begin, until in both:
        kind = name.split()[0]
        width = 1e3 * (until - begin)
        at = len(lanes) - 1 - lanes.index(lane)
        axes.barh(
            at,
            width,
            left=1e3 * begin,
            color=colors(names.index(kind) % 20),
            height=0.8,
            label=None if kind in seen else kind,
        )
        if width > 1e3 * last * _WORDS_SHARE:
            axes.text(1e3 * begin, at, f" {name}", va="center", fontsize=6, clip_on=True)
        seen.add(kind)
    axes.set_yticks(range(len(lanes)), lanes[::-1], fontsize=7)
    axes.set_xlabel("ms from the begin of the step")
    write_picture(figure, output)
