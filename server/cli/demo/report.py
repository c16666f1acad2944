"""The demo's report: report.json for programs, report.html with pictures for people."""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

if TYPE_CHECKING:  # a second of every command's start, were it loaded here
    from matplotlib.axes import Axes

_TIER_COLOURS = {
    "hbm": "#7b3294",
    "ddr": "#2c7fb8",
    "ssd": "#f03b20",
    "remote": "#636363",
    "default": "#bdbdbd",
    "pruned": "#252525",
    "unanswered": "#e7298a",
    "hot": "#fdae61",
}
_NAMES = {
    "hbm": "HBM",
    "ddr": "DDR",
    "ssd": "SSD",
    "remote": "the other node",
    "default": "no row: the default",
    "pruned": "pruned",
    "unanswered": "no answer",
    "hot": "copies of hot rows",
    "index": "index",
}
COMPARED_WANTED = 1000
"""Answers, compared while buckets move, that make a proof."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Embertide demo</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } .big { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; }
.big div { min-width: 9rem; } .big b { display: block; font-size: 1.7rem; line-height: 1.2; }
.big span, figcaption { color: #555; font-size: .9rem; } figure { margin: 1.5rem 0; }
img { width: 100%; } table { border-collapse: collapse; } td { padding: .1rem 1.5rem .1rem 0; }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
</style></head><body>
<h1>A model that learns while it is served</h1>
<div class="big">{% for name, value in headline %}
<div><b>{{ value }}</b><span>{{ name }}</span></div>{% endfor %}
</div>
{% for title, picture in pictures %}<figure>
<img alt="{{ title }}" src="data:image/svg+xml;base64,{{ picture }}">
<figcaption>{{ title }}</figcaption></figure>
{% endfor %}<table>{% for name, value in facts %}
<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}
</table></body></html>
"""


def auc_text(value: float | None) -> str:
    """Return an AUC to four digits."""
    return "none" if value is None else f"{value:.4f}"


def hit_share(hits: Mapping[str, int], source: str) -> float:
    """Return the share of lookups that a source answered."""
    total = sum(hits.values())
    return hits.get(source, 0) / total if total else 0.0


def headline(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures that a person reads first, as (name, value)."""
    hits, reshard = report["hits"], report["reshard"]
    sources = ("ddr", "ssd", "hot", "remote")
    figures = [
        ("served AUC", auc_text(report["served_auc"])),
        ("frozen AUC", auc_text(report["frozen_auc"])),
        ("impressions scored", f"{report['events']:,}"),
        ("failed requests", f"{report['failed_requests']:,} of {report['requests']:,}"),
        ("p50 / p99 of a request", f"{report['p50_ms']:.1f} / {report['p99_ms']:.1f} ms"),
        ("commit to first answer, p50 / p99", _freshness(report)),
        ("versions published", f"{report['versions_published']:,}"),
        *_plan_of_ranks(report, short=True),
        (
            "lookups from DDR / SSD / copies of hot rows / the other node",
            " / ".join(f"{hit_share(hits, source):.1%}" for source in sources),
        ),
    ]
    if reshard:
        figures += [
            ("gain of the reshard, predicted / measured", _gain(reshard["decision"])),
            (
                "buckets moved under traffic",
                f"{reshard['buckets_moved']} of {reshard['buckets']} in {reshard['seconds']:.1f} s",
            ),
            (
                "answers changed of those compared",
                f"{reshard['answers_changed']} of {reshard['compared']:,}",
            ),
        ]
    return figures


def plan_text(plan: Mapping[str, Any]) -> str:
    """Say how far ranks are with the plan that they look for, with what steps take."""
    steps = [
        f"{name} {1e3 * plan[f'{of}_s']:.1f}"
        for name, of in (("without", "default"), ("predicted", "predicted"), ("with", "measured"))
        if plan[f"{of}_s"]
    ]
    found = [f"{plan['searched']:,} plans timed"] if plan["searched"] else []
    found += [f"{', '.join(steps)} ms a step"] if steps else []
    return f"{plan['stage']} ({'; '.join(found)})" if found else str(plan["stage"])


def _plan_of_ranks(report: Mapping[str, Any], *, short: bool) -> list[tuple[str, str]]:
    """Say what ranks found when they looked for a plan; nothing of one that had no other."""
    plan = report.get("plan")
    if not plan:
        return []
    if short:
        return [(f"plan of {report['ranks']} ranks", plan_text(plan))]
    stops = [("training stood still to measure a step's parts", plan["profile_s"])]
    stops += [("from the end of the ranks to the first step with the plan", plan["stop_s"])]
    return [
        ("why ranks have this plan", plan["why"] or "the stream ended before anything was decided"),
        *((name, f"{seconds:.1f} s") for name, seconds in stops if seconds),
    ]


def _gain(decision: Mapping[str, Any]) -> str:
    measured = f"{decision['measured_gain']:.1%}" if decision["measured_ms"] else "not measured"
    return f"{decision['predicted_gain']:.1%} / {measured}"


def reshard_faults(report: Mapping[str, Any]) -> list[str]:
    """Return what the reshard did that it must not do, in words; empty if it did nothing."""
    reshard = report["reshard"]
    if not reshard:
        return []
    faults = {
        f"answers changed by the reshard, by up to {reshard['largest_difference']}": (
            reshard["answers_changed"]
        ),
        "requests failed during the reshard": reshard["failed_requests"],
        "answers of the reshard were not compared": reshard["answers"] - reshard["compared"],
    }
    return [f"{count} {text}" for text, count in faults.items() if count]


def _freshness(report: Mapping[str, Any]) -> str:
    return f"{report['freshness_p50_s']:.2f} / {report['freshness_p99_s']:.2f} s"


def _days(days: Sequence[int]) -> str:
    return ", ".join(map(str, days)) or "none"


def _last_fifth(report: Mapping[str, Any]) -> str:
    """Say the figures of the last fifth of the impressions, the AUC with its interval of 95 %."""
    found = report["served_last_fifth"]
    if "auc" not in found:
        return "none"
    error = f" ± {1.96 * found['auc_error']:.4f}" if "auc_error" in found else ""
    return f"{found['auc']:.4f}{error}, {found['log_loss']:.4f}, {found['calibration']:.3f}"


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    first, last = report["window_days"]
    resident = report["resident_bytes"]
    freezing, reshard = report["freezing_hour"], report["reshard"]
    facts = [
        (
            "AUC is the mean of the daily AUC over days",
            f"{first} to {last}" if last > first else f"{first}",
        ),
        ("trainer's own AUC over them", auc_text(report["trainer_auc"])),
        ("days whose AUC is unstable", _days(report["served_unstable_days"])),
        ("AUC, log loss, calibration of the last fifth", _last_fifth(report)),
        ("scored requests, failed", f"{report['requests']:,}, {report['failed_requests']:,}"),
        (
            "probes of freshness apart from them, failed",
            f"{report['probes']:,}, {report.get('failed_probes', 0):,}",
        ),
        (
            "age of the model that answered, p50 / p99 (event time)",
            f"{report['staleness_event_p50_s'] / 60:.1f} / "
            f"{report['staleness_event_p99_s'] / 60:.1f} min",
        ),
        ("rows", f"{report['rows']:,}"),
        ("bytes of all rows", f"{report['row_bytes']:,}"),
        ("DDR budget of a node", f"{report['node_ddr_budget_bytes']:,}"),
        *((f"resident bytes, {_NAMES[tier]}", f"{size:,}") for tier, size in resident.items()),
        *((f"lookups: {_NAMES[name]}", f"{count:,}") for name, count in report["hits"].items()),
        *_plan_of_ranks(report, short=False),
    ]
    if freezing:
        said = f"{freezing['served_auc']:.4f} / {freezing['frozen_auc']:.4f}"
        facts.append(("served / frozen in the hour of freezing", said))
    if reshard:
        decision = reshard["decision"]
        facts += [
            ("why buckets moved", decision["why"]),
            ("what the control plane saw change", ", ".join(decision["triggers"])),
            (
                "from the shift of traffic to the decision",
                f"{decision['seconds_after_the_shift']:.1f} s",
            ),
            ("planner", decision["planner"]),
            ("buckets moved to the other node", f"{reshard['buckets_moved_to_other_nodes']}"),
            ("bytes moved", f"{reshard['bytes_moved']:,}"),
            (
                "answers while they moved; versions",
                f"{reshard['answers']:,}; {reshard['versions']}",
            ),
            ("of them compared with the unmoved copy's", _compared(reshard)),
            ("of these, few events asked again to compare more", f"{reshard['checks']:,}"),
            # Nothing was asked meanwhile, perhaps: scoring waited for the trainer.
            (
                "largest difference from the unmoved copy",
                _said("{:.2g}", reshard["largest_difference"]),
            ),
            ("of them with a moved bucket's key", _said("{:.1%}", reshard["touched"])),
            (
                "impressions with a moved bucket's key",
                _said("{:.1%}", reshard["touched_impressions"]),
            ),
            ("p99 of a request while they moved", _said("{:.1f} ms", reshard["p99_ms"])),
            ("p99 just before, the copy asked too", _said("{:.1f} ms", reshard["p99_before_ms"])),
        ]
    return facts


def _compared(reshard: Mapping[str, Any]) -> str:
    count = reshard["compared"]
    few = f"; {COMPARED_WANTED:,} are wanted" if count < COMPARED_WANTED else ""
    return f"{count:,}{few}"


def _said(form: str, value: float | None) -> str:
    return "none" if value is None else form.format(value)


def _line(hours: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Return days and values, with a gap where an hour has none."""
    numbers = range(min(map(int, hours)), max(map(int, hours)) + 1)
    days = [(hour + 0.5) / 24 for hour in numbers]
    return days, [hours.get(str(hour), math.nan) for hour in numbers]


def _draw_auc(axes: "Axes", report: Mapping[str, Any]) -> None:
    for name, colour in (("served", "#2c7fb8"), ("frozen", "#f03b20")):
        hours = report[f"{name}_auc_by_hour"]
        if hours:
            axes.plot(*_line(hours), color=colour, label=name, linewidth=1.2)
    axes.axhline(0.5, color="#bbb", linewidth=0.8)
    axes.set_ylabel("AUC of an hour")
    axes.legend(loc="lower left", frameon=False, ncols=2)


def _draw_latency(axes: "Axes", report: Mapping[str, Any]) -> None:
    hours = report["latency_by_hour"]
    for at, name in enumerate(("p50", "p99")):
        values = {hour: pair[at] for hour, pair in hours.items()}
        axes.plot(*_line(values), label=name, linewidth=1.2)
    axes.set_ylabel("ms a request")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")  # of less than a decade the major ones are too few
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _draw_hits(axes: "Axes", report: Mapping[str, Any]) -> None:
    days: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in _TIER_COLOURS}
    before: Mapping[str, int] = {}
    for sample in report["samples"]:
        grown = {name: count - before.get(name, 0) for name, count in sample["hits"].items()}
        before = sample["hits"]
        # Where nothing was asked, as scoring waited for a version, there is no share to draw.
        if sample["ts_ms"] is None or not any(grown.values()):
            continue
        days.append(sample["ts_ms"] / 86_400_000)
        for name in shares:
            shares[name].append(hit_share(grown, name))
    used = {name: each for name, each in shares.items() if any(each)}
    if used:
        colours = [_TIER_COLOURS[name] for name in used]
        labels = [_NAMES[name] for name in used]
        axes.stackplot(days, list(used.values()), labels=labels, colors=colours)
        axes.legend(loc="lower left", ncols=len(used))
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of lookups")


_PICTURES = (
    ("AUC over event time: the model that learns, and its copy frozen early on", _draw_auc),
    ("Latency of scoring requests over event time", _draw_latency),
    ("Where lookups were answered, over event time", _draw_hits),
)


def _shade_reshard(axes: "Axes", report: Mapping[str, Any]) -> None:
    """Mark the event time in which buckets moved."""
    moving = ("moving", "settling")
    ts_ms = [each["ts_ms"] for each in report["samples"] if each["reshard"] in moving]
    if ts_ms:
        first, last = min(ts_ms) / 86_400_000, max(ts_ms) / 86_400_000
        axes.axvspan(first, last, color="#fdae61", alpha=0.6, linewidth=1, zorder=0)


def _picture(draw: Any, report: Mapping[str, Any]) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "svg.hashsalt": "embertide"}):
        figure = Figure(figsize=(10, 3), layout="constrained")
        axes = figure.subplots()
        draw(axes, report)
        _shade_reshard(axes, report)
        axes.set_xlabel("days of event time; shaded: buckets move")
        axes.spines[["top", "right"]].set_visible(False)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return base64.b64encode(out.getvalue()).decode()


def write_report(directory: Path, report: Mapping[str, Any]) -> None:
    """Write report.json and report.html."""
    text = json.dumps(report, indent=1) + "\n"
    (directory / "report.json").write_text(text, encoding="utf-8")
    page = Environment(undefined=StrictUndefined, autoescape=True).from_string(_PAGE)
    html = page.render(
        headline=headline(report),
        pictures=[(title, _picture(draw, report)) for title, draw in _PICTURES],
        facts=_facts(report),
    )
    (directory / "report.html").write_text(html, encoding="utf-8")
