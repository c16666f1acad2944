"""Where the contents of a publication folder come from: its model, its events, its copy.

    PUB/origin.json    {"model": NAME, "events": TEXT, "storage": URL, "warm_start": FOLDER}

A field may be empty.

A trainer writes it, and a mirror of object storage, each in the folder that is its own. By it a
folder of one run is told from one of another before anything in it is mixed with something else.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embertide.trainer.publish.folder import write_synced

ORIGIN = "origin.json"
_MAX_LETTERS = 2_000  # of a field
_USER = re.compile(r"(?<=://)[^/@\s]*@")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FolderOrigin:
    """Where a folder's contents come from; empty: it is not known.

    Attributes:
        model: The model's name.
        events: The name of the trainer's input, without users and passwords.
        storage: URL of object storage that the trainer copies it to, or the mirror from.
        warm_start: Folder of the run whose rows and net it began with, its events read again.
    """

    model: str = ""
    events: str = ""
    storage: str = ""
    warm_start: str = ""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "FolderOrigin":
        """Return it from JSON; what is no text is not known."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{n: said[n][:_MAX_LETTERS] for n in names if isinstance(said.get(n), str)})

    @classmethod
    def read(cls, folder: Path) -> "FolderOrigin":
        """Return that of a folder; of one that does not say, or is of an older build, no field."""
        try:
            said = json.loads((folder / ORIGIN).read_bytes())
        except (OSError, ValueError, RecursionError):
            return cls()
        return cls.of(said) if isinstance(said, dict) else cls()

    def write(self, folder: Path) -> None:
        """Have a folder say it; what it says already is not written again.

        Raises:
            OSError: It cannot be written.
        """
        if self == FolderOrigin.read(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{ORIGIN}"
        write_synced(partial, json.dumps(dataclasses.asdict(self)).encode())
        partial.rename(folder / ORIGIN)


def without_user(place: str) -> str:
    """Return a path or URL without the user and the password in it."""
    return _USER.sub("", place)
