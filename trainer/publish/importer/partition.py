"""Sorting a table's records by bucket and key in bounded memory.

A bucket is the top bits of a key's hash, so records are dealt to files by the first bits of their
bucket, 256 files at most, and a file that is still too large is dealt again by the bits that
follow. What fits is read, sorted and handed on, and its file removed: the disk holds every record
about once. Dealing keeps the order of rows, so of two equal keys the later one is known.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.keys import buckets_of
from embertide.trainer.publish.importer.sources import ModelImportError

Records = NDArray[Any]

_LEVEL_BITS = 8  # 256 open files, a quarter of what a process usually may have
# Beside the records, a row being sorted holds its key, bucket, place and their sorted copies.
_SORT_BYTES = 64
# While a bucket is written, memory holds the sorted records and, in the store's library, a file
# image that grows by doubling.
_COPIES = 4


def needed_bytes(rows: int, largest_bucket: int, record_bytes: int) -> int:
    """Return the memory that sorting `rows` and writing their buckets takes."""
    return rows * (record_bytes + _SORT_BYTES) + largest_bucket * _COPIES * record_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Records of the 2^bits buckets from `first` on."""

    path: Path
    first: int
    bits: int


class Partition:
    """The records of one table, in files until they are handed on.

    Args:
        folder: Where the files are; it exists and is the owner's to remove.
        dtype: That of a record.
        bucket_bits: The table has 2^bucket_bits buckets.
        memory_bytes: Bound on the memory in use at a time.
        rows_of: Gives the positions of a key, for the message about a duplicate.
        keep_last: Whether the last of several rows of one key stays; otherwise they are an error.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any],
        *,
        bucket_bits: int,
        memory_bytes: int,
        rows_of: Callable[[int], list[int]],
        keep_last: bool,
    ) -> None:
        """Hold nothing yet."""
        self._folder = folder
        self._dtype = dtype
        self._bucket_bits = bucket_bits
        self._memory_bytes = memory_bytes
        self._rows_of = rows_of
        self._keep_last = keep_last
        self._counts = np.zeros(1 << bucket_bits, np.int64)
        self.duplicates = 0

    def buckets(self, batches: Iterable[Records]) -> Iterator[tuple[int, bytes]]:
        """Take all records and yield (bucket, records) of every bucket, keys ascending.

        Raises:
            ModelImportError: A key repeats, or a bucket does not fit the memory.
        """
        counted = (self._count(records) for records in batches)
        for part in self._deal(counted, 0, self._bucket_bits):
            yield from self._sorted(part)

    def _count(self, records: Records) -> Records:
        bucket_N = buckets_of(records["key"], self._bucket_bits)
        self._counts += np.bincount(bucket_N, minlength=len(self._counts))
        return records

    def _deal(self, batches: Iterable[Records], first: int, bits: int) -> list[_Part]:
        """Deal records of the 2^bits buckets from `first` on to files."""
        level = min(bits, _LEVEL_BITS)
        rest = bits - level
        parts = [
            _Part(self._folder / f"{bits}-{first + (i << rest)}", first + (i << rest), rest)
            for i in range(1 << level)
        ]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(part.path.open("wb")) for part in parts]
            for records in batches:
                bucket_N = buckets_of(records["key"], self._bucket_bits)
                # 8 bits: numpy sorts them by radix, and stably.
                part_N = ((bucket_N - np.uint32(first)) >> np.uint32(rest)).astype(np.uint8)
                dealt = _take(records, np.argsort(part_N, kind="stable"))
                ends = np.cumsum(np.bincount(part_N, minlength=len(files)))
                for file, begin, end in zip(files, (0, *ends), ends, strict=False):
                    file.write(dealt[begin:end].data)
        return parts

    def _sorted(self, part: _Part) -> Iterator[tuple[int, bytes]]:
        counts = self._counts[part.first : part.first + (1 << part.bits)]
        size = self._dtype.itemsize
        needed = needed_bytes(int(counts.sum()), int(counts.max()), size)
        if needed <= self._memory_bytes:
            yield from self._read_sorted(part)
        elif part.bits:
            parts = self._deal(self._read(part.path), part.first, part.bits)
            part.path.unlink()
            for each in parts:
                yield from self._sorted(each)
        else:
            raise ModelImportError(
                f"bucket {part.first}",
                f"its {counts[0]} rows need {needed >> 20} MiB of the {self._memory_bytes >> 20} "
                f"MiB of memory; give bucket_bits above {self._bucket_bits}, or more memory",
            )

    def _read(self, path: Path) -> Iterator[Records]:
        # Read and dealt: two copies at a time, and what dealing makes of keys.
        rows = max(1, self._memory_bytes // (4 * (self._dtype.itemsize + _SORT_BYTES)))
        with path.open("rb") as file:
            while len(records := np.fromfile(file, self._dtype, rows)):
                yield records

    def _read_sorted(self, part: _Part) -> Iterator[tuple[int, bytes]]:
        records = np.fromfile(part.path, self._dtype)
        part.path.unlink()
        keys_N = records["key"].copy()
        bucket_N = buckets_of(keys_N, self._bucket_bits)
        order = np.lexsort((keys_N, bucket_N))
        keys_N, bucket_N = keys_N[order], bucket_N[order]
        repeats = keys_N[1:] == keys_N[:-1]
        if repeats.any():
            if not self._keep_last:
                self._refuse(int(keys_N[int(np.argmax(repeats))]))
            self.duplicates += int(np.count_nonzero(repeats))
            stays = np.append(~repeats, True)
            order, bucket_N = order[stays], bucket_N[stays]
        bounds = np.searchsorted(bucket_N, np.arange((1 << part.bits) + 1) + part.first)
        del keys_N, bucket_N, repeats
        for i, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
            yield part.first + i, _take(records, order[begin:end]).tobytes()

    def _refuse(self, key: int) -> None:
        rows = self._rows_of(key)
        signed = f" ({key - 2**64} as int64)" if key >= 2**63 else ""
        raise ModelImportError(
            f"key {key}{signed}",
            f"is that of rows {', '.join(map(str, rows[:2]))}"
            f"{' and more' if len(rows) > 2 else ''}; remove one, or keep the last one with "
            "--duplicates last",
        )


def _take(records: Records, order: NDArray[np.int64]) -> NDArray[Any]:
    """Return records in another order, as opaque items: numpy moves those by memcpy."""
    return np.take(records.view(f"V{records.dtype.itemsize}"), order)
