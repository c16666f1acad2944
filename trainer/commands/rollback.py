"""`rollback`: restore the state of an older version, as a new version."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say


def command(
    version: Annotated[int, typer.Argument(help="The version whose state is to be restored.")],
    publication: Annotated[Path, typer.Option(help="The folder that the trainer publishes to.")],
    bus: Annotated[
        str | None,
        typer.Option(help="Redis URL of the updates; without it, nodes read the files alone."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Restore the state of an older version: every node answers with it within a second.

    The state goes out as a new version, checked byte for byte against the old one before anything
    is published. The trainer that runs is stopped: start it again, and it goes on from its newest
    checkpoint before the versions that were undone (--skip-undone passes over the events that they
    had learned from).

    Example: embertide rollback 118 --publication build/news --bus redis://127.0.0.1:6379
    """
    from embertide.trainer.publish.folder import Publication
    from embertide.trainer.publish.rollback import roll_back

    with report_errors(as_json):
        restored = roll_back(Publication(publication), version, bus=bus)
    if as_json:
        print_json(dataclasses.asdict(restored))
        return
    say(
        f"version {restored.version} restores version {restored.to}: {restored.undone} versions "
        f"undone, {restored.rows:,} rows restored and {restored.tombstones:,} removed in "
        f"{restored.seconds:.2f} s; checksum {restored.checksum}"
    )
