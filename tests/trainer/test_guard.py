"""The guard: poison is withdrawn, good versions are promoted, and it may be killed anywhere."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import CONFIG, KEYS, TABLES
from graded import (
    EVERY_MS,
    POISONS,
    GradedPublisher,
    Poison,
    changes,
    events,
    learned,
    true_rates,
)
from killing import CACHE, unserved
from numpy.typing import NDArray

from embertide import _store
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.data.base import Batch
from embertide.trainer.eval.guard.guard import Guard, GuardConfig, NewestEvents
from embertide.trainer.eval.guard.judge import Limits, Side, auc_difference, judge
from embertide.trainer.eval.metrics import auc
from embertide.trainer.eval.served import Answer, ServingError, VersionNotHeldError
from embertide.trainer.publish import promotion
from embertide.trainer.publish.publisher import promotion_record

Rates = NDArray[np.float64]


class Node:
    """A node in this process: it scores with the rows that the files have."""

    def __init__(self, site: GradedPublisher, bus: str | None = None) -> None:
        self._site = site
        self._record = promotion_record(site.publication, bus=bus, model=CONFIG.name)
        self._rates = {1: self._read(changes(site.rates))}
        self.away = False
        self.window = 8

    def _read(self, records: list[Any]) -> Rates:
        rates = np.zeros((len(TABLES), KEYS))
        for table, _, data in records:
            store = _store.ServingStore(
                tables=[_store.TableConfig(name="t", id=0, layout=table.layout)],
                ddr_budget_bytes=1 << 24,
            )
            store.stage_records(1, 0, 0, data)
            store.commit(1)
            keys = _store.record_keys(table.layout, data).astype(np.int64)
            rates[table.id][keys] = store.lookup(0, keys)[0][:, 0] * 1000
        return rates

    def _follow(self) -> None:
        for version in self._site.publication.deltas():
            if version.number not in self._rates:
                batches = self._site.publication.read_batches(version)
                records = [(TABLES[each.table_id], each.bucket, each.records) for each in batches]
                self._rates[version.number] = self._read(records)

    def score(self, batch: Batch, *, version: int | None = None) -> Answer:
        if self.away:
            raise ServingError("it is away")
        self._follow()
        promoted = self._record.read().promoted or 1
        served = max(number for number in self._rates if number <= promoted)
        at = served if version is None else version
        if at not in self._rates or at > served + self.window - 1:
            raise VersionNotHeldError(f"version {at} is not held")
        parts = [self._rates[at][t][batch.keys_BF[:, t]] for t in range(len(TABLES))]
        return Answer(
            score_B=np.maximum(*parts).astype(np.float32),
            version=at,
            watermark_ms=EVERY_MS * at,
            plan_epoch=1,
            node="node",
            failures=0,
            sent_ms=time.time_ns() // 1_000_000,
            latency_us=1000,
        )


class Site(GradedPublisher):
    """A publication, its node, and guards."""

    def __init__(self, folder: Path, bus: str | None = None) -> None:
        unserved(folder)
        super().__init__(folder, bus, CACHE)
        self.node = Node(self, bus)

    def guard(self, seed: int = 1, config: GuardConfig | None = None) -> Guard:
        record = promotion_record(self.publication, bus=self.bus, model=CONFIG.name)
        stream = NewestEvents(events(self.rates, seed))
        return Guard(self.publication, record, self.node, stream, config or GuardConfig())

    @property
    def promoted(self) -> int:
        return promotion_record(self.publication, bus=None, model=CONFIG.name).read().promoted


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "pub")


# --- judging --------------------------------------------------------------------------------------


def test_the_difference_of_two_aucs_has_the_right_error() -> None:
    """Over many samples, the differences spread as each sample says that they do."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(300):
        truth_B = rng.normal(0, 1, 800)
        label_B = (rng.random(800) < 1 / (1 + np.exp(-truth_B))).astype(np.float32)
        one_B, other_B = (truth_B + rng.normal(0, noise, 800) for noise in (0.5, 0.7))
        one, other, error = auc_difference(label_B, one_B, other_B)
        assert one == pytest.approx(auc(label_B, one_B))
        assert other == pytest.approx(auc(label_B, other_B))
        found.append((one - other, error))
    spread = np.std([difference for difference, _ in found])
    assert spread == pytest.approx(np.mean([error for _, error in found]), rel=0.15)


def side(score_B: NDArray[Any], version: int = 1, latency_us: int = 1000) -> Side:
    return Side(
        version=version,
        score_B=score_B.astype(np.float32),
        latency_us=np.full(16, latency_us, np.int64),
    )


def graded_scores(rates: Rates, batch: Batch) -> NDArray[np.float64]:
    return np.asarray(np.maximum(*(rates[t][batch.keys_BF[:, t]] for t in range(len(TABLES)))))


def test_good_versions_are_seldom_withdrawn_and_poison_always() -> None:
    rates, rng = true_rates(), np.random.default_rng(1)
    stream = events(rates, seed=2, batch_size=4000)
    flipped = learned(rates, seed=9, flipped=True)
    alarms, missed = 0, 0
    for _ in range(200):
        batch = next(stream)
        served = side(graded_scores(rates, batch))
        good = rates * np.exp(rng.normal(0, 0.05, rates.shape))
        verdict = judge(batch.label_B, side(graded_scores(good, batch)), served, Limits())
        alarms += verdict.reason is not None
        for bad in (rng.permuted(rates, axis=1), flipped):
            verdict = judge(batch.label_B, side(graded_scores(bad, batch)), served, Limits())
            missed += verdict.reason is None
    assert missed == 0
    assert alarms <= 2  # 1 %


@pytest.mark.parametrize(
    ("score", "latency_us", "reason"),
    [
        (lambda p: np.where(np.arange(len(p)) == 7, np.nan, p), 1000, "not_finite"),
        (lambda p: np.where(np.arange(len(p)) == 7, np.inf, p), 1000, "not_finite"),
        (lambda p: 1 - p, 1000, "auc"),
        (lambda p: p * 1.6, 1000, "calibration"),
        (lambda p: p * 0.6, 1000, "calibration"),
        (lambda p: p, 90_000, "latency"),
        (lambda p: p, 2000, None),
        (lambda p: p * 1.05, 1000, None),
    ],
)
def test_each_limit_has_its_reason(score: Any, latency_us: int, reason: str | None) -> None:
    batch = next(events(true_rates(), seed=4, batch_size=4000))
    truth_B = graded_scores(true_rates(), batch)
    verdict = judge(
        batch.label_B, side(score(truth_B), latency_us=latency_us), side(truth_B), Limits()
    )
    assert verdict.reason == reason


def test_anything_finite_is_better_than_a_served_version_that_is_not() -> None:
    batch = next(events(true_rates(), seed=4, batch_size=4000))
    truth_B = graded_scores(true_rates(), batch)
    broken = side(np.full(len(truth_B), np.nan))
    assert judge(batch.label_B, side(truth_B), broken, Limits()).reason is None


# --- deciding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", POISONS)
def test_poison_is_withdrawn_and_what_is_good_again_is_promoted(site: Site, poison: Poison) -> None:
    guard = site.guard()
    assert guard.step() is not None  # the first version
    assert site.promoted == 1
    bad = site.publish(poison)
    decision = guard.step()
    assert decision is not None
    assert decision.version == bad
    assert decision.verdict.reason == ("not_finite" if poison == "nan" else "auc")
    assert guard.step() is None  # it is decided
    assert site.promoted == 1
    good = site.publish()
    assert guard.step() is not None
    assert site.promoted == good
    assert sum(guard.stats.withdrawn.values()) == 1


def test_a_row_that_is_not_finite_counts_until_it_is_overwritten(site: Site) -> None:
    """Nobody asks for the row, and a later version that leaves it alone has it too."""
    guard = site.guard()
    guard.step()
    site.publish("nan")
    newest = site.publisher.newest
    assert newest is not None
    unrelated = [change for change in changes(site.rates) if change[0].id == 1]
    site.publisher.publish(newest.number + 1, watermark_ms=9, changes=unrelated, dense=b"")
    decision = guard.step()
    assert decision is not None
    assert decision.verdict.reason == "not_finite"


def test_the_newest_version_that_the_node_holds_is_judged(site: Site) -> None:
    guard = site.guard()
    guard.step()
    site.node.window = 4
    for _ in range(6):
        site.publish()
    decision = guard.step()
    assert decision is not None
    assert decision.version == 4
    decision = guard.step()
    assert decision is not None
    assert decision.version == 7


def test_too_few_labelled_events_decide_nothing(site: Site) -> None:
    record = promotion_record(site.publication, bus=None, model=CONFIG.name)
    few = (batch for _, batch in zip(range(3), events(site.rates, 1), strict=False))
    guard = Guard(site.publication, record, site.node, NewestEvents(few), GuardConfig())
    assert guard.step() is None
    assert (site.promoted, guard.stats.short_of_events) == (0, 1)


def test_events_that_a_version_may_have_learned_from_do_not_judge_it() -> None:
    stream = NewestEvents(events(true_rates(), 1, batch_size=100))
    batches = stream.after(250, 300)
    assert int(batches[0].ts_ms_B[0]) > 250
    assert sum(map(len, batches)) >= 300
    assert int(stream.after(1000, 100)[0].ts_ms_B[0]) > 1000


def test_a_node_that_is_away_leaves_versions_undecided(site: Site) -> None:
    guard = site.guard()
    site.node.away = True
    assert guard.step() is None
    assert guard.stats.unreachable == 1
    site.node.away = False
    assert guard.step() is not None


# --- two guards, and killed ones ------------------------------------------------------------------


def test_of_two_guards_one_decides(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = site.guard(1), site.guard(2)
    first.step()
    site.publish()
    judged = second._judge

    def overtaken(*arguments: Any) -> Any:
        verdict = judged(*arguments)
        assert first.step() is not None  # while the second one thinks
        return verdict

    monkeypatch.setattr(second, "_judge", overtaken)
    assert second.step() is None
    assert (site.promoted, second.stats.stale, second.stats.promoted) == (2, 1, 0)
    assert second.step() is None


class KilledError(Exception):
    pass


@pytest.mark.parametrize("state", ["write_synced", "sync_folder"])
def test_a_guard_killed_while_it_writes_leaves_the_old_or_the_new_record(
    site: Site, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    guard = site.guard()
    guard.step()
    bad = site.publish("shuffled")

    def kill(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(promotion, state, kill)
        with pytest.raises(KilledError):
            guard.step()
    record = promotion_record(site.publication, bus=None, model=CONFIG.name).read()
    assert record.promoted == 1
    assert record.is_withdrawn(bad) == (state == "sync_folder")
    site.guard().step()
    good = site.publish()
    decision = site.guard().step()
    assert decision is not None
    assert (site.promoted, decision.version) == (good, good)


def test_a_guard_killed_before_the_bus_heard_is_made_good_by_the_next(tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    with RedisServer(RedisOptions(log=log)) as server:
        site = Site(tmp_path / "pub", server.url)
        # Killed between file and bus: the file alone has it.
        promotion_record(site.publication, bus=None, model=CONFIG.name).promote(
            1, by="guard", revision=0
        )
        record = promotion_record(site.publication, bus=server.url, model=CONFIG.name)
        record.mirror()
        (site.publication.path / "promoted.json").unlink()
        assert record.read().promoted == 1
