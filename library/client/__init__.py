"""A client of served models: features by name, one version a call, repeats within a deadline.

Public and stable; docs/client.md has examples. The modules below it are not.
"""

from embertide._common.extras import needed_by

with needed_by("client", "client"):
    from embertide.client.aio import AsyncClient
    from embertide.client.bins import Bins
    from embertide.client.errors import (
        ClientError,
        DeadlineError,
        DegradedError,
        InputError,
        RefusedError,
        UnavailableError,
        VersionGoneError,
    )
    from embertide.client.results import Answer, Degraded, Looked, Ranked, Source
    from embertide.client.schema import Feature, Schema
    from embertide.client.settings import Settings, Tls
    from embertide.client.sync import Client
    from embertide.client.tables import text_keys

__all__ = [
    "Answer",
    "AsyncClient",
    "Bins",
    "Client",
    "ClientError",
    "DeadlineError",
    "Degraded",
    "DegradedError",
    "Feature",
    "InputError",
    "Looked",
    "Ranked",
    "RefusedError",
    "Schema",
    "Settings",
    "Source",
    "Tls",
    "UnavailableError",
    "VersionGoneError",
    "text_keys",
]
