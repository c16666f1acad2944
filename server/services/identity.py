"""The identity of a caller, by a token's line or by the URI in its certificate.

    spiffe://DOMAIN/role/ROLE[/model/MODEL][/name/NAME]

The nodes read the same (backend_cpp/access/identity.h).
"""

import contextvars
import dataclasses
import re
from collections.abc import Iterable, Mapping

ROLES = ("reader", "operator", "node", "trainer", "control")
MODEL_KEY = "embertide-model"
"""The key in a call's metadata of the model that it is about, where there are several."""
WORD = r"[A-Za-z0-9._-]{1,128}"
_URI = re.compile(
    rf"spiffe://{WORD}/role/(?P<role>{'|'.join(ROLES)})"
    rf"(?:/model/(?P<model>{WORD}))?(?:/name/(?P<name>{WORD}))?"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """A caller.

    Attributes:
        role: One of ROLES; or `open`, where nobody is asked who he is.
        model: The one model that it is for; empty: all.
        name: Name of the node or person; empty: none is given.
    """

    role: str
    model: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return it as a tokens file has it: ROLE[@MODEL][/NAME]."""
        return (
            self.role + (f"@{self.model}" if self.model else "") + f"/{self.name}" * bool(self.name)
        )


CALLER: contextvars.ContextVar[Identity] = contextvars.ContextVar("caller")
"""The caller, while a call is answered."""


def of_uri(uri: str) -> Identity | None:
    """Return whom a certificate's URI names; None: nobody of ours."""
    found = _URI.fullmatch(uri)
    return Identity(*(part or "" for part in found.groups())) if found else None


def of_certificate(context: Mapping[str, Iterable[bytes]]) -> Identity | None:
    """Return whom the certificate of a connection names, by gRPC's auth context.

    None: there is no certificate, it names nobody of ours, or it has several URIs.
    """
    uris = list(context.get("peer_uri", ()))
    return of_uri(uris[0].decode(errors="replace")) if len(uris) == 1 else None
