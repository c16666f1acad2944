"""The Redis that our commands start: real servers at sockets that one user alone reaches."""

import os
import stat
from pathlib import Path

import pytest
import redis

from embertide.server.adapters.process import ProcessError
from embertide.server.adapters.redis import (
    RedisError,
    RedisOptions,
    RedisServer,
    connect,
    find_binary,
    own_state,
    version_of,
)

REFUSED = ("CONFIG GET dir", "MODULE LIST", "DEBUG SLEEP 0", "REPLICAOF h 1", "MIGRATE h 1 k 0 1")


def test_it_has_no_port_and_nothing_that_reaches_the_machine(tmp_path: Path) -> None:
    options = RedisOptions(log=tmp_path / "log")
    with RedisServer(options) as server, connect(server.url, 5) as client:
        assert client.info("server")["tcp_port"] == 0
        assert client.set("a", "b")
        for command in REFUSED:
            with pytest.raises(redis.ResponseError, match="unknown command"):
                client.execute_command(*command.split())
        folder = options.socket.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(options.socket.stat().st_mode) == 0o600
    assert not folder.exists()


def test_a_folder_with_odd_letters_is_found_by_its_url(tmp_path: Path) -> None:
    options = RedisOptions(log=tmp_path / "log", socket=tmp_path / "a b?c#%d" / "s")
    with RedisServer(options) as server, connect(server.url, 5) as client:
        assert client.ping()


def test_the_state_outlives_its_server_and_its_folder_is_closed(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)  # as older releases made it
    options = own_state(tmp_path)
    with RedisServer(options) as server, connect(server.url, 5) as client:
        client.set("a", "b")
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    with RedisServer(options) as server, connect(server.url, 5) as client:
        assert client.get("a") == b"b"


def test_a_server_that_runs_is_not_pushed_aside(tmp_path: Path) -> None:
    options = own_state(tmp_path)
    with RedisServer(options) as server:
        with pytest.raises(ProcessError, match="a Redis listens at"):
            RedisServer(options)
        server.process.kill()
        with RedisServer(options) as second, connect(second.url, 5) as client:  # in its place
            assert client.ping()


def test_a_path_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="107 is the most; choose a shorter folder"):
        RedisServer(own_state(tmp_path / ("x" * 100)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 65534, 65534)
    with pytest.raises(RedisError, match="is of user 65534"):
        RedisServer(own_state(tmp_path))


def test_the_systems_is_taken_before_the_wheels_unless_it_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wheels = find_binary()
    assert version_of(wheels) >= (6, 2)
    system = tmp_path / "redis-server"
    system.symlink_to(wheels)
    assert find_binary() == system
    system.unlink()
    system.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=0 malloc=x bits=64'\n")
    system.chmod(0o755)
    assert version_of(system) == (6, 0, 16)
    assert find_binary() == wheels
