"""The audit log: a JSON line for each mutation that was asked for, done or not."""

import datetime
import json
import threading
from pathlib import Path

from google.protobuf.message import Message

MUTATIONS = frozenset(
    {"RegisterNode", "RemoveNode", "SetDriftSettings", "StartReshard", "SteerOperation"}
)
_IDS = ("request_id", "operation_id", "id")
_SUBJECTS = ("drain_node", "undo_operation", "planner", "steering", "dry_run", "reason")


class Audit:
    """Appends to a file; a line is on its way to the disk before the caller hears anything."""

    def __init__(self, path: Path | None) -> None:
        """Open the file; None: nothing is kept."""
        self._lock = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a") if path is not None else None

    def write(
        self,
        *,
        rpc: str,
        request: Message,
        call: str,
        peer: str,
        role: str,
        outcome: str,
        message: str,
    ) -> None:
        """Write who asked for what, under which ids, and what came of it."""
        if self._file is None or rpc not in MUTATIONS:
            return
        given = {field.name: value for field, value in request.ListFields()}
        node = given.get("node")
        settings = given.get("settings")
        line = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "rpc": rpc,
            "call": call,
            "role": role,
            "peer": peer,
            "ids": {name: given[name] for name in _IDS if name in given},
            **{name: given[name] for name in _SUBJECTS if name in given},
            "outcome": outcome,
            "message": message,
        }
        if node is not None:
            line["node"] = node if isinstance(node, str) else node.name
        if settings is not None:
            line["settings"] = {field.name: value for field, value in settings.ListFields()}
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
