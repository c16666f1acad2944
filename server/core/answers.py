"""Caller-made ids: a repeat gets the first answer, other content under an old id is refused."""

import collections
import re
from typing import Generic, TypeVar

from google.protobuf.message import Message

from embertide.server.core.errors import Code, RefusedError, invalid

KEPT_MS = 24 * 3600 * 1000
KEPT = 10_000
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


class Answers(Generic[Answer]):
    """First answers by id: for 24 hours, and the newest 10,000."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._given: collections.OrderedDict[str, tuple[bytes, Answer, int]] = (
            collections.OrderedDict()
        )

    def find(self, id: str, request: Message) -> Answer | None:
        """Return the first answer to an id, or None if it is new.

        Raises:
            RefusedError: The id was used for other content.
        """
        if id not in self._given:
            return None
        asked, answer, _ = self._given[id]
        if asked != content(request):
            raise in_use(id)
        return answer

    def keep(self, id: str, request: Message, answer: Answer, now_ms: int) -> Answer:
        """Remember an answer, and return it."""
        self._given[id] = (content(request), answer, now_ms)
        while len(self._given) > KEPT or next(iter(self._given.values()))[2] < now_ms - KEPT_MS:
            self._given.popitem(last=False)
        return answer


def in_use(id: str) -> RefusedError:
    """Return the refusal of an id that was used for something else."""
    return RefusedError(Code.ALREADY_EXISTS, f"id {id!r} was used for other content; make a new id")
