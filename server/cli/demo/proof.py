"""The report of a demo, made again from its records, the input and the nodes' metrics."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from embertide.server.cli.demo.options import MODEL, DemoOptions
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.processes import run_trainer


def verify(options: DemoOptions) -> dict[str, Any]:
    """Make the figures from the demo's records and the input.

    Raises:
        CommandError: The records do not prove themselves; the message says the fault.
    """
    more: list[str] = []
    if options.frozen_records.is_dir():
        more += ["--frozen", str(options.frozen_records)]
    if options.reshard.is_file():
        more += ["--reshard", str(options.reshard)]
    versions = options.publication / "versions.jsonl"
    records = (str(options.directory), str(versions))
    return dict(run_trainer("verify", [*records, *options.input(), *more]))


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One thing that the report says, and what was found."""

    name: str
    reported: Any
    found: Any

    @property
    def holds(self) -> bool:
        """Whether the two are the same, to the last digits of a float."""
        if isinstance(self.reported, float) and isinstance(self.found, float):
            return abs(self.reported - self.found) <= 1e-9
        return bool(self.reported == self.found)


def scored(page: MetricsPage) -> int:
    """Return how many samples nodes have scored.

    Triton counts the first dimension of a request, which is 1 of one with contexts; the candidates
    of those are counted by the backend.
    """
    contexts = "embertide_contexts_total"
    with_contexts = page.sum(contexts, model=MODEL, of="requests")
    candidates = page.sum(contexts, model=MODEL, of="candidates")
    return int(page.sum("nv_inference_count", model=MODEL) - with_contexts + candidates)


def check(options: DemoOptions, report: Mapping[str, Any]) -> Iterator[Check]:
    """Yield every check of a report against the records, the input and the nodes' metrics.

    Raises:
        CommandError: The records do not prove themselves.
    """
    figures = verify(options)
    for name, found in figures.items():
        yield Check(name, report.get(name), found)
    page = MetricsPage(options.metrics.read_text())
    asked = report["events"] + report["probes"] + report.get("check_events", 0)
    yield Check("nv_inference_count", asked, scored(page))
    failures = int(page.sum("nv_inference_request_failure", model=MODEL))
    yield Check(
        "nv_inference_request_failure",
        sum(report.get(f"failed_{what}", 0) for what in ("requests", "probes", "checks")),
        failures,
    )
    for name, found in page.model(MODEL).items():
        if name in ("rows", "hits", "resident_bytes"):
            yield Check(name, report[name], found)
