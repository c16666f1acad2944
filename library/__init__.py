"""Embertide: train embedding models continuously, and serve them while they change.

Public and stable (docs/library.md): the names below, and those in `__all__` of `embertide.client`,
`embertide.config`, `embertide.data` and `embertide.nn`. All else is private and may change with any
release: `embertide.trainer`, `embertide.server`, `embertide._common` and `embertide._store`.
Nothing is loaded before it is used: clients never load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from embertide._common.extras import needed_by

if TYPE_CHECKING:
    from embertide import client, config, data, nn
    from embertide.client import AsyncClient, Client
    from embertide.serving import ProcessError, Served, serve
    from embertide.training import Progress, Trained, TrainerError, train

__all__ = [
    "AsyncClient",
    "Client",
    "ProcessError",
    "Progress",
    "Served",
    "Trained",
    "TrainerError",
    "client",
    "config",
    "data",
    "nn",
    "serve",
    "train",
]

_PLACES = {
    "AsyncClient": "embertide.client",
    "Client": "embertide.client",
    "ProcessError": "embertide.serving",
    "Progress": "embertide.training",
    "Served": "embertide.serving",
    "Trained": "embertide.training",
    "TrainerError": "embertide.training",
    "serve": "embertide.serving",
    "train": "embertide.training",
}
_MODULES = ("client", "config", "data", "nn")
# The extra that pip installs, by the part that is missing without it.
_EXTRAS = {
    "embertide.client": "client",
    "embertide.serving": "serve",
    "embertide.training": "train",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for.

    Raises:
        ImportError: Its packages are missing; the message names the extra that brings them.
    """
    if name in _MODULES:
        return importlib.import_module(f"embertide.{name}")
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'embertide' has no attribute {name!r}; it has {__all__}")
    with needed_by(name, _EXTRAS[place]):
        value = getattr(importlib.import_module(place), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
