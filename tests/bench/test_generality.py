"""Sets of many kinds: what they hold, how they are written, the peer, what a row says."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from bench.generality import machine, ours, sets
from bench.generality.cases import Case, rows_of
from bench.servers import BenchError
from embertide.trainer.data.columns import count_rows, facts, read_sample, sniff
from embertide.trainer.data.guess import guess
from embertide.trainer.eval.metrics import auc

SHARE = 0.01


@pytest.mark.parametrize("dataset", sets.SETS, ids=lambda each: each.name)
def test_init_takes_each_column_for_what_it_is(dataset: sets.Dataset, tmp_path: Path) -> None:
    # Fewer rows have more texts of their own than items in lists.
    made = dataset.made(share=0.3 if dataset.name == "jobs" else SHARE)
    assert 0 < made.label_N.mean() < 1
    path = tmp_path / f"{dataset.name}.{dataset.format}"
    sets.write(made, path)
    files = sniff([str(path)], "parquet" if dataset.format == "parquet" else "csv")
    found = guess(facts(read_sample(files), count_rows(files)))
    columns = [
        {"column": each.facts.name, "role": each.role, "distinct": each.facts.distinct}
        for each in found.choices
    ]
    assert ours.misread(columns, made) == []
    assert (found.named("time") is None) == (made.ts_ms_N is None)
    assert found.named("label") is not None


def test_a_set_is_the_same_each_time_and_filed_as_people_do(tmp_path: Path) -> None:
    ratings = next(each for each in sets.SETS if each.name == "ratings")
    one, two = ratings.made(share=SHARE), ratings.made(share=SHARE)
    assert np.array_equal(one.columns["timestamp"], two.columns["timestamp"])
    sets.write(one, tmp_path / "r.parquet")
    filed = pq.read_table(tmp_path / "r.parquet")
    assert not np.all(np.diff(filed["timestamp"].to_numpy()) >= 0)
    assert np.all(np.diff(one.columns["timestamp"]) >= 0)
    ads = next(each for each in sets.SETS if each.name == "ads")
    sets.write(ads.made(share=SHARE), tmp_path / "a.tsv")
    options = pyarrow.csv.ParseOptions(delimiter="\t")
    assert pyarrow.csv.read_csv(tmp_path / "a.tsv", parse_options=options)["I4"].null_count > 0


def planted(rows: int = 4000) -> sets.Made:
    """Return rows whose label is the parity of two keys: a product of factors, no first order."""
    rng = np.random.default_rng(5)
    a_N, b_N = rng.integers(0, 10, (2, rows))
    amount_N = rng.normal(0, 1, rows)
    amount_N[::7] = np.nan
    return sets.Made(
        columns={"a": a_N, "b": b_N, "x": amount_N, "l": [[1, 2], []] * (rows // 2)},
        label_N=((a_N + b_N) % 2).astype(np.int64),
        keys=("a", "b"),
        numbers=("x",),
        lists=("l",),
    )


def test_the_peer_learns_a_product_and_tuning_keeps_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = planted()
    slots = machine.slots_of(made, "bins of 16")
    assert slots.index_NS.max() == slots.weights - 1
    assert slots.value_NS[0, -2:].tolist() == [0.5, 0.5]
    assert slots.value_NS[1, -2:].tolist() == [0, 0]
    settings = machine.Settings(rate=0.3, scale=0.1)
    score_N = machine.scores(slots, made.label_N, settings, seed=1)
    assert auc(made.label_N[3000:], score_N[3000:]) > 0.95
    monkeypatch.setattr(machine, "STEPS", (("rate", (1e-6, 0.3)), ("dim", (1,))))
    tuned = machine.tune(made, 3000, (1,), machine.Settings())
    assert len(tuned.tried) == 4
    settings_of, figures = zip(*tuned.tried, strict=True)
    assert tuned.auc[0] == max(figures)
    assert dataclasses.asdict(tuned.settings) == settings_of[figures.index(max(figures))]
    assert min(figures) < 0.9


def test_a_score_does_not_know_its_own_label() -> None:
    made = planted(512)
    slots, settings = machine.slots_of(made, "ranks"), machine.Settings(batch=64)
    before = machine.scores(slots, made.label_N, settings, seed=1)
    other_N = made.label_N.copy()
    other_N[256:320] = 1 - other_N[256:320]
    after = machine.scores(slots, other_N, settings, seed=1)
    assert np.array_equal(before[:320], after[:320])
    assert not np.array_equal(before[320:], after[320:])


def test_the_machine_of_blocks_scores_all_of_a_block_before_it_learns_any() -> None:
    made = planted(300)
    slots = machine.slots_of(made, "bins of 16")
    settings = dataclasses.replace(machine.BLOCKS, batch=16)
    before = machine.scores(slots, made.label_N, settings, seed=1)
    assert len(before) == 300
    other_N = made.label_N.copy()
    other_N[:128] = 1 - other_N[:128]
    after = machine.scores(slots, other_N, settings, seed=1)
    assert (before[:128] == after[:128]).all()
    assert (before[128:256] != after[128:256]).any()


def test_a_row_is_met_within_a_hundredth_of_the_peer() -> None:
    case = Case(name="bank", path=Path("bank.csv"), share=1.0, known="bank")
    peer: dict[str, Any] = {"auc": [0.80, 0.82], "labels": "same"}
    worse: dict[str, Any] = {"auc": [0.70, 0.72], "labels": "same"}
    found = [worse, peer, *({"auc": each, "labels": "same"} for each in (0.80, 0.804))]
    both, less = rows_of(case, found)
    assert (both.ours, both.peer) == (0.802, 0.81)
    assert (less.ours, less.spread, less.claim) == (-0.008, 0.002, "H.1")
    assert less.met
    found[2]["auc"] = 0.79
    assert not rows_of(case, found)[1].met
    found[2]["labels"] = "others"
    with pytest.raises(BenchError, match="same events"):
        rows_of(case, found)
    assert not case.held_out
    assert dataclasses.replace(case, known=None).held_out
