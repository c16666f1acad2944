"""A server of small pages: its rounds, and what its task is said to be."""

import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from waiting import wait_until

from embertide._common.background import State, healths
from embertide._common.page_server import serving

SOON_S = 20.0


def app(environment: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
    begin("200 OK", [("Content-Type", "text/plain")])
    return [b"page"]


def state() -> State | None:
    return {each.name: each.state for each in healths()}.get("metrics")


def read(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=SOON_S) as page:
        found: bytes = page.read()
    return found


def test_a_page_is_served_until_its_context_ends() -> None:
    with serving("127.0.0.1", 0, app) as server:
        assert [read(server.server_port) for _ in range(3)] == [b"page"] * 3
        assert state() is State.RUNNING
    wait_until(lambda: state() is None)


def test_it_is_well_again_after_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, its one round lasted for ever, and it was said to fail for as long."""
    failed = threading.Event()
    with serving("127.0.0.1", 0, app) as server:
        actions = server.service_actions

        def fail_once() -> None:
            monkeypatch.setattr(server, "service_actions", actions)
            failed.set()
            raise MemoryError

        monkeypatch.setattr(server, "service_actions", fail_once)
        assert failed.wait(SOON_S)
        wait_until(lambda: state() is State.RUNNING)
        assert read(server.server_port) == b"page"
        (health,) = (each for each in healths() if each.name == "metrics")
        assert health.failures == 1
