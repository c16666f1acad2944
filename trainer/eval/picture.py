"""Pictures that commands write: made before the work, so that a wrong name is known at once."""

from pathlib import Path
from typing import TYPE_CHECKING

from embertide.trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_picture(output: Path) -> "Figure":
    """Make an empty picture to draw into, so that what cannot be written is known at once.

    Raises:
        ConfigurationError: matplotlib is not installed, or the folder or the format does not exist.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "--plot needs matplotlib: pip install 'embertide[serve]'"
        ) from error
    picture = Figure(figsize=(8, 5), layout="constrained")
    formats = picture.canvas.get_supported_filetypes()
    if output.suffix.removeprefix(".") not in formats:
        raise ConfigurationError(f"--plot {output}: is none of .{', .'.join(formats)}")
    if not output.parent.is_dir():
        raise ConfigurationError(f"--plot {output}: there is no folder {output.parent}")
    return picture


def write_picture(picture: "Figure", output: Path) -> None:
    """Give what is drawn a grid and a legend, and write it.

    Raises:
        ConfigurationError: It cannot be written.
    """
    for axes in picture.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        picture.savefig(output)
    except OSError as error:
        raise ConfigurationError(f"--plot {output}: {error}") from error
