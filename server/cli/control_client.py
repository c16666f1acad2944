"""A client of the control plane, for commands: where it is, calls, tokens, and names in answers."""

import contextlib
import contextvars
import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf import json_format
from google.protobuf.message import Message

from embertide._common.addresses import is_local_target
from embertide._common.commands import address
from embertide._common.terminal import print_json
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.adapters.tls import TlsFolder, dial
from embertide.server.cli.common_options import read_secret
from embertide.server.cli.context import check_context
from embertide.server.services.identity import MODEL_KEY
from embertide.v1 import control_pb2, control_pb2_grpc, plan_pb2

DEFAULT_CONTROL = "127.0.0.1:7070"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How the command at work was told to reach a control plane (connection_options.py).

    Attributes:
        model: The model that it named; None: it named none.
        tls: Folder of the caller's certificate; None: plain text.
        plaintext: Whether that may be to another machine.
    """

    model: str | None = None
    tls: Path | None = None
    plaintext: bool = False


_AS_USUAL = Connection()
CONNECTION: contextvars.ContextVar[Connection] = contextvars.ContextVar(
    "connection", default=_AS_USUAL
)
DEADLINE_S = 5.0
_MESSAGE_BYTES_MAX = (16 << 20) + (64 << 10)

Control = Annotated[
    str,
    typer.Option(
        callback=address,
        envvar="EMBERTIDE_CONTROL",
        help="HOST:PORT of the control plane.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="EMBERTIDE_TOKEN_FILE", help="File that holds your token, alone."),
]

_REMEDIES = {
    grpc.StatusCode.UNAVAILABLE: "start it with `embertide control`, or give --control HOST:PORT",
    grpc.StatusCode.UNAUTHENTICATED: "give --token-file, or --tls with a certificate of a role",
    grpc.StatusCode.PERMISSION_DENIED: "give the token of a role that may",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it is busy or stands still: try again, or see its log",
    grpc.StatusCode.UNIMPLEMENTED: "it is of an older build: upgrade the control plane first",
    grpc.StatusCode.INTERNAL: "see the control plane's log",
    grpc.StatusCode.UNKNOWN: "see the control plane's log",
}


class CallError(ProcessError):
    """The control plane refused, or cannot be reached.

    Attributes:
        code: The gRPC code, by name.
    """

    def __init__(self, code: grpc.StatusCode, message: str, *, answered: bool = False) -> None:
        """Say what it said, and what to do; where it `answered`, it is not to be started."""
        remedy = None if answered and code is grpc.StatusCode.UNAVAILABLE else _REMEDIES.get(code)
        super().__init__(f"{code.name}: {message}" + (f" ({remedy})" if remedy else ""))
        self.code = code.name


class Caller:
    """Calls of one control plane, each with a deadline."""

    def __init__(
        self,
        address: str,
        token: str | None,
        model: str | None = None,
        tls: TlsFolder | None = None,
    ) -> None:
        """Connect when first called. The model is needed where the control plane has several."""
        self._address = address
        self._tls = tls
        self._channel = dial(
            address, tls, [("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX)]
        )
        self._stub = control_pb2_grpc.ControlServiceStub(self._channel)
        named = {"authorization": f"Bearer {token}" if token else None, MODEL_KEY: model}
        self._metadata = tuple((key, value) for key, value in named.items() if value)
        self.open = False  # whether the control plane asks nobody for a token, once it has answered
        self.role = ""  # what it takes the caller for; empty: not said yet

    def call(self, rpc: str, request: Any, deadline_s: float = DEADLINE_S) -> Any:
        """Call an RPC.

        Raises:
            CallError: It was refused, or nobody answers.
        """
        with self._refusals():
            answer, call = getattr(self._stub, rpc).with_call(
                request, timeout=deadline_s, metadata=self._metadata
            )
            said = dict(call.initial_metadata())
            self.open = said.get("embertide-auth") == "open"
            self.role = str(said.get("embertide-role", ""))
            return answer

    def watch(self, id: str, deadline_s: float) -> Iterator[control_pb2.Operation]:
        """Yield an operation as it changes, to its end.

        Raises:
            CallError: It was refused, or nobody answers any more.
        """
        request = control_pb2.WatchOperationRequest(id=id)
        with self._refusals():
            for each in self._stub.WatchOperation(
                request, timeout=deadline_s, metadata=self._metadata
            ):
                yield each.operation

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            details = error.details() or "no reason given"
            told: Any = error  # a call, too
            answered = "x-request-id" in [key for key, _ in told.initial_metadata() or ()]
            leader = dict(told.trailing_metadata() or ()).get("embertide-leader")
            if leader is not None:
                raise CallError(
                    error.code(), self._stands_by(str(leader)), answered=True
                ) from error
            if error.code() is grpc.StatusCode.UNAVAILABLE and not answered:
                details = f"no control plane answers at {self._address}" + (
                    f" by TLS: {details}" if self._tls is not None else ""
                )
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                details = f"the control plane at {self._address} has not answered in time"
            raise CallError(error.code(), details, answered=answered) from error

    def _stands_by(self, leader: str) -> str:
        """Say who leads. He is not asked: a token goes where it was meant to."""
        if leader == "none":
            return f"the control plane at {self._address} stands by, and nobody leads: try again"
        return (
            f"the control plane at {self._address} stands by, and {leader} leads: give --control "
            f"{leader}"
        )

    def plan(self, epoch: int = 0) -> plan_pb2.Plan:
        """Return a plan; 0: the newest."""
        plan: plan_pb2.Plan = self.call("GetPlan", control_pb2.GetPlanRequest(epoch=epoch)).plan
        return plan

    def close(self) -> None:
        """End all calls."""
        self._channel.close()


def read_token(token_file: Path | None) -> str | None:
    """Return the token of a file, if there is one.

    Raises:
        ProcessError: The file cannot be read.
    """
    return None if token_file is None else read_secret("--token-file", token_file)


def tls_towards(address: str, *, shows_token: bool) -> TlsFolder | None:
    """Return what to dial an address with, as the command at work was told to; None: plain text.

    `shows_token` says whether calls will carry one.

    Raises:
        ProcessError: A certificate cannot be read, or a token would be sent in plain text to
            another machine.
    """
    connection = CONNECTION.get()
    if connection.tls is not None:
        return TlsFolder(connection.tls)
    if shows_token and not is_local_target(address) and not connection.plaintext:
        raise UsageError(
            f"the token would be sent in plain text to {address}: give --tls with a folder of "
            "certificates, or --plaintext on a network that nobody else listens to"
        )
    return None


@contextlib.contextmanager
def calling(address: str, token_file: Path | None) -> Iterator[Caller]:
    """Connect to a control plane, as the command at work was told to.

    Raises:
        ProcessError: The token file or a certificate cannot be read, or the token would be sent in
            plain text to another machine.
    """
    check_context()
    connection = CONNECTION.get()
    token = read_token(token_file)
    tls = tls_towards(address, shows_token=token_file is not None)
    caller = Caller(address, token, connection.model, tls)
    try:
        yield caller
    finally:
        caller.close()


def print_message(message: Message) -> None:
    """Print a message as JSON, with the fields that are zero too: programs read it."""
    print_json(message_facts(message))


def message_facts(message: Message) -> dict[str, Any]:
    """Return a message as JSON has it, with the fields that are zero too."""
    facts: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return facts


def new_id() -> str:
    """Make the id of a request."""
    return str(uuid.uuid4())


def enum_name(enum: Any, value: int) -> str:
    """Return a state's name without its enum's, as people say it."""
    name: str = enum.Name(value)
    return name.rpartition("_STATE_")[2]


def owner_name(nodes: Sequence[str], at: plan_pb2.Owner) -> str:
    """Name a device, NODE/DEVICE, by the names of the nodes by position."""
    return f"{nodes[at.node]}/{at.device}"


def table_name(plan: plan_pb2.Plan, id: int) -> str:
    """Name a table."""
    return next((table.name for table in plan.tables if table.id == id), str(id))


def share_line(plan: plan_pb2.Plan, nodes: Sequence[str], share: plan_pb2.TierShare) -> str:
    """Say what share of a tier a table has."""
    size = f"at most {share.bytes:,} bytes" if share.bytes else "no share of its own"
    tier = plan_pb2.Tier.Name(share.tier).removeprefix("TIER_")
    table = table_name(plan, share.table_id)
    return f"{tier} of {owner_name(nodes, share.device)} for {table}: {size}"


def table_of(plan: plan_pb2.Plan, name: str) -> plan_pb2.PlannedTable:
    """Find a table by its name.

    Raises:
        ProcessError: There is none.
    """
    for table in plan.tables:
        if table.name == name:
            return table
    names = ", ".join(table.name for table in plan.tables)
    raise UsageError(f"no table {name!r} in plan {plan.epoch}; it has {names}")
