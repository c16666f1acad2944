"""Idempotency by caller-made ids: a repeat gets the first answer, other content is refused."""

import collections
import dataclasses
import hashlib
import re
from typing import Generic, TypeVar

from google.protobuf.message import Message

from embertide.server.core.errors import Code, RefusedError, invalid

KEPT_MS = 24 * 3600 * 1000
KEPT = 10_000
KEPT_BYTES = 32 << 20
ID_BYTES_MAX = 64
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Answer = TypeVar("Answer", bound=Message)


def check_id(field: str, value: str) -> None:
    """Prove that a caller-made id is 1 to 64 of [A-Za-z0-9._-]."""
    if not _ID.fullmatch(value):
        raise invalid(
            f"{field} is {value[:80]!r}; use 1 to {ID_BYTES_MAX} of A-Z a-z 0-9 . _ - (a UUID)"
        )


def content(request: Message) -> bytes:
    """Return the bytes by which two requests are the same."""
    return request.SerializeToString(deterministic=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Given(Generic[Answer]):
    asked: bytes  # SHA-256 of the request's content: a request may have megabytes
    answer: Answer
    at_ms: int

    @property
    def bytes(self) -> int:
        """Its bytes in memory, about."""
        return ID_BYTES_MAX + len(self.asked) + self.answer.ByteSize()


class Answers(Generic[Answer]):
    """First answers by id: for 24 hours, the newest 10,000, and 32 MiB."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._given: collections.OrderedDict[str, _Given[Answer]] = collections.OrderedDict()
        self.bytes = 0

    def find(self, id: str, request: Message) -> Answer | None:
        """Return the first answer to an id, or None if it is new.

        Raises:
            RefusedError: The id was used for other content.
        """
        if id not in self._given:
            return None
        given = self._given[id]
        if given.asked != _digest(request):
            raise in_use(id)
        return given.answer

    def keep(self, id: str, request: Message, answer: Answer, now_ms: int) -> Answer:
        """Remember an answer, and return it."""
        if id in self._given:
            self.bytes -= self._given.pop(id).bytes
        self._given[id] = _Given(asked=_digest(request), answer=answer, at_ms=now_ms)
        self.bytes += self._given[id].bytes
        while self._is_full() or next(iter(self._given.values())).at_ms < now_ms - KEPT_MS:
            self.bytes -= self._given.popitem(last=False)[1].bytes
        return answer

    def _is_full(self) -> bool:
        return len(self._given) > KEPT or (self.bytes > KEPT_BYTES and len(self._given) > 1)


def _digest(request: Message) -> bytes:
    return hashlib.sha256(content(request)).digest()


def in_use(id: str) -> RefusedError:
    """Return the refusal of an id that was used for something else."""
    return RefusedError(Code.ALREADY_EXISTS, f"id {id!r} was used for other content; make a new id")
