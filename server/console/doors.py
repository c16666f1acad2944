"""The checks that every request passes: the host that it names, headers of every answer, and forms.

A page of elsewhere must not act here: it may resolve a name of its own to this address (DNS
rebinding), show a page of ours in a frame (clickjacking), or send a form (CSRF).
"""

import asyncio
import dataclasses
import urllib.parse
from collections.abc import Collection, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from embertide._common.quoting import shown

FORM_BYTES_MAX = 16 << 10
_FORM_FIELDS_MAX = 40
_FORM_S = 10.0
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _CONTENT_POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, forms would have no origin
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class FormError(ValueError):
    """A form is refused.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        """Take the status and why."""
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Doors:
    """Let requests through that name a host of ours, and give each answer its headers.

    Attributes:
        app: The application that answers.
        hosts: Names of ours, in lower case, without ports; an IPv6 address without brackets.
        https: Whether browsers come by TLS.
    """

    app: ASGIApp
    hosts: Collection[str]
    https: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
                if self.https:
                    headers["strict-transport-security"] = "max-age=31536000"
            await send(message)

        named = Headers(scope=scope).getlist("host")
        if len(named) != 1 or host_of(named[0]) not in self.hosts:
            refusal = PlainTextResponse(
                f"The console is not known as {shown(named[0] if named else '')}: open it by one "
                f"of {', '.join(sorted(self.hosts))}, or start it with --host NAME.\n",
                421,
            )
            await refusal(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)


def host_of(header: str) -> str:
    """Return the host of a Host header, in lower case, without port and brackets."""
    text = header.lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def check_origin(request: Request) -> None:
    """Prove that a form comes from a page of ours, as far as the browser says.

    Raises:
        FormError: It comes from elsewhere.
    """
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    ours = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if site not in ("same-origin", "none") or (origin is not None and origin != ours):
        raise FormError(403, "the form comes from a page of elsewhere: open the console anew")


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, the last value of each.

    Raises:
        FormError: It is of another type, too long or too slow, or comes from elsewhere.
    """
    check_origin(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/x-www-form-urlencoded":
        raise FormError(415, f"a form is sent as {shown(kind)}; use x-www-form-urlencoded")
    body = bytearray()
    try:
        async with asyncio.timeout(_FORM_S):
            async for part in request.stream():
                body += part
                if len(body) > FORM_BYTES_MAX:
                    raise FormError(413, f"a form has more than {FORM_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise FormError(408, f"a form has not arrived within {_FORM_S:.0f} s") from error
    except ClientDisconnect as error:
        raise FormError(400, "the browser has gone") from error
    try:
        text = body.decode()
        return dict(
            urllib.parse.parse_qsl(
                text, keep_blank_values=True, max_num_fields=_FORM_FIELDS_MAX, errors="strict"
            )
        )
    except ValueError as error:
        raise FormError(400, "a form cannot be read: open the page anew") from error
