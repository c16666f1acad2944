"""Bearer tokens, certificates, and the roles that they carry."""

import hmac
import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from embertide.server.core.errors import Code, RefusedError
from embertide.server.services.identity import ROLES, WORD, Identity, of_certificate

EXAMPLE = "REPLACE-ME"
"""The beginning of the tokens in the repository's examples, which everybody can read."""
MIN_LETTERS = 16
"""Letters of a token at least: fewer can be guessed (as in backend_cpp/access/token_file.cc)."""
_READS = ("Get", "List", "Watch")
_NODES_CALLS = ("RegisterNode", "Heartbeat", "StreamBeats")
_LINE = re.compile(
    rf"(?P<role>{'|'.join(ROLES)})(?:@(?P<model>{WORD}))?(?:/(?P<name>{WORD}))?:(?P<token>\S+)"
)
_LOOK_S = 1.0
_log = logging.getLogger(__name__)


class TokensError(ValueError):
    """A tokens file is wrong; the message names the line, and no token."""


def read_tokens(path: Path, *, examples: bool = False) -> dict[str, Identity]:
    """Read lines of `ROLE[@MODEL][/NAME]:TOKEN` as identity by token.

    Blank ones and those with # are left out. A role may have several tokens: while one is replaced,
    both stand there.

    Args:
        path: The file.
        examples: Whether tokens that everybody can read will do.

    Raises:
        TokensError: The file cannot be read, a line is none of these, or a token is short or an
            example's.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise TokensError(
            f"tokens file {path}: {error.strerror}; give one that this user may read"
        ) from error
    except UnicodeDecodeError as error:
        raise TokensError(f"tokens file {path} is no text") from error
    tokens = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise TokensError(
                f"tokens file {path}, line {number}: write ROLE[@MODEL][/NAME]:TOKEN, the role one "
                f"of {', '.join(ROLES)}"
            )
        if found["token"].startswith(EXAMPLE) and not examples:
            raise TokensError(
                f"tokens file {path}, line {number}: this is the token of an example, which "
                "everybody can read: put the output of `openssl rand -hex 32` in its place, or "
                "give --example-tokens on a cluster that nobody else reaches"
            )
        if len(found["token"]) < MIN_LETTERS and not found["token"].startswith(EXAMPLE):
            raise TokensError(
                f"tokens file {path}, line {number}: the token has {len(found['token'])} letters, "
                f"and {MIN_LETTERS} is the least: put the output of `openssl rand -hex 32` there"
            )
        tokens[found["token"]] = Identity(found["role"], found["model"] or "", found["name"] or "")
    if not tokens:
        raise TokensError(f"tokens file {path} holds no token; nobody could do anything")
    return tokens


class Tokens:
    """The tokens of a file, read again when it changes. Thread-safe.

    Attributes:
        refused: Times that a changed file was found wrong, and what was read before was kept.
    """

    def __init__(self, path: Path, *, examples: bool = False) -> None:
        """Read the file.

        Raises:
            TokensError: It is wrong.
        """
        self.refused = 0
        self._path = path
        self._examples = examples
        self._lock = threading.Lock()
        self._known = read_tokens(path, examples=examples)
        self._looked_s = time.monotonic()

    def known(self) -> Mapping[str, Identity]:
        """Return identity by token, as of a second ago at most."""
        with self._lock:
            if time.monotonic() - self._looked_s >= _LOOK_S:
                self._looked_s = time.monotonic()
                try:
                    self._known = read_tokens(self._path, examples=self._examples)
                except TokensError as error:
                    self.refused += 1
                    _log.warning("%s; the tokens before stay", error)
            return self._known


class Guard:
    """Says who a caller is. Without tokens and TLS everybody may do everything."""

    def __init__(self, tokens: Tokens | None, *, certificates: bool) -> None:
        """Take the tokens, if there are any, and whether callers show certificates."""
        self._tokens = tokens
        self._certificates = certificates

    @property
    def open(self) -> bool:
        """Whether nobody is asked who he is."""
        return self._tokens is None and not self._certificates

    def is_stranger(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Return whether the headers of a call say that it will be refused, by whatever connection.

        False where a certificate may say who calls.
        """
        if self.open or (self._certificates and not any(k == "authorization" for k, _ in metadata)):
            return False
        try:
            self.identify(metadata, {})
        except RefusedError:
            return True
        return False

    def identify(
        self,
        metadata: Sequence[tuple[str, str | bytes]],
        connection: Mapping[str, Iterable[bytes]],
    ) -> Identity:
        """Return who calls: whose token it is, or else whom the certificate names.

        Raises:
            RefusedError: Nobody that is known here.
        """
        if self.open:
            return Identity("open")
        given = next((value for key, value in metadata if key == "authorization"), None)
        if given is None or self._tokens is None:
            found = of_certificate(connection)
            if found is not None:
                return found
            raise RefusedError(
                Code.UNAUTHENTICATED,
                "no token: send metadata `authorization: Bearer TOKEN`"
                if self._tokens is not None
                else "the certificate says no role: its one URI must be spiffe://DOMAIN/role/ROLE",
            )
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        scheme, _, token = text.partition(" ")
        owners = [
            identity
            for known, identity in self._tokens.known().items()
            if hmac.compare_digest(known.encode(), token.encode())
        ]
        if scheme != "Bearer" or not owners:
            raise RefusedError(Code.UNAUTHENTICATED, "the token is not known here")
        return owners[0]


def check(caller: Identity, rpc: str) -> None:
    """Prove that a caller may call an RPC.

    Raises:
        RefusedError: It may not.
    """
    if caller.role in ("open", "operator"):
        return
    reads = rpc.startswith(_READS)
    if caller.role == "node":
        if rpc in _NODES_CALLS:
            return
        raise RefusedError(
            Code.PERMISSION_DENIED,
            f"a node calls {', '.join(_NODES_CALLS)} alone; {rpc} needs "
            f"role {'reader or ' * reads}operator",
        )
    if caller.role != "reader" or not reads:
        needs = "node or operator" if rpc in _NODES_CALLS else "reader or " * reads + "operator"
        raise RefusedError(
            Code.PERMISSION_DENIED, f"{rpc} needs role {needs}; the caller's is {caller.role}"
        )


def check_model(caller: Identity, model: str) -> None:
    """Prove that a caller may do something with a model.

    Raises:
        RefusedError: It is of another one.
    """
    if caller.model not in ("", model):
        raise RefusedError(
            Code.PERMISSION_DENIED,
            f"the caller is of model {caller.model!r} alone; this is {model[:80]!r}",
        )


def check_node(caller: Identity, name: str) -> None:
    """Prove that a caller may speak for a node.

    Raises:
        RefusedError: It is another node.
    """
    if caller.role == "node" and caller.name not in ("", name):
        raise RefusedError(
            Code.PERMISSION_DENIED,
            f"the caller is node {caller.name!r}, and cannot speak for {name[:80]!r}",
        )
