"""Bearer tokens and the roles that they carry."""

import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from embertide.server.core.errors import Code, RefusedError

ROLES = ("reader", "operator")
_READS = ("Get", "List", "Watch")


class TokensError(ValueError):
    """A tokens file is wrong; the message names the line, and no token."""


def read_tokens(path: Path) -> dict[str, str]:
    """Read lines of `role:token` as role by token; blank ones and those with # are left out.

    Raises:
        TokensError: The file cannot be read, or a line is none of these.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise TokensError(f"tokens file {path}: {error.strerror}") from error
    tokens = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        role, _, token = line.strip().partition(":")
        if role not in ROLES or not token:
            raise TokensError(
                f"tokens file {path}, line {number}: write reader:TOKEN or operator:TOKEN"
            )
        tokens[token] = role
    if not tokens:
        raise TokensError(f"tokens file {path} holds no token; nobody could do anything")
    return tokens


class Guard:
    """Says whether a caller may do something. Without tokens everybody may do everything."""

    def __init__(self, tokens: Mapping[str, str] | None) -> None:
        """Take role by token; None: the service is open."""
        self._tokens = tokens

    @property
    def open(self) -> bool:
        """Whether nobody is asked for a token."""
        return self._tokens is None

    def role(self, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        """Return the role of a caller.

        Raises:
            RefusedError: There is no token, or nobody knows it.
        """
        if self._tokens is None:
            return "open"
        given = next((value for key, value in metadata if key == "authorization"), None)
        if given is None:
            raise RefusedError(
                Code.UNAUTHENTICATED, "no token: send metadata `authorization: Bearer TOKEN`"
            )
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        scheme, _, token = text.partition(" ")
        found = [
            role
            for known, role in self._tokens.items()
            if hmac.compare_digest(known.encode(), token.encode())
        ]
        if scheme != "Bearer" or not found:
            raise RefusedError(Code.UNAUTHENTICATED, "the token is not known here")
        return found[0]

    @staticmethod
    def check(role: str, rpc: str) -> None:
        """Prove that a role may call an RPC.

        Raises:
            RefusedError: It may not.
        """
        if role == "reader" and not rpc.startswith(_READS):
            raise RefusedError(
                Code.PERMISSION_DENIED, f"{rpc} needs role operator; the token's is {role}"
            )
