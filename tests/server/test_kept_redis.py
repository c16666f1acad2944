"""A state store of our own that ends: what is said of it, and that it comes back with its state."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from waiting import wait_until

from embertide._common import room
from embertide._common.background import healths
from embertide.server.adapters.kept_redis import KeptRedis
from embertide.server.adapters.redis import connect, own_state
from embertide.server.adapters.state import RedisState
from embertide.server.core.errors import StateUnavailableError

SOON_S = 20.0


def value(kept: KeptRedis) -> bytes | None:
    with connect(kept.url, 1) as client:
        try:
            found: bytes | None = client.get("a")
        except redis.RedisError:
            return None
    return found


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptRedis]:
    with KeptRedis(own_state(tmp_path)) as server, connect(server.url, 5) as client:
        client.set("a", "b")
        yield server


def test_a_store_that_was_killed_comes_back_with_its_state(kept: KeptRedis) -> None:
    kept._server.process.kill()
    wait_until(lambda: value(kept) == b"b")
    wait_until(lambda: kept.why_away() == "")


def test_where_its_disk_has_no_room_it_says_so_and_comes_back_once_there_is_some(
    kept: KeptRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    monkeypatch.setattr(room, "free_bytes", lambda place: free)
    kept._server.process.kill()  # as it ends itself at a write that finds no room
    wait_until(lambda: kept.why_away() != "")
    said = kept.why_away()
    assert said.startswith(f"{tmp_path}/state has no room (No space left on device, 0 KiB free)")
    assert "free some" in said
    assert not kept._server.alive()
    store = RedisState(kept.url, "news", kept.why_away)
    with pytest.raises(StateUnavailableError) as caught:
        store.take_term()
    assert caught.value.message == f"the state store fails: state Redis is away: {said}"
    assert [each.name for each in healths() if not each.ok] == ["state-store"]
    free = 1 << 20
    wait_until(lambda: value(kept) == b"b")
    wait_until(lambda: kept.why_away() == "")
    assert store.take_term() == 1
    store.close()


def test_one_that_ends_again_and_again_is_not_started_in_a_loop(kept: KeptRedis) -> None:
    kept._server.process.kill()
    wait_until(lambda: kept.restarts == 1)
    kept._server.process.kill()
    wait_until(lambda: "has ended again" in kept.why_away())
    wait_until(lambda: value(kept) == b"b")
