"""URLs of Redis: what is refused before anything starts, and how faults are told apart."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from embertide._common.redis_url import check_url, client_of, failure, place_of
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer, connect

SECRET = "p4ss"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    log = tmp_path_factory.mktemp("redis") / "redis.log"
    with RedisServer(RedisOptions(log=log, adjustable=True)) as started:
        with redis.Redis.from_url(started.url) as client:
            client.execute_command("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+get")
        yield started


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://h/0",
        "rediss://user@h:1/0?password_file=/a/b@c",
        "redis://[::1]:6379/0",
        "redis://u:p%40ss%2Fw%23rd@h:1/0",
        "unix:///run/redis@home.sock?db=0",
    ],
)
def test_urls_of_redis(url: str) -> None:
    check_url(url)
    client_of(url).close()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        (f"redis://u:{SECRET}@x/w#rd@h:6379/0", "%40 for @"),
        (f"redis://u:{SECRET}/w@h:6379/0", "%2F for /"),
        (f"redis://u:{SECRET}#w@h:6379/0", "%23 for #"),
        (f"redis://u:{SECRET}?w@h:6379/0", "HOST:PORT"),
        ("redis://h:99999/0", "a port of 1 to 65535"),
        ("redis://", "write HOST:PORT"),
        ("nowhere", "use redis://HOST:PORT/0"),
        (f"http://u:{SECRET}@h/0", "use redis://HOST:PORT/0"),
        ("", "use redis://HOST:PORT/0"),
    ],
)
def test_what_is_no_url_of_redis_says_what_to_write(url: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        client_of(url)
    assert remedy in str(caught.value)
    assert SECRET not in str(caught.value)
    assert SECRET not in place_of(url)


def fault(url: str, timeout_s: float = 0.5) -> str:
    with connect(url, timeout_s) as client, pytest.raises(redis.RedisError) as caught:
        client.set("key", "value")
    return failure("--bus", url, caught.value)


def test_each_fault_has_its_own_remedy(server: RedisServer, tmp_path: Path) -> None:
    place = server.options.socket
    nobody = free_ports(1)[0]
    wrong = fault(f"unix://reader:wrong@{place}")
    assert wrong.startswith(f"Redis at {place} refuses the user or the password of --bus")
    assert "start it" not in wrong
    rights = fault(f"unix://reader:{SECRET}@{place}")
    assert "does not let this user do that" in rights
    assert "docs/security.md" in rights
    away = fault(f"redis://127.0.0.1:{nobody}/0")
    assert "cannot be reached" in away
    assert "start it, or give another --bus" in away
    (tmp_path / "password").write_text("")
    lost = fault(f"unix://reader@{place}?password_file={tmp_path / 'password'}")
    assert "is empty" in lost
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1")
        full = fault(server.url)
        client.config_set("maxmemory", "0")
    assert "refuses: " in full


def test_a_redis_that_stands_still_is_told_in_time(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("CLIENT", "PAUSE", "1000")
        still = fault(server.url, 0.2)
    assert "cannot be reached in time" in still
    assert "firewall" in still
