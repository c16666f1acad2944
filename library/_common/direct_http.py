"""HTTP without a proxy: what the environment names (`http_proxy`) would read what is sent."""

import urllib.request
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_url(url: str, timeout_s: float) -> Any:
    """Open an http:// or https:// URL; the answer is a context manager with `status` and `read`.

    Raises:
        OSError: Nobody answers, or the answer is an error (urllib.error.URLError is one).
        http.client.HTTPException: What answers speaks no HTTP.
        ValueError: The URL is none.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no http:// or https:// URL")
    return _DIRECT.open(url, timeout=timeout_s)
