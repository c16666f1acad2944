"""The report of a run: report.json for programs, report.html with a timeline for people."""

import base64
import dataclasses
import io
import json
import math
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from embertide.server.cli.chaos.faults import NODES
from embertide.server.cli.chaos.options import ChaosOptions

if TYPE_CHECKING:  # a second of every command's start, were it loaded here
    from matplotlib.figure import Figure

ROUNDS_FILE, REPORT_FILE, PAGE_FILE = "rounds.jsonl", "report.json", "report.html"
_WORST_SHOWN = 3
_COLOURS = {
    "kill": "#b5483a",
    "stop": "#d98c5f",
    "cut": "#7b3294",
    "stall": "#a77bb8",
    "delay": "#c9b3d3",
    "loss": "#8c96c6",
    "flip-messages": "#2c7fb8",
    "flip-file": "#41b6c4",
    "flush": "#238b45",
    "full": "#74c476",
    "disk-full": "#636363",
    "busy-cpu": "#bdb76b",
    "busy-disk": "#8a8f98",
    "clock": "#e7ba52",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Embertide chaos</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } table { border-collapse: collapse; font-size: .9rem; }
td, th { padding: .1rem 1rem .1rem 0; text-align: left; vertical-align: top; }
img { width: 100%; } .bad { color: #b5483a; } pre { white-space: pre-wrap; }
</style></head><body>
<h1>{{ title }}</h1>
<table>{% for name, value in facts %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}
</table>
{% for title, picture in pictures %}<figure><figcaption>{{ title }}</figcaption>
<img alt="{{ title }}" src="data:image/svg+xml;base64,{{ picture }}"></figure>{% endfor %}
{% for round in failed %}<h2 class="bad">seed {{ round.seed }}</h2>
<pre>{{ round.violations | join("\n") }}</pre>{% endfor %}
<table><tr><th>seed<th>faults<th>healed in<th>answers<th>failed<th>degraded</tr>
{% for round in rounds %}<tr><td>{{ round.seed }}</td><td>{% for fault in round.faults %}
{{ fault.kind }} {{ fault.target }}{% if not loop.last %}, {% endif %}{% endfor %}</td>
<td>{{ "%.1f" | format(round.heal_s) }} s</td><td>{{ "{:,}".format(round.answers) }}</td>
<td>{{ round.failed.values() | sum }}</td><td>{{ round.degraded_requests }}</td></tr>{% endfor %}
</table></body></html>
"""


def read_rounds(directory: Path) -> list[dict[str, Any]]:
    """Return the rounds that a run has written so far; the last line may be cut."""
    rounds = []
    path = directory / ROUNDS_FILE
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            rounds.append(json.loads(text))
        except ValueError:
            break
    return rounds


def add_round(directory: Path, round_: Any) -> dict[str, Any]:
    """Write a round down and return it as it is read again."""
    text = json.dumps(dataclasses.asdict(round_))
    with (directory / ROUNDS_FILE).open("a") as file:
        file.write(text + "\n")
    said: dict[str, Any] = json.loads(text)
    return said


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all rounds."""
    healed = sorted(each["heal_s"] for each in rounds)
    faults = [fault for each in rounds for fault in each["faults"]]
    failed = [each for each in rounds if each["violations"]]
    flipped = sum(sum(each["flipped_messages"].values()) for each in rounds)
    return {
        "rounds": len(rounds),
        "rounds_failed": len(failed),
        "failing_seeds": [each["seed"] for each in failed],
        "faults": dict(Counter(fault["kind"] for fault in faults)),
        "answers": sum(each["answers"] for each in rounds),
        "requests": sum(each["requests"] for each in rounds),
        "failed_requests": _sum(each["failed"] for each in rounds),
        "degraded_requests": sum(each["degraded_requests"] for each in rounds),
        "degraded_keys": sum(each["degraded_keys"] for each in rounds),
        "versions": sum(each["versions"] for each in rounds),
        "process_starts": _sum(each["starts"] for each in rounds),
        "flipped_messages": flipped,
        "flipped_files": sum(len(each["flipped_files"]) for each in rounds),
        "noticed": _sum(each["noticed"] for each in rounds),
        "state_keys_compared": sum(each["state_rows"] for each in rounds) * len(NODES),
        "heal_s_p50": round(statistics.median(healed), 2) if healed else None,
        "heal_s_p99": round(healed[min(len(healed) - 1, int(len(healed) * 0.99))], 2)
        if healed
        else None,
        "heal_s_longest": round(healed[-1], 2) if healed else None,
    }


def timeline(rounds: Sequence[Mapping[str, Any]], title: str) -> "Figure":
    """Draw faults by what they concern, over the requests and the versions of the same time."""
    from matplotlib.figure import Figure

    begin = min(each["began_s"] for each in rounds)
    end = max((b["at_s"] for each in rounds for b in each["bins"]), default=begin) - begin
    targets = sorted(
        {fault["target"] or "machine" for each in rounds for fault in each["faults"]}, reverse=True
    )
    figure = Figure(figsize=(13, 4.6 + 0.22 * len(targets)), layout="constrained")
    ratios = [0.22 * len(targets) + 0.4, 2, 2]
    faults, requests, versions = figure.subplots(3, sharex=True, height_ratios=ratios)
    seen: set[str] = set()
    for each in rounds:
        for fault in each["faults"]:
            at = each["began_s"] - begin + fault["at_s"]
            kind = fault["kind"]
            faults.barh(
                targets.index(fault["target"] or "machine"),
                max(fault["for_s"], end / 400),
                left=at,
                height=0.7,
                color=_COLOURS.get(kind, "#000000"),
                label=None if kind in seen else kind,
            )
            seen.add(kind)
    faults.set_yticks(range(len(targets)), targets, fontsize=7)
    faults.legend(fontsize=6, ncols=7, loc="lower left", bbox_to_anchor=(0, 1.0))
    bins = [b for each in rounds for b in each["bins"]]
    x = [b["at_s"] - begin for b in bins]
    requests.plot(x, [b["answered"] for b in bins], color="#2a7f62", linewidth=0.7, label="right")
    for name, colour in (("slow", "#e0a030"), ("degraded", "#7b3294"), ("failed", "#b5483a")):
        marked = [(at, b[name]) for at, b in zip(x, bins, strict=True) if b[name]]
        if marked:
            requests.plot(*zip(*marked, strict=True), ".", color=colour, markersize=3, label=name)
    requests.set_ylabel("requests in 0.25 s")
    requests.legend(fontsize=7, loc="upper right")
    known = [b for b in bins if b["published"]]
    for node, name in enumerate(NODES):
        answers = [(b["at_s"] - begin, b["published"], b["versions"][node]) for b in known]
        # Where it answered nothing the line is broken.
        behind = [(at, newest - had if had else math.nan) for at, newest, had in answers]
        if behind:
            versions.plot(*zip(*behind, strict=True), linewidth=0.8, label=name)
    versions.set_ylabel("versions behind the trainer")
    versions.set_xlabel("s")
    versions.legend(fontsize=7, loc="upper right")
    figure.suptitle(title, fontsize=11)
    return figure


def histogram(rounds: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw how long the fleet took to be well again."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.hist([each["heal_s"] for each in rounds], bins=40, color="#2c7fb8")
    axes.set_xlabel("s from the last fault's end until a new version is answered with everywhere")
    axes.set_ylabel("rounds")
    return figure


def _svg(figure: "Figure") -> str:
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "embertide"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return base64.b64encode(out.getvalue().encode()).decode()


def write_report(options: ChaosOptions, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write both reports and return the figures."""
    figures = summary(rounds)
    document = {
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "options": json.loads(json.dumps(dataclasses.asdict(options), default=str)),
        **figures,
        "each": [{k: v for k, v in each.items() if k != "bins"} for each in rounds],
    }
    (options.directory / REPORT_FILE).write_text(json.dumps(document, indent=1) + "\n")
    worst = sorted(rounds, key=lambda each: (bool(each["violations"]), each["heal_s"]))
    pictures = [("All rounds", timeline(rounds, "")), ("Times to heal", histogram(rounds))]
    for each in reversed(worst[-_WORST_SHOWN:]):
        title = f"seed {each['seed']}, healed in {each['heal_s']:.1f} s"
        pictures.append((title, timeline([each], "")))
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    text = environment.from_string(_PAGE).render(
        title=f"Chaos: {figures['rounds']} rounds, {figures['rounds_failed']} failed",
        facts=list(figures.items()),
        pictures=[(title, _svg(figure)) for title, figure in pictures],
        failed=[each for each in rounds if each["violations"]],
        rounds=rounds,
    )
    (options.directory / PAGE_FILE).write_text(text)
    return figures
