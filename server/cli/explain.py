"""`explain`: where the row of a key lives, what is live of it, its bytes, version and use."""

import re
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from embertide import _store
from embertide._common.commands import one_address
from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.adapters.tls import dial
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Control,
    TokenFile,
    calling,
    read_token,
    tls_towards,
)
from embertide.server.cli.snapshot import Files
from embertide.server.core.plan.keys import bucket_of_key
from embertide.v1 import control_pb2, node_pb2, node_pb2_grpc, plan_pb2, update_pb2

_DEADLINE_S = 1.0


def _ask(
    address: str, token_file: Path | None, request: node_pb2.ExplainRequest
) -> node_pb2.ExplainResponse:
    """Ask a node.

    Raises:
        ProcessError: It refused, or nobody answers.
    """
    token = read_token(token_file)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with dial(address, tls_towards(address, shows_token=token_file is not None)) as channel:
        try:
            said: node_pb2.ExplainResponse = node_pb2_grpc.NodeServiceStub(channel).Explain(
                request, timeout=_DEADLINE_S, metadata=metadata
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ProcessError(
                    f"no node that shares a model answers at {address}: give its --peer address "
                    f"({error.details()})"
                ) from error
            raise ProcessError(
                f"{address}: {error.code().name}: {error.details()}; see the node's log"
            ) from error
    return said


def _asked_at(
    address: str, token_file: Path | None, request: node_pb2.ExplainRequest
) -> dict[str, Any]:
    """Ask a node, and, if it does not hold the key's bucket, the peers that it would ask.

    Raises:
        ProcessError: It refused, or nobody holds the bucket and answers.
    """
    asked, said = address, _ask(address, token_file, request)
    wrong = [f"{address} does not hold bucket {said.bucket}"]
    if not said.held and token_file is not None:
        # A token goes where its owner says, and not where a node says.
        raise ProcessError(
            f"{wrong[0]}; its peers {', '.join(said.peers) or '(none)'} may: leave out --node, so "
            "that the control plane asks them"
        )
    for peer in said.peers:
        if said.held:
            break
        try:
            address, said = peer, _ask(peer, None, request)
        except ProcessError as error:
            wrong.append(str(error))
    if not said.held:
        raise ProcessError("; ".join([*wrong, "no peer of it that answers does either"]))
    return _facts(asked, address, said)


def _facts(asked: str, address: str, said: node_pb2.ExplainResponse) -> dict[str, Any]:
    reason = update_pb2.TombstoneReason.Name(said.tombstone).rpartition("_")[2].lower()
    return {
        "asked": asked,
        "remote": address != asked,
        "node": address,
        "version": said.version.number,
        "plan_epoch": said.plan_epoch,
        "bucket": said.bucket,
        "resident": said.resident,
        "gone": reason if said.tombstone else None,
        "tier": plan_pb2.Tier.Name(said.tier).rpartition("_")[2].lower() if said.resident else None,
        "hbm_copy": said.hbm_copy - 1 if said.hbm_copy else None,
        "device": said.device,
        "live_chunks": _live_chunks(said.live),
        "payload_bytes": said.payload_bytes,
        "slot_bytes": said.slot_bytes,
        "access_count": said.access_count,
        "changed_version": said.changed_version or None,
    }


def _in_snapshot(path: Path, table: str, key: int) -> dict[str, Any]:
    """Read a row from the files of a snapshot.

    Raises:
        ProcessError: No such snapshot or table.
        StoreError: The bucket's file is not what the manifest says.
    """
    files = Files(path)
    if table not in files.tables:
        raise UsageError(f"no table {table!r} in {files.path}; it has {', '.join(files.tables)}")
    layout, bucket = files.tables[table].layout, bucket_of_key(key, files.tables[table].bucket_bits)
    records = files.records(table, bucket)
    live, payload_bytes = _store.find_record(layout, records, key) or (0, 0)
    return {
        "snapshot": str(files.path),
        "version": files.manifest["version"],
        "bucket": bucket,
        "resident": live != 0,
        "live_chunks": _live_chunks(live),
        "payload_bytes": payload_bytes,
    }


def _live_chunks(live: int) -> list[int]:
    return [chunk for chunk in range(live.bit_length()) if live >> chunk & 1]


def _show(table: str, key: int, said: dict[str, Any]) -> None:
    view = Table("", "", title=f"key {key} of table {table}", header=False)
    for name, value in said.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        view.add_row(name.replace("_", " "), "-" if value is None else text or "none")
    show_table(view)
    if said.get("remote"):
        say(f"{said['asked']} does not hold its bucket: it asks {said['node']} (remote)")
    if not said["resident"]:
        say("there is no row: the key reads as the table's default row")


def _key(given: str, text: bool) -> int:
    """Return the key of what was given: an integer as it is, and the hash of a text.

    Raises:
        ProcessError: An integer has more than 64 bits, or what hashes texts is not installed.
    """
    if text or re.fullmatch(r"[+-]?[0-9]+", given) is None:
        try:
            from embertide.client import text_keys  # only where a key is a text

            return int(text_keys([given])[0])
        except ImportError as error:
            raise UsageError(
                f"key {given!r} is a text, which needs {error.name}: "
                "pip install 'embertide[client]'"
            ) from error
    if not -(1 << 63) <= int(given) < 1 << 63:
        raise UsageError(f"key {given} is no 64-bit integer; --text if it is a text")
    return int(given)


def command(
    table: Annotated[str, typer.Argument(help="The table's name.")],
    given: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="The key: an integer as KEYS has it, or a text of the events."
        ),
    ],
    node: Annotated[
        str | None,
        typer.Option(
            callback=one_address,
            help="HOST:PORT where peers reach a node, to ask it; without it the control plane asks "
            "an owner of the key.",
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Look into a snapshot's files, or a publication's newest, instead."),
    ] = None,
    version: Annotated[
        int, typer.Option(min=0, help="A version of the node's window; 0: the newest.")
    ] = 0,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    text: Annotated[
        bool, typer.Option("--text", help="The key is a text, although it looks like an integer.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show where the row of a key lives: tier, device, live chunks, bytes, version, use.

    The control plane asks an owner of the key; or a node is asked (one that shares its model: only
    those listen to peers), and, where it does not hold the bucket of the key, the peers that it
    would ask; or the files of a snapshot are read. Nothing is counted as an access.

    Example: embertide explain item 4711 --node 127.0.0.1:9001

    Example: embertide explain song 'Blue in Green' --snapshot build/songs
    """
    with report_errors(as_json):
        key = _key(given, text)
        if snapshot is not None:
            if node is not None or version:
                raise UsageError("--snapshot has one version and no node: leave those out")
            said = _in_snapshot(snapshot, table, key)
        else:
            request = node_pb2.ExplainRequest(table=table, key=key % (1 << 64), version=version)
            if node is None:
                with calling(control, token_file) as caller:
                    row = caller.call("GetRow", control_pb2.GetRowRequest(row=request))
                said = _facts(row.address, row.address, row.row)
            else:
                said = _asked_at(node, token_file, request)
        if as_json:
            print_json({"table": table, "key": key, **said})
        else:
            _show(table, key, said)
