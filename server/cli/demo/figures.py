"""The demo's figures in words, by what they are about: for its page and for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from embertide.server.pages.rendering import Tile, size_text

COMPARED_WANTED = 1000
"""Answers, compared while buckets move, that make a proof."""
SOURCES = {
    "hbm": "HBM",
    "ddr": "DDR",
    "ssd": "SSD",
    "hot": "copies of hot rows",
    "remote": "the other node",
    "default": "no row",
    "pruned": "a pruned row",
    "unanswered": "no answer",
}
"""Where the answer to a looked-up key came from, in words."""
_WITHOUT_A_ROW = ("default", "pruned", "unanswered")
_TIERS = {"hbm": "HBM", "ddr": "DDR", "ssd": "SSD", "index": "index"}
_SIGNALS = {
    "skew": "the busiest device's load over the mean",
    "remote_share": "the share of keys that nodes ask each other for",
    "copy_share": "the share of keys answered by copies of hot rows",
    "ssd_share": "the share of keys read from the SSD",
    "hot_set_overlap": "which keys are hot",
    "forecast_error": "how far the forecast of the load is off",
    "mix_change": "which buckets each node is asked for",
}
_STAGES = {
    "none": "no better one was found",
    "kept": "a better one is used",
    "refused": "the one that was found was not faster",
}
_DAY_MS = 86_400_000


class Group(NamedTuple):
    """Figures about one thing.

    Attributes:
        key: Its name in the page's links.
        title: Its name for people.
        tiles: The figures to look at first.
        facts: The others, as (name, value).
        note: A sentence about all of them, or none.
    """

    key: str
    title: str
    tiles: Sequence[Tile]
    facts: Sequence[tuple[str, str]]
    note: str = ""


def auc_text(value: float | None) -> str:
    """Return an AUC to four digits."""
    return "none" if value is None else f"{value:.4f}"


def hit_share(hits: Mapping[str, int], source: str) -> float:
    """Return the share of lookups that a source answered."""
    total = sum(hits.values())
    return hits.get(source, 0) / total if total else 0.0


def event_time(ts_ms: float | None) -> str:
    """Return an event's time as people read it, to the minute."""
    if ts_ms is None:
        return "none yet"
    day, rest = divmod(round(ts_ms), _DAY_MS)
    return f"day {day}, {rest // 3_600_000:02}:{rest // 60_000 % 60:02}"


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


def faults(report: Mapping[str, Any]) -> list[str]:
    """Return what the reshard did that it must not do, in words; empty if it did nothing."""
    reshard = report["reshard"]
    if not reshard:
        return []
    counts = {
        f"answers changed by the reshard, by up to {reshard['largest_difference']}": (
            reshard["answers_changed"]
        ),
        "requests failed during the reshard": reshard["failed_requests"],
        "answers of the reshard were not compared": reshard["answers"] - reshard["compared"],
    }
    return [f"{count} {text}" for text, count in counts.items() if count]


def all_faults(report: Mapping[str, Any]) -> list[str]:
    """Return whatever is wrong in a run, in words: faults of the reshard, and all that failed."""
    counts = {
        "requests failed": report["failed_requests"],
        "probes of freshness failed": report.get("failed_probes", 0),
        "repeated questions failed": report.get("failed_checks", 0),
        "impressions have no score": report["missing_rows"],
        "impressions were scored by a version that had learned from them": report["learned_rows"],
        "clicks were split over two versions": report["split_groups"],
        "answers were older than one before them": report["steps_back"],
    }
    return [*faults(report), *(f"{count:,} {text}" for text, count in counts.items() if count)]


def headline(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures that a person reads first, as (name, value)."""
    return [(tile.title, tile.value) for group in groups(report) for tile in group.tiles]


def groups(report: Mapping[str, Any]) -> list[Group]:
    """Return all figures, by what they are about."""
    found = [_quality(report), _moves(report), _latency(report), _failed(report), _lookups(report)]
    return [*found, _ranks(report)] if report.get("plan") else found


def _quality(report: Mapping[str, Any]) -> Group:
    hour = report["freezing_hour"]
    copied = (
        f"of its copy, which stopped learning after {event_time(hour['hour'] * 3_600_000)}"
        if hour
        else "the stream ended before a copy was made"
    )
    tiles = [
        Tile("Served AUC", auc_text(report["served_auc"]), "of the model that learns"),
        Tile("Frozen AUC", auc_text(report["frozen_auc"]), copied),
        Tile(
            "Trainer's own AUC",
            auc_text(report["trainer_auc"]),
            "of events just before it learns them",
        ),
        Tile("Impressions scored", f"{report['events']:,}", "before the trainer saw them"),
        Tile(
            "Versions published",
            f"{report['versions_published']:,}",
            f"{report['versions_answered']:,} of them answered requests",
        ),
    ]
    facts = [
        (
            "Age of the model that answered, in event time, p50 / p99",
            f"{report['staleness_event_p50_s'] / 60:.1f} / "
            f"{report['staleness_event_p99_s'] / 60:.1f} min",
        ),
        (
            "Days with too few clicks for a stable AUC",
            ", ".join(map(str, report["served_unstable_days"])) or "none",
        ),
        *_last_fifth(report),
    ]
    if hour:
        both = f"{auc_text(hour['served_auc'])} / {auc_text(hour['frozen_auc'])}"
        facts.append(("Served / frozen AUC in the hour of the copy", both))
    first, last = report["window_days"]
    days = f"days {first} to {last}" if last > first else f"day {first}"
    note = f"AUC: mean of the daily AUC over {days} of the stream."
    return Group("quality", "Quality", tiles, facts, note)


def _last_fifth(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the figures of the last fifth of the impressions, the AUC with its interval of 95 %."""
    found = report["served_last_fifth"]
    if "auc" in found:
        error = f" ± {1.96 * found['auc_error']:.4f}" if "auc_error" in found else ""
        yield "AUC of the last fifth of the impressions", f"{found['auc']:.4f}{error}"
        yield "Log loss of the last fifth", f"{found['log_loss']:.4f}"
        yield "Calibration of the last fifth: predicted / observed", f"{found['calibration']:.3f}"


def _moves(report: Mapping[str, Any]) -> Group:
    key, title, reshard = "moves", "Moves under traffic", report["reshard"]
    if not reshard:
        note = "No bucket moved: the stream ended before the control plane had seen enough of it."
        return Group(key, title, [], [], note)
    decision, compared, changed = (
        reshard["decision"],
        reshard["compared"],
        reshard["answers_changed"],
    )
    few = compared < COMPARED_WANTED
    tiles = [
        Tile(
            "Buckets moved",
            f"{reshard['buckets_moved']} of {reshard['buckets']}",
            f"in {reshard['seconds']:.1f} s, {reshard['buckets_moved_to_other_nodes']} of them to "
            f"the other node; {size_text(reshard['bytes_moved'])}",
        ),
        Tile(
            "Answers compared meanwhile",
            f"{compared:,} of {reshard['answers']:,}",
            "with those of a copy that moved nothing"
            + (f"; {COMPARED_WANTED:,} are wanted" if few else ""),
            "warn" if few else "plain",
        ),
        Tile(
            "Answers changed",
            f"{changed:,} of {compared:,}",
            f"largest difference {_or_none('{:.2g}', reshard['largest_difference'])}",
            "bad" if changed else "good" if compared else "plain",
        ),
        Tile(
            "Gain of the moves",
            f"{decision['measured_gain']:.1%}" if decision["measured_ms"] else "not measured",
            f"of the busiest device's time; predicted {decision['predicted_gain']:.1%}",
        ),
    ]
    facts = [
        ("Why buckets moved", str(decision["why"])),
        (
            "The control plane saw change",
            "; ".join(_SIGNALS.get(each, each) for each in decision["triggers"]) or "nothing",
        ),
        (
            "From the shift of traffic to the decision",
            f"{decision['seconds_after_the_shift']:.1f} s",
        ),
        ("Planner", str(decision["planner"])),
        ("Versions of the answers meanwhile", f"{reshard['versions']:,}"),
        ("Compared answers to events that were asked again", f"{reshard['checks']:,}"),
        ("Compared answers that read a moved bucket", _or_none("{:.1%}", reshard["touched"])),
        (
            "Impressions that read a moved bucket",
            _or_none("{:.1%}", reshard["touched_impressions"]),
        ),
    ]
    return Group(key, title, tiles, facts)


def _or_none(form: str, value: float | None) -> str:
    """Say a figure; nothing was asked meanwhile, perhaps, as scoring waited for the trainer."""
    return "none" if value is None else form.format(value)


def _latency(report: Mapping[str, Any]) -> Group:
    of_request = "as the client sees it"
    of_commit = "from a version's commit until it first answers"
    tiles = [
        Tile("Request, p50", f"{report['p50_ms']:.1f} ms", of_request),
        Tile("Request, p99", f"{report['p99_ms']:.1f} ms", of_request),
        Tile("Commit to first answer, p50", f"{report['freshness_p50_s']:.2f} s", of_commit),
        Tile("Commit to first answer, p99", f"{report['freshness_p99_s']:.2f} s", of_commit),
    ]
    facts, reshard = [], report["reshard"]
    if reshard:
        facts = [
            (
                "Request, p99, just before buckets moved, with the copy asked too",
                _or_none("{:.1f} ms", reshard["p99_before_ms"]),
            ),
            ("Request, p99, while buckets moved", _or_none("{:.1f} ms", reshard["p99_ms"])),
        ]
    return Group("latency", "Latency and freshness", tiles, facts)


def _failed(report: Mapping[str, Any]) -> Group:
    kinds = [
        ("Failed requests", "requests", "each of many impressions"),
        ("Failed probes", "probes", "that look for a version's first answer"),
        ("Failed repeated questions", "checks", "beside requests, to compare more answers"),
    ]
    tiles = []
    for title, kind, note in kinds:
        failed = report.get(f"failed_{kind}", 0)
        tone = "bad" if failed else "good"
        tiles.append(Tile(title, f"{failed:,} of {report.get(kind, 0):,}", note, tone))
    facts = [
        ("Impressions without a score", f"{report['missing_rows']:,}"),
        (
            "Impressions scored by a version that had learned from them",
            f"{report['learned_rows']:,}",
        ),
        ("Clicks whose impressions two versions scored", f"{report['split_groups']:,}"),
        (
            "Answers by an older version than one before, of the same node",
            f"{report['steps_back']:,}",
        ),
    ]
    return Group("failed", "Failed", tiles, facts)


def _lookups(report: Mapping[str, Any]) -> Group:
    hits, resident = report["hits"], report["resident_bytes"]
    tiles = [
        Tile(
            f"Keys {'with' if each in _WITHOUT_A_ROW else 'from'} {name}",
            f"{hit_share(hits, each):.1%}",
            f"{hits[each]:,} lookups",
        )
        for each, name in SOURCES.items()
        if hits.get(each)
    ]
    facts = [
        ("Rows", f"{report['rows']:,}"),
        ("Size of all rows", size_text(report["row_bytes"])),
        ("DDR that a node may use", size_text(report["node_ddr_budget_bytes"])),
        *(
            (f"In use by both nodes, {_TIERS[tier]}", size_text(n))
            for tier, n in resident.items()
            if n
        ),
    ]
    return Group("lookups", "Lookups and memory", tiles, facts)


def _ranks(report: Mapping[str, Any]) -> Group:
    plan = report["plan"]
    steps = [
        ("Step without the plan", "default_s", "median of those measured"),
        ("Step with the plan, predicted", "predicted_s", "by the search"),
        ("Step with the plan, measured", "measured_s", "median of those measured"),
    ]
    stage = _STAGES.get(plan["stage"], "the search had not ended")
    tiles = [
        Tile(f"Plan of {report['ranks']} ranks", plan["stage"], stage),
        Tile("Plans timed", f"{plan['searched']:,}", "by the search"),
        *(
            Tile(title, f"{1e3 * plan[name]:.1f} ms", note)
            for title, name, note in steps
            if plan[name]
        ),
    ]
    stops = [
        ("Training stood still to measure a step's parts", plan["profile_s"]),
        ("From the end of the ranks to the first step with the plan", plan["stop_s"]),
    ]
    facts = [
        ("Why ranks have this plan", plan["why"] or "the stream ended before it was decided"),
        *((name, f"{seconds:.1f} s") for name, seconds in stops if seconds),
    ]
    return Group("ranks", "Training by several processes", tiles, facts)
