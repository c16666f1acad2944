"""Several files read as one input: the files of a glob or a list, in order of time.

Event indices go on from file to file, and so do groups of one ts. Files are ordered by the first
ts that each accepts, or by name where the schema has no time. An index is the place in all of
them, so a run that goes on needs the files before its place to be there still.
"""

import dataclasses
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from embertide.trainer.data.assemble import MAX_TS_MS, Chunk, ChunkedSource
from embertide.trainer.data.base import DeadLetters
from embertide.trainer.data.urls import file_systems
from embertide.trainer.errors import DataError


def matching_files(path: str) -> list[str]:
    """Local paths or URLs of what a path with `*`, `?` or `[` names, sorted; else the path itself.

    Raises:
        DataError: No file matches.
    """
    if not glob.has_magic(path) or Path(path).is_file():
        return [path]
    try:
        if "://" in path:
            system, pattern = file_systems().url_to_fs(path)
            paths = [system.unstrip_protocol(name) for name in system.glob(pattern)]
        else:
            # Path.glob takes no absolute pattern.
            paths = glob.glob(path, recursive=True)  # noqa: PTH207
    except (OSError, ValueError, ImportError) as error:
        raise DataError(path, f"cannot be listed: {error}") from error
    if not paths:
        raise DataError(path, "no file matches; check the pattern")
    return sorted(paths)


class FilesSource(ChunkedSource):
    """An `EventSource` over several files of one format, one after the other."""

    def __init__(
        self, path: str, parts: Sequence[ChunkedSource], dead_letters: DeadLetters | None = None
    ) -> None:
        """Orders the files by time, for which the first rows of each are read.

        Args:
            path: The name of all the files together, for messages.
            parts: A source a file, of one schema.
            dead_letters: Where rejected rows go; by default they are only counted.

        Raises:
            ValueError: There is no file, or they differ in format or schema.
            DataError: A file cannot be read.
        """
        if not parts:
            raise ValueError(f"{path}: no file is named; name at least one")
        super().__init__(path, parts[0].schema, dead_letters)
        for part in parts:
            if (type(part), part.schema) != (type(parts[0]), self.schema):
                raise ValueError(f"{part.path} has another format or schema than {parts[0].path}")
        first_ms = {part.path: self._first_ms(part) for part in parts}
        self._parts = [
            (part, first_ms[part.path])
            for part in sorted(parts, key=lambda part: (first_ms[part.path], part.path))
        ]

    @property
    def parts(self) -> list[ChunkedSource]:
        """A source a file, in order of time."""
        return [part for part, _ in self._parts]

    def _first_ms(self, part: ChunkedSource) -> int:
        """The first ts that a file accepts; without a time all are alike."""
        first = None if self.schema.ts is None else next(part.batches(batch_size=1), None)
        return -MAX_TS_MS if first is None else int(first.ts_ms_B[0])

    def total_events(self) -> int | None:
        """Events of all files; None if only reading tells."""
        totals = [part.total_events() for part, _ in self._parts]
        known = [total for total in totals if total is not None]
        return sum(known) if len(known) == len(totals) else None

    def chunks(self, start: int) -> Iterator[Chunk]:
        """See `ChunkedSource.chunks`; a file of known length that lies before `start` stays shut.

        Raises:
            DataError: A file begins before the end of the one before it, among the rest.
        """
        base = 0
        for part, first_ms in self._parts:
            end = part.total_events() or 0
            if end == 0 or base + end > start:
                begins: tuple[str, int] | None = (part.path, first_ms)
                for chunk in part.chunks(max(start - base, 0)):
                    yield dataclasses.replace(
                        chunk,
                        event_N=chunk.event_N + base,
                        end=chunk.end + base,
                        malformed=[(event + base, text) for event, text in chunk.malformed],
                        begins=None if self.schema.ts is None else begins,
                    )
                    begins, end = None, chunk.end
            base += end
