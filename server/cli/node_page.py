"""Pages that a node serves beside its metrics, read for commands."""

import http.client
import urllib.error
from collections.abc import Callable
from typing import TypeVar

from embertide._common.direct_http import open_url
from embertide.server.adapters.process import ProcessError, UsageError

Page = TypeVar("Page")
_BYTES_MAX = 64 << 20
_TIMEOUT_S = 5


def read_page(url: str, path: str, kind: str, parse: Callable[[str], Page]) -> Page:
    """Return the page at a URL of a node.

    Args:
        url: As it was given.
        path: Where nodes have such a page, as "/metrics".
        kind: The page's contents, for people.
        parse: Makes a page of its text; a ValueError says that it is none.

    Raises:
        ProcessError: There is none; the message says what to give instead.
    """
    example = f"http://HOST:8002{path}"
    try:
        with open_url(url, _TIMEOUT_S) as reply:
            return parse(reply.read(_BYTES_MAX).decode())
    except (http.client.HTTPException, UnicodeDecodeError) as error:
        raise ProcessError(
            f"{url} is no page of {kind} ({type(error).__name__}): give the node's metrics port "
            "(8002), not that of gRPC (8001)"
        ) from error
    except urllib.error.HTTPError as error:
        raise ProcessError(
            f"{url} answers {error.code} {error.reason}: give --url {example}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{error}: give --url {example}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ProcessError(
            f"no node answers at {url} ({reason}): start one with `embertide serve`, or give --url"
        ) from error
