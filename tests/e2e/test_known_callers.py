"""Who gets in at our front end, over TLS and by tokens, is what docs/security.md says.

Every call as everybody, over real sockets, to nodes that `embertide serve` runs.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from served import Addresses, serving
from serving import beside
from tritonclient.grpc import service_pb2
from waiting import wait_until

import embertide
from bench.authority import Authority
from embertide._common.direct_http import open_url
from embertide.client import AsyncClient, Client, RefusedError, Tls, UnavailableError
from embertide.server.adapters import triton
from embertide.server.adapters.tls import TlsFolder
from embertide.server.cli.metrics_page import MetricsPage
from embertide.trainer.commands.calling import settings_of
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.served import ServedModel, ServingError

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
ROLES = ("reader", "operator", "node", "trainer", "control")
MODEL = "lookup"
COLUMNS = {"item_id": [0], "user_id": [1], "history": [[14, 21]], "tags": [[100]]}
_EXPIRED = datetime.timedelta(hours=-1)
OWNERS = (*ROLES, "reader/ada", "reader@ads", "operator@ads")
TOKENS = {owner: f"some-token-of-{owner.replace('/', '-').replace('@', '-')}-0" for owner in OWNERS}
# The question for each RPC. Models that are none: what is let in changes nothing.
QUESTIONS: dict[str, Any] = {
    "ServerLive": service_pb2.ServerLiveRequest(),
    "ServerReady": service_pb2.ServerReadyRequest(),
    "ServerMetadata": service_pb2.ServerMetadataRequest(),
    "ModelReady": service_pb2.ModelReadyRequest(name=MODEL),
    "ModelMetadata": service_pb2.ModelMetadataRequest(name=MODEL),
    "ModelConfig": service_pb2.ModelConfigRequest(name=MODEL),
    "ModelStatistics": service_pb2.ModelStatisticsRequest(name=MODEL),
    "ModelInfer": service_pb2.ModelInferRequest(model_name=MODEL),
    "RepositoryIndex": service_pb2.RepositoryIndexRequest(),
    "RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest(model_name="absent"),
    "RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest(model_name="absent"),
}
# RPCs of no model, so that who is of one model alone may call them.
OF_NO_MODEL = ("ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex")


def page() -> dict[str, frozenset[str]]:
    """The roles that may make each call, as the page has it."""
    lines = re.findall(
        r"\| GRPCInferenceService \| ([A-Za-z, ]+) \| ([a-z, ]+) \|", PAGE.read_text()
    )
    return {rpc: frozenset(roles.split(", ")) for rpcs, roles in lines for rpc in rpcs.split(", ")}


def test_the_page_has_every_call() -> None:
    assert set(page()) == set(QUESTIONS)


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The running nodes, and who signed for them.

    Attributes:
        closed: Known callers alone, by certificate or token.
        guarded: By TLS; whoever has a certificate may ask.
    """

    authority: Authority
    folder: Path
    closed: Addresses
    guarded: Addresses

    @property
    def ca(self) -> Path:
        return self.folder / "server" / "ca.crt"


@pytest.fixture(scope="module")
def nodes(
    snapshot: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory, backends: Path
) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("known")
    authority = Authority()
    # Its name is another than the address: what starts a node must not need to dial it by name.
    authority.issue(folder / "server", "node", hosts=("localhost",))
    lines = [f"{owner}:{token}\n" for owner, token in TOKENS.items()]
    (folder / "tokens").write_text("# who may ask\n" + "".join(lines))
    tls = ("--front-tls", str(folder / "server"))
    tokens = ("--front-tokens", str(folder / "tokens"), "--known-callers")
    with contextlib.ExitStack() as stack:

        def start(name: str, *more: str) -> Addresses:
            return stack.enter_context(serving(snapshot[0], folder / name, backends, *more))

        yield Nodes(authority, folder, start("closed", *tls, *tokens), start("guarded", *tls))


def localhost(addresses: Addresses) -> str:
    return addresses["grpc"].replace("127.0.0.1", "localhost")


@dataclasses.dataclass(frozen=True)
class Caller:
    """Somebody, and who he is: a role, or the code that he gets."""

    name: str
    credentials: grpc.ChannelCredentials | None  # None: plain text
    who: str
    token: str = ""
    model: str = ""  # of which alone


def callers(nodes: Nodes) -> Iterator[Caller]:
    made = nodes.folder / "callers"
    trust = nodes.ca.read_bytes()
    bare = grpc.ssl_channel_credentials(trust)
    yield Caller("plain text", None, "UNAVAILABLE", TOKENS["reader"])
    yield Caller("nobody", bare, "UNAUTHENTICATED")
    yield Caller("a guess", bare, "UNAUTHENTICATED", "guess")
    yield Caller("half a token", bare, "UNAUTHENTICATED", TOKENS["reader"][:-1])
    issue = nodes.authority.issue
    nameless = TlsFolder(issue(made / "nameless")).channel()
    yield Caller("a certificate without a role", nameless, "UNAUTHENTICATED")
    king = TlsFolder(issue(made / "king", uri="spiffe://test/role/king")).channel()
    yield Caller("a role that nobody knows", king, "UNAUTHENTICATED")
    operator = TlsFolder(issue(made / "operator", "operator")).channel()
    yield Caller("an operator who shows a wrong token", operator, "UNAUTHENTICATED", "guess")
    yield Caller("an operator who shows a reader's token", operator, "reader", TOKENS["reader"])
    for role in ROLES:
        own = TlsFolder(issue(made / role, role)).channel()
        yield Caller(f"{role} by certificate", own, role)
        yield Caller(f"{role} by token", bare, role, TOKENS[role])
    ads = TlsFolder(issue(made / "ads", "reader/model/ads")).channel()
    yield Caller("reader of another model", ads, "reader", model="ads")
    here = TlsFolder(issue(made / "here", f"reader/model/{MODEL}/name/eve")).channel()
    yield Caller("reader of this model", here, "reader", model=MODEL)
    yield Caller("reader of another model by token", bare, "reader", TOKENS["reader@ads"], "ads")
    yield Caller("operator of another model", bare, "operator", TOKENS["operator@ads"], "ads")
    yield Caller("a reader with a name", bare, "reader", TOKENS["reader/ada"])
    old = TlsFolder(issue(made / "old", "reader", valid=_EXPIRED)).channel()
    yield Caller("one that has expired", old, "UNAVAILABLE")
    false = Authority().issue(made / "false", "reader")
    (false / "ca.crt").write_bytes(trust)
    yield Caller("one of another authority", TlsFolder(false).channel(), "UNAVAILABLE")


def outcome(channel: Any, rpc: str, token: str = "") -> str:
    """The code of a call."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    ask = channel.unary_unary(f"/inference.GRPCInferenceService/{rpc}")
    try:
        ask(QUESTIONS[rpc].SerializeToString(), timeout=10, metadata=metadata)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def wanted(caller: Caller, rpc: str, roles: frozenset[str]) -> str:
    """The refusal that a caller is to get; empty: none."""
    if caller.who.isupper():
        return caller.who
    if caller.who not in roles:
        return "PERMISSION_DENIED"
    of = "" if rpc in OF_NO_MODEL else getattr(QUESTIONS[rpc], "name", "")
    of = of or getattr(QUESTIONS[rpc], "model_name", "")
    return "PERMISSION_DENIED" if caller.model and of and caller.model != of else ""


def connect(address: str, credentials: grpc.ChannelCredentials | None) -> Any:
    if credentials is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, credentials)


def page_of(addresses: Addresses) -> MetricsPage:
    with open_url(f"http://{addresses['metrics']}/metrics", 10) as reply:
        return MetricsPage(reply.read().decode())


def refused(addresses: Addresses, reason: str) -> float:
    return page_of(addresses).sum("embertide_front_refused_total", reason=reason)


def test_known_callers_do_what_the_page_says_and_nobody_else_anything(nodes: Nodes) -> None:
    wrong, let_in, counts = [], 0, {"UNAUTHENTICATED": 0, "PERMISSION_DENIED": 0}
    before = {reason: refused(nodes.closed, reason) for reason in ("identity", "right")}
    for caller in callers(nodes):
        with connect(localhost(nodes.closed), caller.credentials) as channel:
            for rpc, roles in page().items():
                got = outcome(channel, rpc, caller.token)
                want = wanted(caller, rpc, roles)
                refusals = {want} if want else {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
                if want == "" and rpc.startswith("RepositoryModel"):
                    refusals.add("UNAVAILABLE")  # a server of one snapshot loads nothing
                if got not in refusals:
                    wrong.append(f"{caller.name}: {rpc}: {got}, wants {want or 'an answer'}")
                let_in += not want
                if want in counts:
                    counts[want] += 1
    assert not wrong, "\n".join(wrong)
    assert let_in > 50
    assert refused(nodes.closed, "identity") - before["identity"] == counts["UNAUTHENTICATED"]
    assert refused(nodes.closed, "right") - before["right"] == counts["PERMISSION_DENIED"]


def test_who_may_not_call_is_told_so_before_he_says_anything(nodes: Nodes) -> None:
    waits: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    path = "/inference.GRPCInferenceService/"
    bare = grpc.ssl_channel_credentials(nodes.ca.read_bytes())
    cases = [
        ("ModelInfer", "", "UNAUTHENTICATED"),
        ("ModelInfer", TOKENS["node"], "PERMISSION_DENIED"),
        ("ModelConfig", TOKENS["trainer"], "PERMISSION_DENIED"),
        ("RepositoryModelLoad", TOKENS["reader"], "PERMISSION_DENIED"),
    ]
    with connect(localhost(nodes.closed), bare) as channel:
        for rpc, token, code in cases:
            messages = iter(waits.get, None)  # none comes
            metadata = [("authorization", f"Bearer {token}")] if token else []
            with pytest.raises(grpc.RpcError) as caught:
                channel.stream_unary(path + rpc)(messages, timeout=10, metadata=metadata)
            assert caught.value.code().name == code, rpc
    for _ in cases:
        waits.put(None)


def test_health_asks_for_no_role(nodes: Nodes) -> None:
    bare = grpc.ssl_channel_credentials(nodes.ca.read_bytes())
    with connect(localhost(nodes.closed), bare) as channel:
        said = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
    assert said == b"\x08\x01"


def test_a_certificate_is_enough_to_ask_where_callers_need_not_be_known(nodes: Nodes) -> None:
    nameless = TlsFolder(nodes.authority.issue(nodes.folder / "anyone")).channel()
    operator = TlsFolder(nodes.authority.issue(nodes.folder / "operator", "operator")).channel()
    bare = grpc.ssl_channel_credentials(nodes.ca.read_bytes())
    for credentials, ask, operate in (
        (None, "UNAVAILABLE", "UNAVAILABLE"),
        (bare, "UNAVAILABLE", "UNAVAILABLE"),
        (nameless, "OK", "UNAUTHENTICATED"),
        (operator, "OK", "OK"),
    ):
        with connect(localhost(nodes.guarded), credentials) as channel:
            assert outcome(channel, "ModelMetadata") == ask
            assert outcome(channel, "RepositoryIndex") == operate


def test_clients_ask_by_tls_and_token(nodes: Nodes) -> None:
    address, tls = localhost(nodes.closed), Tls(ca=nodes.ca)
    with Client(address, tls=tls, token=TOKENS["reader"], timeout_s=10) as client:
        expected = client.lookup(MODEL, COLUMNS)
        assert expected.version == 41

    async def ask() -> Any:
        folder = nodes.authority.issue(nodes.folder / "reader", "reader/name/ada")
        own = Tls(ca=nodes.ca, certificate=folder / "tls.crt", key=folder / "tls.key")
        async with AsyncClient(address, tls=own, timeout_s=10) as client:
            return await client.lookup(MODEL, COLUMNS)

    assert (asyncio.run(ask()).embeddings["item_id"] == expected.embeddings["item_id"]).all()
    for token, why in (
        (None, "no token: send metadata"),
        ("guess", "the token is not known here"),
        (TOKENS["trainer"], " needs role reader or operator; the caller's is trainer"),
        (TOKENS["reader@ads"], "the caller is of model 'ads' alone; this is 'lookup'"),
    ):
        refusal = pytest.raises(RefusedError, match=re.escape(why))
        with Client(address, tls=tls, token=token, timeout_s=10) as client, refusal:
            client.lookup(MODEL, COLUMNS)
    with Client(address, timeout_s=2, tries=1) as client, pytest.raises(UnavailableError):
        client.lookup(MODEL, COLUMNS)


def test_guard_and_replay_ask_as_their_tls_and_token_say(nodes: Nodes) -> None:
    token = nodes.folder / "reader.token"
    token.write_text(TOKENS["reader"] + "\n")
    trusts = nodes.folder / "trusts"
    trusts.mkdir()
    (trusts / "ca.crt").write_bytes(nodes.ca.read_bytes())
    own = nodes.authority.issue(nodes.folder / "guard", "reader/name/guard")
    address = localhost(nodes.closed)
    for tls, file, answered in (
        (trusts, token, True),
        (own, None, True),
        (trusts, None, False),
        (None, token, False),
    ):
        with ServedModel(address, MODEL, settings_of(tls, file)) as model:
            assert model.ready() == answered, (tls, file)
    with pytest.raises(ServingError, match=r"no-ca/ca\.crt: No such file"):
        ServedModel(address, MODEL, settings_of(nodes.folder / "no-ca", None))
    with pytest.raises(ServingError, match=r"would travel to nodes\.example:8001 in plain"):
        ServedModel("nodes.example:8001", MODEL, settings_of(None, token))
    token.unlink()
    with (
        ServedModel(address, MODEL, settings_of(trusts, token)) as model,
        pytest.raises(ConfigurationError, match=r"--token-file .*reader\.token: No such file"),
    ):
        model.ready()


def test_python_serves_known_callers(snapshot: tuple[Path, Any], tmp_path: Path) -> None:
    Authority().issue(tmp_path / "server", "node")
    (tmp_path / "tokens").write_text(f"reader:{TOKENS['reader']}\n")
    tls = Tls(ca=tmp_path / "server" / "ca.crt")
    with embertide.serve(
        snapshot[0],
        kind="lookup",
        model=MODEL,
        front_tls=tmp_path / "server",
        front_tokens=tmp_path / "tokens",
        known_callers=True,
    ) as node:
        with node.client(tls=tls, token=TOKENS["reader"], timeout_s=10) as client:
            assert client.lookup(MODEL, COLUMNS).version == 41
        with node.client(tls=tls, timeout_s=10) as client, pytest.raises(RefusedError):
            client.lookup(MODEL, COLUMNS)
    with pytest.raises(embertide.ProcessError, match="give --front-tokens, --front-tls or both"):
        embertide.serve(snapshot[0], kind="lookup", model=MODEL, known_callers=True)


def test_tokens_are_replaced_under_traffic(nodes: Nodes) -> None:
    file = nodes.folder / "tokens"
    lines = file.read_text()
    new = "reader/new:0123456789abcdef"
    bare = grpc.ssl_channel_credentials(nodes.ca.read_bytes())
    with connect(localhost(nodes.closed), bare) as channel:

        def code() -> str:
            return outcome(channel, "ServerReady", new.partition(":")[2])

        assert code() == "UNAUTHENTICATED"
        file.write_text(lines + new + "\n")
        wait_until(lambda: code() == "OK")
        file.write_text(lines + "king:0123456789abcdef\n")  # wrong: those before stay
        log = nodes.folder / "closed" / "node.log"
        line = lines.count("\n") + 1
        says = f"line {line} is not ROLE"
        wait_until(lambda: code() == "OK" and says in log.read_text())
        assert "0123456789abcdef" not in log.read_text()
        file.write_text(lines)
        wait_until(lambda: code() == "UNAUTHENTICATED")


def test_who_starts_a_node_asks_it_whatever_callers_must_show(
    server_options: triton.ServerOptions, snapshot: tuple[Path, Any], tmp_path: Path
) -> None:
    authority = Authority()
    authority.issue(tmp_path / "server", hosts=("node.example",), valid=_EXPIRED)
    (tmp_path / "tokens").write_text(f"reader:{TOKENS['reader']}\n")
    options = beside(
        server_options,
        tmp_path / "models",
        tmp_path / "triton.log",
        [MODEL],
        tls=tmp_path / "server",
        tokens=tmp_path / "tokens",
        known_callers=True,
        admin_key="k" * 40,
    )
    triton.write_model(
        options.repository, MODEL, triton.ModelOptions(snapshot=snapshot[0], max_batch_size=8)
    )
    with triton.TritonServer(options) as running:
        assert running.version()
        running.load(MODEL).result(timeout=20)
        running.process.kill()
        assert not running.ready()
        running.restart()
        wait_until(running.answers, 60)
        socket = next(Path(running._target().removeprefix("unix:")).parent.iterdir())
        assert socket.parent.stat().st_mode & 0o777 == 0o700
    assert not socket.parent.exists()
