"""The picture of a search of transforms: what each pipeline of a cluster saves."""

from pathlib import Path
from typing import TYPE_CHECKING

from embertide.trainer.eval.picture import write_picture
from embertide.trainer.lab.transform_search import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROUNDS = ("a part of the events", "all events, one seed", "all events, all seeds")
_NAMED = 4


def draw(picture: "Figure", outcome: Outcome, output: Path) -> None:
    """Draw into a picture of `new_picture`, and write it.

    Raises:
        ConfigurationError: It cannot be written.
    """
    tried = [(one, each) for one in outcome.searched for each in reversed(one.tried)]
    picture.set_size_inches(9, 1.5 + 0.2 * max(len(tried), 5))
    axes = picture.add_subplot()
    for place, name in enumerate(_ROUNDS, start=1):
        saved = {
            n: each.before - each.loss
            for n, (_, each) in enumerate(tried)
            if each.round == place and each.loss is not None
        }
        axes.barh(list(saved), list(saved.values()), label=f"round {place}: {name}")
    axes.set_yticks(
        range(len(tried)),
        [f"{_short(one.features)}: {each.pipeline}" for one, each in tried],
        fontsize=7,
    )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=0.001)
    axes.set(xlabel="log loss saved on the part that chooses", title="transforms, by cluster")
    write_picture(picture, output)


def _short(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMED
    return " ".join(names[:_NAMED]) + (f" +{more}" if more > 0 else "")
