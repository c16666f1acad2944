"""Bearer tokens and the roles that they carry."""

import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from embertide.server.core.errors import Code, RefusedError

ROLES = ("reader", "operator", "node")
EXAMPLE = "REPLACE-ME"
"""What the tokens of the repository's examples begin with: everybody can read those."""
_READS = ("Get", "List", "Watch")
_NODES_CALLS = ("RegisterNode", "Heartbeat", "StreamBeats")


class TokensError(ValueError):
    """A tokens file is wrong; the message names the line, and no token."""


def read_tokens(path: Path, *, examples: bool = False) -> dict[str, str]:
    """Read lines of `role:token` as role by token; blank ones and those with # are left out.

    Args:
        path: The file.
        examples: Whether tokens that everybody can read will do.

    Raises:
        TokensError: The file cannot be read, a line is none of these, or a token is an example's.
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
                f"tokens file {path}, line {number}: write reader:TOKEN, operator:TOKEN or "
                "node:TOKEN"
            )
        if token.startswith(EXAMPLE) and not examples:
            raise TokensError(
                f"tokens file {path}, line {number}: this is the token of an example, which "
                "everybody can read: put the output of `openssl rand -hex 32` in its place, or "
                "give --example-tokens on a cluster that nobody else reaches"
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
        if role == "node" and rpc not in _NODES_CALLS:
            raise RefusedError(
                Code.PERMISSION_DENIED,
                f"a node's token calls {', '.join(_NODES_CALLS)} alone; {rpc} needs "
                f"role {'reader or ' * rpc.startswith(_READS)}operator",
            )
        if role == "reader" and not rpc.startswith(_READS):
            raise RefusedError(
                Code.PERMISSION_DENIED, f"{rpc} needs role operator; the token's is {role}"
            )
