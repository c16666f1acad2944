"""Reading Triton's /metrics page."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

TIERS = ("hbm", "ddr", "ssd", "index")
SOURCES = ("hbm", "ddr", "ssd", "remote", "default", "pruned", "unanswered", "hot")


class MetricsPage:
    """The samples of one page, or of several nodes' pages one after the other."""

    def __init__(self, text: str) -> None:
        """Parse a page."""
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of `name` that carry these labels."""
        # The parser gives every counter the suffix of OpenMetrics.
        samples = self._samples.get(name) or self._samples.get(f"{name}_total") or []
        return sum((value for said, value in samples if labels.items() <= said.items()), 0.0)

    def least(self, name: str, **labels: str) -> float:
        """Return the least sample of `name` that carries these labels, of all nodes."""
        samples = self._samples.get(name, [])
        return min((value for said, value in samples if labels.items() <= said.items()), default=0)

    def models(self) -> list[str]:
        """Return the models of ours, ascending."""
        return sorted({labels["model"] for labels, _ in self._samples.get("embertide_version", ())})

    def labels(self, name: str, label: str, **more: str) -> list[str]:
        """Return the values of a label of `name`, of samples that carry `more`, ascending."""
        samples = self._samples.get(name, ())
        return sorted({said[label] for said, _ in samples if more.items() <= said.items()})

    def hits(self, model: str) -> dict[str, int]:
        """Return keys answered, by where the answer came from."""
        name = "embertide_lookup_keys_total"
        return {each: int(self.sum(name, model=model, source=each)) for each in SOURCES}

    def resident_bytes(self, model: str) -> dict[str, int]:
        """Return bytes held, by tier."""
        return {
            tier: int(self.sum("embertide_tier_bytes", model=model, tier=tier)) for tier in TIERS
        }

    def _by(self, name: str, label: str, model: str, **more: str) -> dict[str, int]:
        """Return the values of `name` by a label of theirs, of those that carry `more`."""
        said = {
            labels[label] for labels, _ in self._samples.get(name, ()) if labels["model"] == model
        }
        return {
            each: int(self.sum(name, model=model, **{label: each, **more})) for each in sorted(said)
        }

    def model(self, name: str) -> dict[str, Any]:
        """Return what a person asks of a model first."""
        return dict(self._facts(name))

    def _facts(self, name: str) -> Iterator[tuple[str, Any]]:
        yield "version", int(self.least("embertide_version", model=name))
        yield "watermark_ms", int(self.least("embertide_watermark_ms", model=name))
        yield "plan_epoch", int(self.least("embertide_plan_epoch", model=name))
        if versions := self.labels("embertide_server_info", "version", model=name):
            yield "tritonserver", ", ".join(versions)
        for fact in ("restarts", "silences"):  # of one that `embertide serve` keeps
            if f"embertide_server_{fact}_total" in self._samples:
                yield fact, int(self.sum(f"embertide_server_{fact}_total", model=name))
        yield "rows", int(self.sum("embertide_rows", model=name))
        ddr, ssd = (
            self._by("embertide_table_rows", "table", name, tier=tier) for tier in ("ddr", "ssd")
        )
        yield "rows_by_table", {table: ddr[table] + ssd[table] for table in ddr}  # hbm has copies
        yield "resident_bytes", self.resident_bytes(name)
        yield "hits", self.hits(name)
        if "embertide_hbm_rows" in self._samples:
            yield "hbm", self._by("embertide_hbm_events_total", "event", name)
        yield "refused", int(self.sum("embertide_requests_refused_total", model=name))
        yield "inferences", int(self.sum("nv_inference_count", model=name))
        yield "failed_requests", int(self.sum("nv_inference_request_failure", model=name))
        if "embertide_promoted_version" in self._samples:
            for fact in ("promoted_version", "candidate_version"):
                yield fact, int(self.least(f"embertide_{fact}", model=name))
            yield (
                "withdrawn_versions",
                self._by("embertide_versions_withdrawn_total", "reason", name),
            )
            yield "holds_versions", bool(self.sum("embertide_versions_held", model=name))
            unguarded = self.sum("embertide_unguarded_versions_total", model=name)
            yield "unguarded_versions", int(unguarded)
        if "embertide_bus_connected" in self._samples:
            refused = self.sum("embertide_bus_events_total", model=name, event="refused")
            yield "refused_versions", int(refused)
            yield "bus_connected", bool(self.least("embertide_bus_connected", model=name))
