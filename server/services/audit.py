"""The audit log: a JSON line for each mutation that was asked for, done or not."""

import datetime
import json
import logging
import logging.handlers
import os
import sys
import threading
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from embertide._common.private import open_private
from embertide.server.services.identity import Identity

MUTATIONS = frozenset(
    {
        *("AdoptPlan", "RegisterNode", "RemoveNode", "SetDriftSettings"),
        *("StartReshard", "StartRollback", "SteerOperation"),
    }
)
_IDS = ("request_id", "operation_id", "id")
_SUBJECTS = (
    *("drain_node", "undo_operation", "planner", "add_group", "remove_group"),
    *("steering", "version", "dry_run", "reason"),
)
_BYTES_MAX = 32 << 20
_FILES_KEPT = 8
_TEXT_MAX = 256


class _Output(logging.StreamHandler[Any]):
    """The output of this process; what cannot be written is an error."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # logging calls this where it has caught something


class _File(_Output, logging.handlers.RotatingFileHandler):
    """A file of lines that is put aside when it is large; what cannot be written is an error.

    It is its user's alone: it tells who may do what.
    """

    def _open(self) -> Any:
        return os.fdopen(open_private(Path(self.baseFilename)), "a", encoding=self.encoding)


class Audit:
    """Appends to a file; a line is on its way to the disk before the caller hears anything.

    A file of 32 MiB is put aside as NAME.1, and so on; of those eight are kept. `/dev/stdout` is
    the output of this process, whatever it is, as in a container whose lines others collect.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file; None: nothing is kept."""
        self._lock = threading.Lock()
        self._file = None if path is None else _opened(path)

    def write(
        self,
        *,
        rpc: str,
        request: Message | None,
        call: str,
        peer: str,
        caller: Identity,
        model: str,
        outcome: str,
        message: str,
    ) -> None:
        """Write who asked for what, under which ids, and what came of it.

        Texts are cut at 256 characters. `model` is what the call is about, if
        that is said. `request` is None where
        the caller may not call at all: then it was not looked at.

        Raises:
            OSError: It cannot be written.
        """
        if self._file is None or rpc not in MUTATIONS:
            return
        given = {field.name: value for field, value in request.ListFields()} if request else {}
        line = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "rpc": rpc,
            "call": call,
            "role": caller.role,
            **({"name": caller.name} if caller.name else {}),
            **({"model": model} if model else {}),
            "peer": peer,
            "ids": {name: given[name] for name in _IDS if name in given},
            **{name: given[name] for name in _SUBJECTS if name in given},
            **_targets(given),
            "outcome": outcome,
            "message": message,
        }
        with self._lock:
            self._file.emit(logging.makeLogRecord({"msg": json.dumps(_short(line))}))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _opened(path: Path) -> logging.StreamHandler[Any]:
    if path == Path("/dev/stdout"):
        return _Output(sys.stdout)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _File(path, maxBytes=_BYTES_MAX, backupCount=_FILES_KEPT, encoding="utf-8")


def _short(value: Any) -> Any:
    """Return what a line holds, no text of it longer than anybody reads."""
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return value[:_TEXT_MAX] if isinstance(value, str) else value


def _targets(given: dict[str, Any]) -> dict[str, Any]:
    """Return whom a request is about: a node, settings, or what an explicit target names."""
    found: dict[str, Any] = {}
    if (node := given.get("node")) is not None:
        found["node"] = node if isinstance(node, str) else node.name
    if (settings := given.get("settings")) is not None:
        found["settings"] = {field.name: value for field, value in settings.ListFields()}
    if (target := given.get("target")) is not None:
        found["target"] = {
            "base_epoch": target.base_epoch,
            "buckets": sum(each.bucket_count for each in target.assignments),
            "tables": sorted({each.table_id for each in target.assignments}),
        }
    return found
