"""A node that follows a publication goes over to another schema, and answers all the while.

The backend takes versions of the schema that it has loaded. Where a newer snapshot has another one,
Triton is asked to load the model again: the new one is made beside the old, gets the requests once
it is ready, and the old one ends after its last request. If it cannot be loaded, the old one stays.
"""

import contextlib
import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from embertide._common.reporting import system_error
from embertide.server.adapters import triton
from embertide.server.adapters.schema import context_of, schema_of
from embertide.server.cli.metrics_page import MetricsPage

_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0
_LONGEST_PAUSE_S = 5.0  # where the system refused: once there is room, it is used soon
_MIB = 1 << 20
# The files that the backend writes into `ssd_directory`.
_SSD_FILES = ("device-*.log", "seal.json", "seal-*.rows")


def _newest(publication: Path) -> Path | None:
    """Return the newest snapshot: folders are NUMBER-LINEAGE, and the latest lineage counts."""
    found = []
    for manifest in publication.glob("snapshots/*/manifest.json"):
        number, _, lineage = manifest.parent.name.partition("-")
        if number.isdigit() and lineage.isdigit():
            found.append((int(lineage), int(number), manifest.parent))
    return max(found)[2] if found else None


def _number(snapshot: Path) -> int:
    return int(snapshot.name.partition("-")[0])


def _schema(snapshot: Path) -> str:
    return str(json.loads((snapshot / "manifest.json").read_bytes())["schema_id"])


class SsdFolders:
    """The folders of SSD tiers in `ssd_directory`: two may be in use at once."""

    def __init__(self, directory: Path) -> None:
        """Take `directory`, which need not exist."""
        self._directory = directory

    def _all(self, schema: str = r"\d+") -> dict[int, Path]:
        found = {}
        for path in self._directory.glob("schema-*"):
            if match := re.fullmatch(rf"schema-{schema}\.(\d+)", path.name):
                found[int(match[1])] = path
        return found

    def new(self, schema: str) -> Path:
        """Return one that nobody uses."""
        return self._directory / f"schema-{schema}.{max(self._all(), default=0) + 1}"

    def first(self, schema: str) -> Path:
        """Return the folder that a node begins with: the last one of the schema, or a new one."""
        if mine := self._all(schema):
            return mine[max(mine)]
        folder = self.new(schema)
        # Former versions of Embertide had theirs in the folder itself.
        for path in [path for name in _SSD_FILES for path in self._directory.glob(name)]:
            folder.mkdir(parents=True, exist_ok=True)
            path.rename(folder / path.name)
        return folder

    def keep(self, folder: Path | None) -> None:
        """Remove all but one."""
        for path in self._all().values():
            if path != folder:
                shutil.rmtree(path, ignore_errors=True)


def placed(options: triton.ModelOptions) -> triton.ModelOptions:
    """Return the options of a node that follows, its SSD tier in a folder of its schema."""
    newest = _newest(options.publication) if options.publication else None
    if options.ssd_directory is None or options.state is not None or newest is None:
        return options
    with contextlib.suppress(OSError, ValueError, KeyError):  # the backend says what is wrong
        folder = SsdFolders(options.ssd_directory).first(_schema(newest))
        return options.replace(ssd_directory=folder)
    return options


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """A model that Triton loads, beside the one that serves."""

    call: "grpc.Future[Any]"
    schema: str
    options: triton.ModelOptions


class SchemaSwitch:
    """Watches a publication for a server of one model. Not thread-safe."""

    def __init__(
        self,
        server: triton.TritonServer,
        name: str,
        options: triton.ModelOptions,
        say: Callable[[str], None],
        *,
        own_context: bool = False,
    ) -> None:
        """Watch for a server that is ready.

        Args:
            server: Runs in mode explicit, unless the options have `state`; and has an admin key.
            name: The model's.
            options: It was started with.
            say: Takes lines for people.
            own_context: Whether `context` was given; else it is that of each snapshot.
        """
        assert options.publication is not None
        self._server, self._name, self._options, self._say = server, name, options, say
        self._publication: Path = options.publication
        self._own_context = own_context
        self._load: _Load | None = None
        self._seen: Path | None = None  # needs nothing more
        self._wanted, self._first = "", 0  # a schema, and the version from which it was seen
        self._said = ""
        self._again, self._delay_s = 0.0, _FIRST_RETRY_S
        self._old_is_there = False
        self._ssd: SsdFolders | None = None
        if options.ssd_directory is not None and options.state is None:
            self._ssd = SsdFolders(options.ssd_directory.parent)
            self._ssd.keep(options.ssd_directory)
        served = self._schemas()
        self.served = served[0] if served else ""
        self._restarts = server.restarts

    def poll(self) -> None:
        """Look at the publication, and at a load in flight; returns at once.

        What the system refuses, as a file on a full drive, is said and tried again: the schema that
        is served goes on.

        Raises:
            TritonError: The server's metrics cannot be read; call again.
        """
        try:
            self._poll()
        except OSError as error:
            self._delay_s = min(self._delay_s, _LONGEST_PAUSE_S)
            self._retry(system_error(error))

    def _poll(self) -> None:
        if self._restarts != self._server.restarts:
            self._restarted()
        if self._load is not None:
            if self._load.call.done():
                self._end(self._load)
            return
        if self._old_is_there:
            self._look_for_old()
        if time.monotonic() < self._again or not self.served:
            return
        newest = _newest(self._publication)
        if newest is None or newest == self._seen:
            return
        try:
            schema = _schema(newest)
        except (OSError, ValueError, KeyError) as error:
            self._retry(f"{newest} cannot be read: {error}")
            return
        if schema == self.served:
            self._seen = newest
        elif self._may(newest, schema):
            self._begin(newest, schema)

    def server_ended(self) -> None:
        """Have a server that ended start with what it served: loading another may have ended it."""
        load, self._load = self._load, None
        if load is None:
            return
        if load.call.done() and load.call.exception() is None:
            self.served, self._options = load.schema, load.options
            return
        triton.write_model(self._server.options.repository, self._name, self._options)
        self._retry(f"schema {load.schema} was not loaded when the server ended")

    def _restarted(self) -> None:
        if not (served := self._schemas()):
            return
        self._restarts, self.served = self._server.restarts, served[0]
        self._seen, self._old_is_there = None, False
        if self._ssd:
            self._ssd.keep(self._options.ssd_directory)

    def _page(self) -> MetricsPage:
        return MetricsPage(self._server.metrics())

    def _schemas(self) -> list[str]:
        return self._page().labels("embertide_schema", "schema", model=self._name)

    def _say_once(self, line: str) -> None:
        if line != self._said:
            self._say(line)
        self._said = line

    def _may(self, newest: Path, schema: str) -> bool:
        what = f"{newest} has schema {schema}, and {self.served} is served"
        if self._options.state is not None:
            self._say_once(
                f"{what}: nodes that share a model cannot change it while they run. Start nodes of "
                "their own for it, with another --state, send clients there, then end these"
            )
            self._seen = newest
            return False
        if self._options.guard:
            promoted = self._page().sum("embertide_promoted_version", model=self._name)
            if promoted < _number(newest):
                self._say_once(f"{what}: it waits until version {_number(newest)} is promoted")
                self._again = time.monotonic() + _FIRST_RETRY_S
                return False
        return True

    def _begin(self, newest: Path, schema: str) -> None:
        if schema != self._wanted:
            self._wanted, self._first = schema, _number(newest)
        folder = self._ssd.new(schema) if self._ssd else None
        try:
            schema_text = schema_of(newest) if self._options.schema is not None else None
            follows = not self._own_context and self._options.kind == "ranking"
            context = context_of(newest) if follows else self._options.context
        except (OSError, ValueError, KeyError) as error:
            self._retry(f"{newest} cannot be read: {error}")
            return
        options = self._options.replace(
            first_version=self._first, ssd_directory=folder, schema=schema_text, context=context
        )
        ddr_mib = (self._options.ddr_budget_bytes or 0) // _MIB
        self._say(
            f"loads {newest}, of schema {schema}, beside {self.served}: until it serves, both take "
            f"memory and SSD, up to {ddr_mib} MiB of DDR each"
        )
        triton.write_model(self._server.options.repository, self._name, options)
        self._load = _Load(self._server.load(self._name), schema, options)

    def _end(self, load: _Load) -> None:
        error = load.call.exception()
        if error is not None:
            self._load = None
            if self._ssd:
                self._ssd.keep(self._options.ssd_directory)
            triton.write_model(self._server.options.repository, self._name, self._options)
            why = error.details() if isinstance(error, grpc.Call) else error
            self._retry(f"schema {load.schema} cannot be loaded: {why}")
            return
        version = self._page().sum("embertide_version", model=self._name)
        self._load = None
        self._say(f"serves schema {load.schema} (version {version:.0f}) in place of {self.served}")
        self.served, self._options = load.schema, load.options
        self._seen, self._again, self._delay_s = None, 0.0, _FIRST_RETRY_S
        self._old_is_there = True

    def _look_for_old(self) -> None:
        self._old_is_there = len(self._schemas()) > 1
        if self._ssd and not self._old_is_there:
            self._ssd.keep(self._options.ssd_directory)

    def _retry(self, why: str) -> None:
        self._say(f"{why}; schema {self.served} goes on; tried again in {self._delay_s:.0f} s")
        self._again = time.monotonic() + self._delay_s
        self._delay_s = min(2 * self._delay_s, _LONGEST_RETRY_S)
