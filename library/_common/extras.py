"""How a part of the package says that its packages are not installed."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed_by(part: str, extra: str) -> Iterator[None]:
    """Import what `embertide.{part}` needs within this context.

    Raises:
        ImportError: A package is missing that is not ours; the message names it, and the extra that
            brings it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "embertide":
            raise
        raise ImportError(
            f"embertide.{part} needs {error.name}: pip install 'embertide[{extra}]'",
            name=error.name,
        ) from error
