"""The two roles of Redis, started by a real server with the words of their manifests."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import yaml

from embertide.server.adapters.redis import find_binary

MANIFEST = Path(__file__).resolve().parent.parent.parent / "k8s" / "base" / "redis.yaml"
START_TIMEOUT_S = 10.0


def words(name: str) -> list[str]:
    """The arguments that the workload of this name gives to redis-server."""
    found = [
        each for each in yaml.safe_load_all(MANIFEST.read_text()) if "template" in each["spec"]
    ]
    work = next(each for each in found if each["metadata"]["name"] == name)
    program, *arguments = work["spec"]["template"]["spec"]["containers"][0]["command"]
    assert program == "redis-server"
    return [str(each) for each in arguments]


@pytest.fixture
def role(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[redis.Redis]:
    place = tmp_path / "redis.sock"
    volume = tmp_path / "data"
    volume.mkdir()
    said = [str(volume) if word == "/data" else word for word in words(request.param)]
    command = [str(find_binary()), *said, "--port", "0", "--unixsocket", str(place)]
    with subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL) as server:
        client = redis.Redis(unix_socket_path=str(place), decode_responses=True)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not place.exists():
            assert server.poll() is None, f"redis-server refused {command}"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield client
        client.close()
        server.terminate()


@pytest.mark.parametrize("role", ["embertide-bus"], indirect=True)
def test_the_bus_writes_nothing_and_refuses_when_full(role: redis.Redis) -> None:
    said = role.config_get()
    assert (said["save"], said["appendonly"]) == ("", "no")
    assert said["maxmemory-policy"] == "noeviction"
    role.xadd("e", {"m": "x"})
    role.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        role.xadd("e", {"m": "x"})
    assert role.exists("e")


@pytest.mark.parametrize("role", ["embertide-state"], indirect=True)
def test_the_state_is_written_before_it_is_acknowledged(role: redis.Redis, tmp_path: Path) -> None:
    said = role.config_get()
    assert (said["appendonly"], said["appendfsync"]) == ("yes", "always")
    assert said["maxmemory-policy"] == "noeviction"
    assert said["maxmemory"] == str(256 << 20)
    role.set("epoch", "1")
    assert list((tmp_path / "data").rglob("*.aof"))
