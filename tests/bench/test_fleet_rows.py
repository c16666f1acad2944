"""Benchmarks of fleets, small or from what was noted: their rows, and what makes them fail."""

import argparse
import collections
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import (
    cache,
    change,
    chaos,
    fuzz,
    keys,
    load,
    outage,
    overload,
    remote,
    report,
    reshard,
    soak,
)
from bench.servers import BenchError
from embertide.server.cli.chaos.rounds import Round
from embertide.server.cli.chaos.traffic import Asked
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.presets import news_model
from embertide.v1 import plan_pb2


def _options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**values)


def test_policies_are_rated_on_a_stream_of_a_few_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_GENERATED_HOURS", 6)
    *rows, closed = cache._measure(_options(traces=[]))
    assert len(rows) == 3 * len(cache._POLICIES)
    assert all(0 < row.ours <= 10_000 for row in rows)
    assert (closed.unit, closed.peer_name) == ("%", "s3-fifo")


def test_a_feature_is_taken_from_events_and_model() -> None:
    source = NewsSource(NewsConfig(hours=1, views_per_hour=50))
    names = [feature.name for feature in source.schema.features]
    fewer = change.Without(source, "prev")
    (whole, less) = (next(of.batches(batch_size=16)) for of in (source, fewer))
    kept = [at for at, name in enumerate(names) if name != "prev"]
    np.testing.assert_array_equal(whole.keys_BF[:, kept], less.keys_BF)
    assert "prev" not in {feature.name for feature in change.without(news_model(), "prev").features}
    days = [{"days": [0.9 - 0.001 * (name == "changed")] * 10} for name in ("whole", "changed")]
    found = {"whole": days[0], "changed": days[1], "small": days[0], "back": days[0]}
    rows = change.rows_of([found, found])
    assert [(row.claim, row.met) for row in rows[:2]] == [("H.6", True), ("22.4", True)]


def _round(**values: Any) -> Round:
    plain: dict[str, Any] = dict.fromkeys(Round.__dataclass_fields__, 0)
    plain |= dict.fromkeys(("faults", "skipped", "endings", "violations", "bins"), ())
    plain |= {"failed": {}, "starts": {"node-0": 1, "node-1": 0}, "flipped_files": ()}
    return Round(**{**plain, **values})


def test_a_round_with_a_violation_is_an_error_behind_its_rows(tmp_path: Path) -> None:
    rounds = [
        {"began_s": 60.0 * at, "versions": 100, "violations": ["no"] * at, "heal_s": 0.3}
        | {"starts": {"node-0": 1, "node-1": 0}, "late_s": 1.0}
        for at in range(2)
    ]
    path = tmp_path / "report.json"
    said = {"each": rounds, "heal_s_longest": 0.5, "flipped_messages": 2, "answers": 10}
    path.write_text(json.dumps(said | {"rounds_failed": 1}))
    rows = chaos._measure(_options(report=path))
    before: list[report.Row] = []
    with pytest.raises(BenchError, match="1 rounds failed"):
        before.extend(rows)
    by_metric = {row.metric: row for row in before}
    assert by_metric["rounds without a violation"].ours == 0.5
    assert by_metric["last failed or degraded request after a node was ready"].met


def test_an_outage_that_fails_a_request_does_not_hold() -> None:
    good, bad = _round(heal_s=0.5, requests=9), _round(heal_s=2.0, requests=9, failed={"X": 1})
    healed, holds, *_ = outage._rows("away", [good, bad], 10.0)
    assert (healed.ours, healed.met, holds.met) == (1.25, True, False)
    assert outage._rows("away", [good], 10.0)[1].met


def test_overload_counts_what_is_answered() -> None:
    log = np.array([(0, 0, 0.1, 5), (0, 0, 0.4, 5), (0, 0, 0.5, -1)], load._ENTRY)
    seen = load.Seen(log=log, begin=0.0, end=1.0)
    asked = [Asked(node=0, sent_s=0.0, took_s=0.2, keys=100, degraded=2)]
    rows = {row.metric: row for row in overload._rows(seen, asked, [], 3.0, 0.5, 0.01)}
    assert rows["p99 of what is answered"].met
    assert not rows["keys left unanswered"].met
    assert rows["answered a second"].ours == 2
    assert rows["no answer is wrong"].met


def test_a_reshard_moves_a_share_of_every_device() -> None:
    plan = plan_pb2.Plan(epoch=2)
    for bucket in range(40):
        owners = [plan_pb2.Owner(node=bucket % 2, device=bucket // 2 % 2)]
        plan.assignments.add(table_id=0, bucket_begin=bucket, bucket_count=1, owners=owners)
    target = reshard.make_target(plan, np.random.default_rng(1))
    moved = sum(each.bucket_count for each in target.assignments)
    assert (target.base_epoch, moved) == (2, 16)


def test_a_fleet_left_alone_is_flat_or_not(tmp_path: Path) -> None:
    def samples(leak: float) -> list[dict[str, float]]:
        flat = ("redis bus", "redis state", "drive ssd", "drive publication", "drive state")
        return [
            dict.fromkeys(flat, 1.0)
            | {"at_s": 5.0 * at, "rss node-0": 100 + leak * at, "p99": 3.0, "p50": 1.0}
            | {"descriptors node-0": 9.0, "threads node-0": 4.0}
            | {"requests": 10, "answers": 100, "failed": 0, "version": at}
            for at in range(30)
        ]

    for leak, met in ((0.0, True), (2.0, False)):
        rows = {row.metric: row for row in soak._rows(samples(leak))}
        assert rows["growth of rss node-0"].met is met
    soak._draw(samples(0.0), tmp_path / "soak.json")
    assert (tmp_path / "soak.rss.svg").stat().st_size


def test_crashes_and_memory_of_fuzzed_listeners_are_claims() -> None:
    tried = [fuzz.Tried(name="a", executions=60, peak_mib=100), fuzz.Tried(name="b", crashes=1)]
    rows = list(fuzz._rows(tried, 50))
    assert [row.met for row in rows] == [True, False, True] * 2
    kept: Iterator[bool] = (row.met for row in fuzz._rows(tried[:1], 50))
    assert all(kept)


def test_requests_of_remote_lookups_have_keys_alone() -> None:
    made: Any = keys.requests(keys.small_shape(), batch=2, count=3, dense=False)
    assert len(made["data"]) == 6
    assert set(made["data"][0]) == {"KEYS"}
    assert set(remote._SAID) == {"local", "counted", "none", "copies", "tls"}
    assert collections.Counter(remote._CLAIMS.values()) == {"23.5": 2, "21.2": 1}
