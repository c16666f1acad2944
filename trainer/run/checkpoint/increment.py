"""Incremental snapshots: the rows' state that changed since a snapshot with all rows, its base.

    PUB/increments/NUMBER-LINEAGE/   the files of a checkpoint; of the rows' state only what changed

Nothing is written twice: the rows of such a version are those of the base and of the delta files
after it, which nodes read anyway, and the state of all other rows is that of the base's checkpoint,
its ages grown by the steps since. Each rests on the base alone, never on another increment.

Shapes: N rows of a bucket, K of them that changed, C chunks of a row, E elements of state.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.errors import FinalError, TrainerError
from embertide.trainer.publish.chain import Place, VersionFiles, read_records
from embertide.trainer.publish.folder import COMMIT, PARTITIONS, Publication, VersionId
from embertide.v1 import update_pb2

Keys = NDArray[np.uint64]
_OLDEST = 2**31 - 1  # steps, as the store counts them


class BrokenChainError(FinalError):
    """A file that an increment rests on is missing or another; the message names the file."""

    remedy = "bring it back from a copy; an older checkpoint that is whole is taken"


class ChangedKeys:
    """Keys of the rows that versions changed, by table (its place) and bucket; for one thread.

    Takes at most twice 8 bytes a key, and of keys that change again twice as much for a moment.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._sorted: dict[Place, Keys] = {}
        self._more: dict[Place, list[Keys]] = {}

    def add(self, place: Place, keys: Keys) -> None:
        """Note keys, in any order; some may be there."""
        more = self._more.setdefault(place, [])
        more.append(keys)
        if sum(map(len, more)) > len(self._sorted.get(place, ())):
            self.of(place)

    def of(self, place: Place) -> Keys:
        """Return the keys of a bucket, each once, ascending."""
        if more := self._more.pop(place, None):
            before = [self._sorted[place]] if place in self._sorted else []
            self._sorted[place] = np.unique(np.concatenate([*before, *more]))
        return self._sorted.get(place, np.empty(0, np.uint64))

    def count(self) -> int:
        """Return how many there are."""
        return sum(len(self.of(place)) for place in {*self._sorted, *self._more})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Increment:
    """The versions that an incremental snapshot rests on.

    Attributes:
        base: The version of the snapshot with all rows.
        ordinal: It is the so many-th since that one, from 1.
        chain: The versions after the base up to its own, oldest first, and the SHA-256 of the
            commit file of each, which names all other files of the version by checksum.
    """

    base: VersionId
    ordinal: int
    chain: Sequence[tuple[VersionId, str]]

    def as_json(self) -> dict[str, Any]:
        """Return it as `checkpoint.json` has it."""
        chain = [[*version, sha256] for version, sha256 in self.chain]
        return {"base": self.base._asdict(), "ordinal": self.ordinal, "chain": chain}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Increment":
        """Read what `as_json` gave.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is of another kind.
            ValueError: The same.
        """
        chain = [(VersionId(number, lineage), sha256) for number, lineage, sha256 in said["chain"]]
        return cls(base=VersionId(**said["base"]), ordinal=said["ordinal"], chain=chain)


def _sha256(publication: Publication, version: VersionId) -> str:
    return hashlib.sha256((publication.delta_path(version) / COMMIT).read_bytes()).hexdigest()


def increment_of(
    publication: Publication, version: VersionId, base: VersionId, ordinal: int, max_bytes: int
) -> Increment | None:
    """Return what an increment of a version would rest on; None: a snapshot of all rows is due.

    So it is where the versions after `base` do not lead to this one, or their files take more than
    `max_bytes`.
    """
    try:
        files = VersionFiles(publication, version)
    except TrainerError:  # a file of a version is harmed, or gone
        return None
    if VersionId(int(files.manifest["version"]), int(files.manifest["lineage"])) != base:
        return None
    partitions = (partition for file in files.commits for partition in file.partitions)
    if sum(partition.delta_bytes for partition in partitions) > max_bytes:
        return None
    versions = [VersionId.of(file.commit.version) for file in files.commits]
    chain = [(each, _sha256(publication, each)) for each in versions]
    return Increment(base=base, ordinal=ordinal, chain=chain)


class ChainReader:
    """Reads what the versions of an increment's chain changed, each file proved. For one thread."""

    def __init__(self, publication: Publication, increment: Increment) -> None:
        """Read the commits.

        Raises:
            BrokenChainError: One is missing, or is not the one that was there.
        """
        self._publication = publication
        self._commits: list[update_pb2.CommitFile] = []
        self._read: dict[int, dict[Place, list[bytes]]] = {}  # the partition read last
        for version, sha256 in increment.chain:
            path = publication.delta_path(version) / COMMIT
            try:
                found = _sha256(publication, version)
            except FileNotFoundError:
                raise BrokenChainError(f"{path} is missing") from None
            if found != sha256:
                raise BrokenChainError(f"{path} has sha256 {found}, the increment names {sha256}")
            self._commits.append(publication.read_commit(version))

    @property
    def watermark_ms(self) -> int:
        """Event time of the last version, ms."""
        return self._commits[-1].commit.watermark_ms

    def records(self, table_id: int, bucket: int) -> list[bytes]:
        """Return what the versions changed in a bucket, oldest first.

        Asked partition by partition, each file is read once.

        Raises:
            PublicationError: A file is not what its commit says.
        """
        partition = bucket % PARTITIONS
        if partition not in self._read:
            self._read = {partition: read_records(self._publication, self._commits, partition)}
        return self._read[partition].get((table_id, bucket), [])


def at_keys(state: "_store.BucketState", place_N: NDArray[Any]) -> "_store.BucketState":
    """Return the state of some of a bucket's rows: at places, or where a mask is true."""
    accumulator_N, age_N, utility_NC, steps_N, elements_NE = (each[place_N] for each in state)
    return accumulator_N, age_N, utility_NC, steps_N, elements_NE


def overlaid(
    key_N: Keys,
    base: "tuple[Keys, _store.BucketState]",
    changed: "tuple[Keys, _store.BucketState] | None",
    steps: int,
) -> "_store.BucketState":
    """Return the state of a bucket's rows: of those that changed, and else that of the base.

    Args:
        key_N: Keys of the rows, ascending; so are those of the others.
        base: Keys and state of the rows that the base has.
        changed: Keys and state of those that changed since; None: none did.
        steps: That were taken since the base.

    Raises:
        ValueError: A row has no state in either.
    """
    changed = changed or (np.empty(0, np.uint64), at_keys(base[1], np.empty(0, np.int64)))
    in_base_N = np.isin(key_N, base[0], assume_unique=True)
    in_changed_N = np.isin(key_N, changed[0], assume_unique=True)
    if not (in_base_N | in_changed_N).all():
        raise ValueError(f"{int((~(in_base_N | in_changed_N)).sum())} rows have no state")
    place_N = np.searchsorted(base[0], key_N[in_base_N])
    accumulator_M, age_M, utility_MC, steps_M, elements_ME = at_keys(base[1], place_N)
    age_M = np.minimum(age_M.astype(np.int64) + steps, _OLDEST).astype(np.uint32)
    kept = (accumulator_M, age_M, utility_MC, steps_M, elements_ME)
    fresh = at_keys(changed[1], np.searchsorted(changed[0], key_N[in_changed_N]))

    def merged(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        out = np.empty((len(key_N), *old.shape[1:]), old.dtype)
        out[in_base_N] = old
        out[in_changed_N] = new
        return out

    accumulator_N, age_N, utility_NC, steps_N, elements_NE = map(merged, kept, fresh)
    return accumulator_N, age_N, utility_NC, steps_N, elements_NE
