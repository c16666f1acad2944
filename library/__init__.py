"""Embertide: train embedding models continuously, and serve them while they change.

What this package names is stable (docs/client.md): `Client`, `AsyncClient`, `train` and `serve`,
what they return, and `embertide.client`. Everything else, `embertide._store` and the modules of
`embertide.server` and `embertide.trainer` among them, is private: it may change with any release,
but for what docs/library.md shows. Nothing is loaded before it is used: clients never load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embertide.client import AsyncClient, Client
    from embertide.serving import Served, serve
    from embertide.training import Trained, train

__all__ = ["AsyncClient", "Client", "Served", "Trained", "serve", "train"]

_PLACES = {
    "AsyncClient": "embertide.client",
    "Client": "embertide.client",
    "Served": "embertide.serving",
    "Trained": "embertide.training",
    "serve": "embertide.serving",
    "train": "embertide.training",
}
# What pip has to be told where a part is missing.
_EXTRAS = {
    "embertide.client": "client",
    "embertide.serving": "serve",
    "embertide.training": "train",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'embertide' has no attribute {name!r}; it has {__all__}")
    try:
        value = getattr(importlib.import_module(place), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "embertide":
            raise
        raise ImportError(
            f"embertide.{name} needs {error.name}: pip install 'embertide[{_EXTRAS[place]}]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
