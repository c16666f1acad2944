"""A trainer is silent by its sign's age, but not for the time in which the bus was away."""

import time
import types
from typing import Any

import pytest
import redis

from embertide.server.adapters import bus as bus_module
from embertide.server.adapters.bus import Bus
from embertide.server.core.news import trainer_state
from embertide.v1 import update_pb2

KEPT_S = 7 * 86_400
KEY = "e:{news:commit}:trainer"


class Site:
    """A bus, whose clock and whose answers the test decides."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client: Any = redis.Redis.from_url(url)
        self.client.flushall()
        self._now_s = time.monotonic()
        clock = types.SimpleNamespace(monotonic=lambda: self._now_s)
        monkeypatch.setattr(bus_module, "time", clock)
        self.bus = Bus(url, "news")

    def sign(self, age_s: int) -> None:
        message = update_pb2.TrainerSign(host="t-0", pid=7).SerializeToString()
        self.client.set(KEY, message, ex=KEPT_S - age_s)

    def state(self, after_s: float = 2.0) -> str:
        self._now_s += after_s
        status = self.bus.trainer()
        return "unknown" if status is None else trainer_state(status)

    def lose_bus(self) -> None:
        self.client.client_pause(700)
        assert self.state() == "unknown"  # it waits for half a second
        self.client.ping()


@pytest.fixture
def site(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(redis_url, monkeypatch)


def test_a_sign_that_grew_old_while_the_bus_was_away_is_waited_for(site: Site) -> None:
    site.sign(1)
    assert site.state() == "alive"
    site.lose_bus()
    # Before: silent as soon as the bus answered, until the trainer came to set its sign.
    site.sign(30)
    assert site.state() == "alive"
    assert site.state(9.0) == "alive"
    assert site.state(2.0) == "silent"
    site.sign(0)
    assert site.state() == "alive"


def test_a_trainer_that_was_silent_before_is_silent_still(site: Site) -> None:
    site.sign(30)
    assert site.state() == "silent"  # a control plane that starts does not wait
    site.lose_bus()
    assert site.state() == "silent"
