"""/metrics of the control plane: a dead node, buckets without an owner, the trainer's states."""

import urllib.request
from pathlib import Path

import redis
from control_bench import Bench
from waiting import wait_until

from embertide.server.adapters.process import free_ports
from embertide.server.cli.metrics_page import MetricsPage
from embertide.trainer.publish.sign import Place, SignOfLife

AT = Place(version=41, watermark_ms=1, learned_ms=1, events=900, unread=12)
_SIGN_KEPT_MS = 7 * 86_400_000


def scrape(port: int) -> MetricsPage:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        return MetricsPage(page.read().decode())


def test_a_dead_node_and_what_nobody_owns(bench: Bench) -> None:
    (port,) = free_ports(1)
    control = bench.control(expect=2, heartbeat_ms=200, metrics=("127.0.0.1", port))
    nodes = [bench.node(f"node-{at}", control.address) for at in range(2)]
    wait_until(lambda: all(node.held().epoch for node in nodes))
    page = scrape(port)
    assert page.sum("embertide_control_leads", model="news") == 1
    assert page.sum("embertide_control_nodes", state="dead") == 0
    assert page.sum("embertide_control_buckets_unowned", model="news") == 0
    nodes[1].beating.clear()
    wait_until(lambda: scrape(port).sum("embertide_control_nodes", state="dead") == 1)
    assert scrape(port).sum("embertide_control_buckets_unowned", model="news") > 0


def test_the_state_of_the_trainer(bench: Bench) -> None:
    (port,) = free_ports(1)
    bench.control(expect=1, bus=bench.url, metrics=("127.0.0.1", port))

    def states() -> dict[str, float]:
        page, name = scrape(port), "embertide_control_trainer"
        shown = page.labels(name, "state", model="news")
        return {state: page.sum(name, model="news", state=state) for state in shown}

    def awaited(state: str) -> bool:
        said = states()
        return bool(said) and said == {each: float(each == state) for each in said}

    assert states() == {}  # none has run
    sign = SignOfLife(bench.url, "news", folder=Path("/srv"), lineage=3, place=lambda: AT)
    with redis.Redis.from_url(bench.url) as client:
        with sign:
            wait_until(lambda: awaited("alive"))
            assert scrape(port).sum("embertide_control_trainer_unread", model="news") == 12
        wait_until(lambda: awaited("ended"))
        key = "e:{news:commit}:trainer"
        with SignOfLife(bench.url, "news", folder=Path("/srv"), lineage=4, place=lambda: AT):
            wait_until(lambda: awaited("alive"))
            last = client.get(key)
        client.set(key, last, px=_SIGN_KEPT_MS - 11_000)  # as if it had been killed
        wait_until(lambda: awaited("silent"))
