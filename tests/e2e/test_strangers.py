"""Another user of the machine, `nobody`, beside running processes of ours: what he gets at."""

import os
from pathlib import Path

import pytest
import strangers
from strangers import Found, Site

from embertide._common import redis_url
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer, find_binary

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def check_nothing(found: Found, *, sockets: int) -> None:
    assert {kind: got for kind, got in found.got.items() if got} == {}
    assert found.tried["written"] > 5
    assert found.tried["secrets"] > 5
    assert found.tried["sockets"] >= sockets


def test_a_stranger_finds_what_is_open() -> None:
    """A search that is blind to open things would prove nothing."""
    with Site() as site:
        (site.folder / "open").mkdir()
        (site.folder / "open").chmod(0o777)
        (site.folder / "told").write_text("it is hush-hush")
        site.secrets.append("hush-hush")
        (port,) = free_ports(1)
        log, path = site.folder / "redis.log", site.folder / "redis.sock"
        words = [str(find_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        words += ["--unixsocket", str(path), "--unixsocketperm", "777"]
        with Child(words, log=log), redis_url.client_of(f"unix://{path}") as client:
            strangers.wait_for(path.exists, "no socket")
            client.ping()
            found = strangers.look(
                [site.folder], shared=[site.temporary], secrets=site.secrets, ports=[port]
            )
        assert str(site.folder / "open") in found.got["written"]
        assert str(site.planted) in found.got["written"]
        assert found.got["secrets"] == [str(site.folder / "told")]
        assert found.got["sockets"] == [str(path)]
        assert found.got["ports"] == [str(port)]


def test_a_control_plane_with_its_state_keeps_strangers_out() -> None:
    with Site() as site:
        strangers.start_control(site)
        check_nothing(site.look(), sockets=1)
        folder = site.folder / "build" / "control"
        assert (folder / "audit.jsonl").stat().st_mode & 0o077 == 0
        assert "StartReshard" in (folder / "audit.jsonl").read_text()


def test_a_bus_in_a_shared_temporary_folder_is_its_users_alone(tmp_path: Path) -> None:
    with Site() as site, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(site.temporary))
        with RedisServer(RedisOptions(log=tmp_path / "log")) as server:
            assert server.options.socket.is_relative_to(site.temporary)
            pids = [server.process.pid]
            found = strangers.look([site.folder], shared=[site.temporary, site.planted], pids=pids)
        assert {kind: got for kind, got in found.got.items() if got} == {}
        assert found.tried["sockets"] == 1


@pytest.mark.long
def test_a_demo_and_a_node_keep_strangers_out() -> None:
    with Site() as site:
        out = site.folder / "demo"
        demo = strangers.start_demo(site, out)
        check_nothing(site.look(), sockets=2)
        demo.stop()
        strangers.start_serve(site, out / "publication")
        check_nothing(site.look(), sockets=0)
        assert list(site.planted.iterdir()) == []
