"""From a file of unknown columns to what a client sees of its model, in one process.

`init` as a person runs it, then the trainer over some events, then the snapshot's manifest as a
node reads it, the model's configuration as `serve` writes it, and the client's schema of that. The
one thing that is left out is the compiled net, which takes seconds and no name comes to.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from drawn_tables import PLANTED, Drawn, write
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from embertide._common.errors import OperatingError
from embertide._common.quoting import terminal_text
from embertide.client.schema import Schema
from embertide.server.adapters.schema import schema_of
from embertide.server.adapters.triton import ModelOptions, model_config
from embertide.trainer.__main__ import app
from embertide.trainer.commands import run_file
from embertide.trainer.commands.inputs import check_model
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import read_manifest
from embertide.trainer.run.loop import Trainer

EVENTS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a table.

    Attributes:
        works: Whether it went all the way.
        message: Why not, as it was said.
        fault: Our fault in it; empty: none.
    """

    works: bool
    message: str = ""
    fault: str = ""


def outcome(drawn: Drawn, folder: Path) -> Outcome:
    """Take a table all the way; `folder` is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        found = _outcome(drawn, folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        found = Outcome(works=False, fault=f"traceback: {type(error).__name__}: {error!s:.300}")
    if hasattr(sys, PLANTED):
        delattr(sys, PLANTED)
        found = Outcome(works=False, fault="executed: code of a name ran")
    return found


def _outcome(drawn: Drawn, folder: Path) -> Outcome:
    paths = write(drawn, folder / "in")
    out = folder / "run.py"
    done = CliRunner().invoke(app, ["init", "-o", str(out), *drawn.options, "--", *paths])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code != 0:
        return Outcome(
            works=False, message=done.stderr, fault=_message_fault(done.stderr, paths, out)
        )
    if done.output != terminal_text(done.output.replace("\n", "")) and _odd(done.output):
        return Outcome(works=True, fault=f"output with control characters: {done.output!r:.200}")
    try:
        told = _trained(out, folder / "published")
    except OperatingError as error:
        return Outcome(works=False, fault=f"accepted by init, refused by train: {error!s:.300}")
    given = run_file.load(out)
    names = [feature.name for feature in given.run.model.features]
    if told.names != names:
        return Outcome(works=True, fault=f"the client sees {told.names}, and not {names}")
    return Outcome(works=True)


def _odd(text: str) -> bool:
    return any(terminal_text(line) != line for line in text.split("\n"))


def _message_fault(stderr: str, paths: list[str], out: Path) -> str:
    """Say what is wrong with a refusal: it is one line, names a file or option, and what to do."""
    lines = stderr.strip("\n").split("\n")
    if len(lines) != 1 or not lines[0].startswith("error: "):
        return f"refused in {len(lines)} lines: {stderr!r:.300}"
    if terminal_text(lines[0]) != lines[0]:
        return f"control characters in a message: {stderr!r:.300}"
    named = [terminal_text(path) for path in (*paths, str(out))]
    if not any(name in lines[0] for name in named) and "--" not in lines[0]:
        return f"no file is named: {stderr!r:.300}"
    words = (
        "give",
        "name",
        "write",
        "say",
        "cast",
        "leave",
        "unpack",
        "save",
        "check",
        "copy",
        "--",
    )
    if not any(word in lines[0] for word in words):
        return f"no remedy: {stderr!r:.300}"
    return ""


def _trained(path: Path, folder: Path) -> Schema:
    folder.mkdir()
    publication = Publication(folder)
    publication.program.write_bytes(b"no program")
    given = run_file.load(path)
    assert given.source is not None
    check_model(given.run.model, given.source)
    run = dataclasses.replace(given.run, threads=1)
    trainer = Trainer(run, publication)
    # A group of one time is learned whole or not at all, and may be all that a small file has.
    small = (given.source.total_events() or 0) <= 4 * EVENTS
    trainer.fit(given.source if small else FirstEvents(given.source, EVENTS))
    snapshot = publication.snapshot_path(publication.snapshots()[-1])
    read_manifest(snapshot)
    options = ModelOptions(snapshot=snapshot, kind="ranking", schema=schema_of(snapshot))
    config: Any = model_config_pb2.ModelConfig()
    text_format.Parse(model_config(run.model.name, options), config)
    told = json.loads(json_format.MessageToJson(config, preserving_proto_field_name=True))
    return Schema.of(told)
