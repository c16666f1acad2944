"""The demo's proof counts samples by nodes' metrics, however requests carry them."""

import pytest

from embertide.server.cli.demo.proof import scored
from embertide.server.cli.metrics_page import MetricsPage

PLAIN = """# TYPE nv_inference_count counter
nv_inference_count{model="news",version="1"} 600
nv_inference_count{model="frozen",version="1"} 7
"""
CONTEXTS = """# TYPE embertide_contexts_total counter
embertide_contexts_total{model="news",of="requests"} 20
embertide_contexts_total{model="news",of="contexts"} 50
embertide_contexts_total{model="news",of="candidates"} 5000
embertide_contexts_total{model="frozen",of="candidates"} 900
"""


@pytest.mark.parametrize(("page", "samples"), [(PLAIN, 600), (PLAIN + CONTEXTS, 5580)])
def test_candidates_of_requests_with_contexts_count(page: str, samples: int) -> None:
    assert scored(MetricsPage(page)) == samples
