"""A real Prometheus scrapes a real fleet: every panel, recorded series and alert has data.

The fleet is that of chaos: two nodes under Triton, a trainer that learns from a stream, a control
plane, two Redis and clients. Nothing is filled in: rules are those that users load, the scrape
configuration is that of docs/monitoring.md.
"""

import re
from collections.abc import Iterator

import pytest

from bench.monitored import Monitored
from k8s.monitoring.panels import BOARDS
from k8s.monitoring.rules import ALERTS, RECORDINGS

pytestmark = [pytest.mark.long, pytest.mark.alone]

_DATA_S = 180.0  # until two checkpoints have been written
# Events that this fleet does not have while nothing is wrong.
_LACKING = {"a guard", "a rejected event", "a task that fails"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    with Monitored(tmp_path_factory.mktemp("monitored")) as site:
        yield site


def asked(expression: str) -> str:
    """A panel's query with everything chosen."""
    chosen = re.sub(r"\$(namespace|model|instance)\b", ".*", expression)
    return chosen.replace("$__rate_interval", "1m")


def test_every_panel_and_rule_has_data(site: Monitored) -> None:
    queries = {
        f"{board.title}: {panel.title}": asked(query)
        for board in BOARDS
        for panel in board.panels
        for query, _ in panel.queries
        if panel.only not in _LACKING
    }
    queries |= {each.record: each.record for each in RECORDINGS}
    queries |= {each.name: each.query for each in ALERTS if each.needs not in _LACKING}

    def without_data() -> list[str]:
        return [name for name, query in queries.items() if not site.prometheus.query(query)]

    site.holds(lambda: not without_data(), _DATA_S)
    assert without_data() == []
