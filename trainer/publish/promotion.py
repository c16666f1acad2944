"""Which versions ordinary requests may see: the record that guard and rollback write, nodes read.

    PUB/promoted.json   one header line, then JSON (docs/formats.md, "Promotion record")

The file is the truth, written under a lock; the bus holds a copy, so that nodes hear of a change at
once. A reader takes whichever has the larger revision. The nodes' side is
backend_cpp/bus/promotion.h.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

import redis

from embertide import _store
from embertide.trainer.errors import FinalError
from embertide.trainer.publish.folder import Publication, sync_folder, write_synced

FILE = "promoted.json"
REASONS = ("not_finite", "auc", "calibration", "latency", "rollback", "operator")
"""Why versions are withdrawn; also label values of metrics."""
Reason = Literal["not_finite", "auc", "calibration", "latency", "rollback", "operator"]

_HEADER = re.compile(rb"EMPRM001 (\d{1,19}) ([0-9a-f]{8})\n")
_KEPT = 64  # withdrawn ranges; more than any window of versions
# The copy must never replace a newer one. A full Redis takes it for the DEL that comes first.
_MIRROR = """
local now = tonumber(string.match(redis.call('GET', KEYS[1]) or '', '^EMPRM001 (%d+) ') or '0')
if now >= tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""

log = logging.getLogger(__name__)


class PromotionError(FinalError):
    """The record cannot be read or changed; the message names the file and what to do."""


class StaleDecisionError(PromotionError):
    """The record changed after the decision was made: look again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Withdrawn:
    """Versions that ordinary requests must never see, both ends included."""

    first: int
    last: int
    reason: Reason
    by: str  # who decided
    at_ms: int
    detail: str = ""  # figures that led to it, for people

    def __contains__(self, number: int) -> bool:
        """Return whether a version is among them."""
        return self.first <= number <= self.last


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Undone:
    """A rollback: version `number` restores the state of version `to`."""

    number: int
    to: int
    to_watermark_ms: int
    watermark_ms: int  # of the newest version that was undone
    by: str
    at_ms: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promotion:
    """The record. Immutable; revision 0 is that of a publication without one."""

    revision: int = 0
    promoted: int = 0  # newest version that ordinary requests may see; 0: nobody has said yet
    withdrawn: tuple[Withdrawn, ...] = ()  # the last ones
    undone: tuple[Undone, ...] = ()  # the last rollbacks, oldest first
    totals: dict[str, int] = dataclasses.field(default_factory=dict)  # withdrawn, by reason
    by: str = ""  # who wrote this revision
    at_ms: int = 0

    def is_withdrawn(self, number: int) -> bool:
        """Return whether a version was withdrawn."""
        return any(number in each for each in self.withdrawn)

    def may_see(self, number: int) -> bool:
        """Return whether ordinary requests may see a version."""
        return number <= self.promoted and not self.is_withdrawn(number)

    def is_decided(self, number: int) -> bool:
        """Return whether nothing is left to be said of a version."""
        return number <= self.promoted or self.is_withdrawn(number)

    def with_promoted(self, number: int) -> "Promotion":
        """Return it with a newer version promoted."""
        if number <= self.promoted:
            raise ValueError(f"version {number} is not newer than {self.promoted}")
        return dataclasses.replace(self, promoted=number)

    def with_withdrawn(self, entry: Withdrawn) -> "Promotion":
        """Return it with more versions withdrawn."""
        totals = {**self.totals, entry.reason: self.totals.get(entry.reason, 0) + 1}
        kept = (*self.withdrawn, entry)[-_KEPT:]
        return dataclasses.replace(self, withdrawn=kept, totals=totals)

    def with_undone(self, entry: Undone) -> "Promotion":
        """Return it after a rollback, whose version is promoted in the same step."""
        range_ = Withdrawn(
            first=entry.to + 1,
            last=entry.number - 1,
            reason="rollback",
            by=entry.by,
            at_ms=entry.at_ms,
            detail=f"rolled back to {entry.to}",
        )
        undone = (*self.undone, entry)[-_KEPT:]
        return dataclasses.replace(
            self.with_withdrawn(range_).with_promoted(entry.number), undone=undone
        )

    def encode(self) -> bytes:
        """Return the record's bytes."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True).encode() + b"\n"
        return b"EMPRM001 %d %08x\n" % (self.revision, _store.crc32c(text)) + text

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Promotion":
        """Undo `encode`.

        Raises:
            PromotionError: The bytes are something else.
        """
        header = _HEADER.match(data)
        text = data[header.end() :] if header else b""
        if header is None or int(header[2], 16) != _store.crc32c(text):
            raise PromotionError(
                f"{where} fails its checksum: restore it from a backup, or promote a version anew "
                "with `embertide rollback`"
            )
        fields: dict[str, Any] = json.loads(text)
        fields["withdrawn"] = tuple(Withdrawn(**each) for each in fields["withdrawn"])
        fields["undone"] = tuple(Undone(**each) for each in fields["undone"])
        return cls(**fields)


class PromotionRecord:
    """The record of one publication, read and changed.

    Args:
        publication: Its folder.
        bus: A connection to Redis; None: the file alone.
        key: Where the copy lies on the bus.
    """

    def __init__(self, publication: Publication, bus: Any = None, key: str = "") -> None:
        """Nothing is read yet."""
        self._path = publication.path / FILE
        self._bus, self._key = bus, key
        self.mirror_failures = 0  # copies that did not reach the bus

    def read(self) -> Promotion:
        """Return the newest revision, of the file or of the bus.

        Raises:
            PromotionError: The stored promotion fails its checksum.
        """
        found = [Promotion()]
        with contextlib.suppress(FileNotFoundError):
            found.append(Promotion.decode(self._path.read_bytes(), str(self._path)))
        with contextlib.suppress(redis.RedisError):
            if self._bus is not None and (data := self._bus.get(self._key)):
                found.append(Promotion.decode(data, f"key {self._key}"))
        return max(found, key=lambda each: each.revision)

    def promote(self, number: int, *, by: str, revision: int) -> Promotion:
        """Let ordinary requests see versions up to `number`.

        Args:
            number: Newer than the promoted version.
            by: Who decided.
            revision: That the decision was made on.

        Raises:
            StaleDecisionError: There is a newer revision.
        """
        with self._changing(revision) as now:
            return self._write(now.with_promoted(number), by)

    def withdraw(
        self, number: int, *, reason: Reason, detail: str, by: str, revision: int
    ) -> Promotion:
        """Keep a version from ordinary requests for ever; errors as in `promote`."""
        entry = Withdrawn(
            first=number, last=number, reason=reason, by=by, at_ms=_now_ms(), detail=detail
        )
        with self._changing(revision) as now:
            return self._write(now.with_withdrawn(entry), by)

    def undo(self, entry: Undone) -> Promotion:
        """Note a rollback, and promote its version."""
        with self._changing(None) as now:
            return self._write(now.with_undone(entry), entry.by)

    def mirror(self) -> None:
        """Bring the newest revision to the bus again: it may have lost it."""
        now = self.read()
        if now.revision:
            self._mirror(now)

    @contextlib.contextmanager
    def _changing(self, revision: int | None) -> Iterator[Promotion]:
        """Hold the lock, and give the newest revision."""
        with self._path.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            now = self.read()
            if revision is not None and now.revision != revision:
                raise StaleDecisionError(
                    f"{self._path} has revision {now.revision}, the decision was made on "
                    f"{revision}: decide again"
                )
            yield now

    def _write(self, changed: Promotion, by: str) -> Promotion:
        changed = dataclasses.replace(
            changed, revision=changed.revision + 1, by=by, at_ms=_now_ms()
        )
        temporary = self._path.with_suffix(".partial")
        write_synced(temporary, changed.encode())
        temporary.rename(self._path)
        sync_folder(self._path.parent)
        self._mirror(changed)
        return changed

    def _mirror(self, record: Promotion) -> None:
        if self._bus is None:
            return
        try:
            self._bus.eval(_MIRROR, 1, self._key, record.revision, record.encode())
        except redis.RedisError as error:
            self.mirror_failures += 1
            log.warning("the bus is away (%s); nodes read %s instead", error, self._path)


def maker(role: str) -> str:
    """Name who decides: its role, machine and process."""
    return f"{role}@{os.uname().nodename}:{os.getpid()}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
