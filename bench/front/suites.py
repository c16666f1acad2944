"""Whether what held behind the stock front end holds behind ours: the tests that show it.

Who gets in, how credentials are replaced and how a node ends; what serves models; and what the
manifests of Kubernetes say. The stock front end has tests of its own, which are run as well. Chaos
behind ours is `bench.chaos`'s.
"""

import argparse
from collections.abc import Iterator

from bench import report
from bench.held import held

CLAIM = "B.5"
_OURS = "not triton and not http"
_STOCK = "triton or http or stock"
# What is shown, by which tests, and which of them.
_HELD = (
    ("nobody gets in whom the page does not name", "who_gets_in", "test_"),
    ("our doors ask for a key", "doors", _OURS),
    ("credentials replaced under traffic", "rotation", "test_"),
    ("a node ends soon, whoever is connected", "ends", "test_"),
    ("hostile callers", "hostile_callers", "test_"),
    ("lookups", "lookup_serving", _OURS),
    ("ranking", "ranking_serving", _OURS),
    ("clients", "client", _OURS),
    ("restarts", "restarts", "test_"),
    ("rolling restarts", "rolling_restart", "test_"),
    ("what our front end tells of itself", "front", "test_"),
    ("a node answers its manifest's probes", "manifest_probes", "test_"),
    ("the stock front end: doors", "doors", _STOCK),
    ("the stock front end: lookups", "lookup_serving", _STOCK),
    ("the stock front end: ranking", "ranking_serving", _STOCK),
    ("the stock front end: clients", "client", _STOCK),
    ("the stock front end, of a named installation", "other_triton", "test_"),
)


def run(options: argparse.Namespace) -> Iterator[report.Row]:
    """Run the tests."""
    del options
    for case, tests, chosen in _HELD:
        yield held(case, f"tests/e2e/test_{tests}.py", chosen, claim=CLAIM)
    yield held("manifests", "tests/k8s", "test_", claim=CLAIM)
