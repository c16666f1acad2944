"""`versions`: the newest versions, how good they are, and what was decided on them."""

from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table, time_text
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import DEFAULT_CONTROL, Control, TokenFile, calling
from embertide.v1 import control_pb2, update_pb2

_QUALITY = ("auc", "log_loss", "calibration")


def version_facts(version: control_pb2.FleetVersion) -> dict[str, Any]:
    """Return what is known of a version."""
    verdict = control_pb2.VersionVerdict.Name(version.verdict).removeprefix("VERSION_VERDICT_")
    if version.rollback_to:
        verdict = f"restores {version.rollback_to:,}"
    return {
        "number": version.version.number,
        "lineage": version.version.lineage,
        "committed_ms": version.committed_ms,
        "schema_id": version.schema_id,
        "rollback_to": version.rollback_to or None,
        "dense_bytes": version.dense_bytes,
        "partitions": version.partitions,
        "verdict": {"UNSPECIFIED": "not judged"}.get(verdict, verdict.lower()),
        "why": version.why,
        "author": version.author,
        "events": version.quality.events or None,
    } | {name: _figure(version.quality, name) for name in _QUALITY}


def _figure(quality: update_pb2.LiveQuality, name: str) -> float | None:
    value: float = getattr(quality, name)
    return value if quality.HasField(name) else None  # type: ignore[arg-type]


def command(
    limit: Annotated[int, typer.Option(help="Newest versions shown.", min=1, max=200)] = 20,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show the newest versions: the trainer's AUC and calibration, the guard's verdicts.

    Example: embertide versions --limit 50
    """
    with report_errors(as_json), calling(control, token_file) as caller:
        answer = caller.call("ListVersions", control_pb2.ListVersionsRequest())
    found = [version_facts(each) for each in answer.versions[:limit]]
    if as_json:
        print_json({"versions": found, "promoted": answer.promoted or None})
        return
    columns = ("version", "committed", "AUC", "log loss", "calibration", "verdict", "why")
    table = Table(*columns, names=("verdict", "why"))
    for each in found:
        figures = ("-" if each[name] is None else f"{each[name]:.4f}" for name in _QUALITY)
        table.add_row(
            f"{each['number']:,}",
            time_text(each["committed_ms"]),
            *figures,
            each["verdict"],
            each["why"] or "-",
        )
    if found:
        show_table(table)
    else:
        say("no version is known: none was published, or `embertide control` has no --bus")
