"""What was decided by waiting, on disk before it is relied on: lines of JSON beside a publication.

Reading again would not show such a decision. Whoever reads again takes it from here.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Journal:
    """A file of decisions; without a path it keeps none. Used by one thread."""

    def __init__(self, path: Path | None) -> None:
        """Name the file, which need not exist."""
        self._path = path

    def lines(self) -> list[dict[str, Any]]:
        """Return what was written; a line that a kill cut short was never relied on."""
        if self._path is None or not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_bytes().split(b"\n")[:-1]]

    def add(self, said: dict[str, Any]) -> None:
        """Append a line; it is on disk when this returns."""
        if self._path is None:
            return
        with self._path.open("ab") as out:
            out.write(json.dumps(said).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())

    def replace(self, lines: Iterable[dict[str, Any]]) -> None:
        """Have these lines alone, all of them or, after a kill, those before."""
        if self._path is None:
            return
        partial = self._path.with_name(f".{self._path.name}.partial")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            out.writelines(json.dumps(each).encode() + b"\n" for each in lines)
            out.flush()
            os.fsync(out.fileno())
        partial.rename(self._path)
