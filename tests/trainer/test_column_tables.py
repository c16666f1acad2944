"""Column-wise tables: what is learned is bit for bit what whole tables learn."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from columnjobs import OPTIMIZERS, PRUNED, chunky, named, plan_file, train
from killing import unserved
from rankpool import RankFailedError, RankPool, rank_pool
from snapshots import newest_files

from embertide import _store
from embertide.trainer.config import Codecs
from embertide.trainer.embedding.records import chunks_of, encode_rows, records_of
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.sync import plan

BOTH = ((0, 0, 1, 1), (1, 0, 0, 0))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as made:
        yield made


# --- the plan -------------------------------------------------------------------------------------


def test_a_plan_with_columns_is_read_as_it_is_written(tmp_path: Path) -> None:
    model = chunky()
    said = {"item": {"columns": [1, 1, 0, 0]}, "user": [0, 1, 1, 0]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": plan.FORMAT, "ranks": 2, "tables": said}))
    read = plan.read(path, model, 2)
    assert json.loads(plan.text(model, read))["tables"] == said
    assert [tuple(each) for each in read.columns(0)] == [(1, 0, 2), (0, 2, 2)]
    assert read.columns(1) == []
    assert set(read.owners_T[0].tolist()) == {0, 1}, "each bucket has a rank that writes it"
    again = plan.parsed(plan.text(model, read), model, 2)
    assert again is not None
    assert again.ranks_TC == read.ranks_TC
    assert read.with_more([2]).columns(2) == []


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ([0, 1], r"its rows have 4 chunks: give {\"columns\": \[...\]} with 4 ranks below 2"),
        ([0, 0, 1, 1, 1], "its rows have 4 chunks"),
        ([0, 0, 1, 2], "its rows have 4 chunks.* 4 ranks below 2"),
        ([0, 0, True, 1], "its rows have 4 chunks"),
        ([1, 1, 1, 1], "has all of its 4 chunks at rank 1: write 1 for a table"),
        ([0, 1, 1, 0], "a rank comes again after others"),
        ("all", "its rows have 4 chunks"),
    ],
)
def test_a_plan_for_other_chunks_is_refused(tmp_path: Path, columns: Any, why: str) -> None:
    said = {"item": {"columns": columns}, "user": 0}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": plan.FORMAT, "ranks": 2, "tables": said}))
    with pytest.raises(ConfigurationError, match=why):
        plan.read(path, chunky(), 2)
    with pytest.raises(ConfigurationError, match="of which a profile says nothing"):
        plan.read_for(path, {"item": 4, "user": 4}, 2)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"codecs": Codecs(gradients="int8")}, "int8 keeps what a whole row's gradient lost"),
        ({"hot_rows": 50}, "hot_rows may give its rows other ranks"),
        ({"dtype": "int8"}, "rows of int8 have one scale for all of their chunks"),
    ],
)
def test_what_cannot_be_column_wise_is_refused(
    pool: RankPool, changed: dict[str, Any], why: str
) -> None:
    with pytest.raises(RankFailedError, match=f"table 'item' is column-wise.*{why}"):
        pool.run(2, named, BOTH, changed)


# --- nothing depends on it ------------------------------------------------------------------------


def same(found: list[Any], want: list[Any]) -> None:
    for (scores, _, _), (expected, _, _) in zip(found, want, strict=True):
        np.testing.assert_array_equal(np.concatenate(scores), np.concatenate(expected))
    rows = [{at: of for _, each, _ in ranks for at, of in each.items()} for ranks in (found, want)]
    assert rows[0].keys() == rows[1].keys()
    for at, of in rows[1].items():
        assert rows[0][at] == of, f"rows, changes or state of (table, bucket) {at}"


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize(
    ("ranks", "optimizer", "columns"),
    [
        (2, "rowwise_adagrad", BOTH),
        (3, "rowwise_adam", ((0, 1, 1, 2), ())),
        (4, "adagrad", ((3, 2, 1, 0), (2, 2, 3, 3))),
        (2, "sgd", ((), (0, 1, 1, 1))),
    ],
)
def test_steps_with_columns_are_bit_for_bit_those_of_whole_rows(
    pool: RankPool, ranks: int, optimizer: str, columns: Any, pruned: bool
) -> None:
    changed = {"optimizer": OPTIMIZERS[optimizer], "prune": PRUNED if pruned else None}
    want = pool.run(ranks, named, (), changed)
    found = pool.run(ranks, named, columns, changed)
    same(found, want)
    figures = [each[2] for each in found]
    assert sum(each["home"] for each in figures) > 0
    assert sum(each["new"] for each in figures) > 0
    assert figures[0]["pruning"] == want[0][2]["pruning"]
    if pruned:
        assert figures[0]["pruning"]["passes"] > 2
        assert sum(each["out"] for each in figures) > 0


def test_clipped_and_refused_rows_are_those_of_whole_rows(pool: RankPool) -> None:
    optimizer = dataclasses.replace(OPTIMIZERS["rowwise_adagrad"], max_gradient_norm=0.01)
    want = pool.run(2, named, (), {"optimizer": optimizer})
    found = pool.run(2, named, BOTH, {"optimizer": optimizer})
    same(found, want)
    assert sum(each[2]["clipped_gradients"] for each in want) > 0
    assert sum(each[2]["clipped_gradients"] for each in found) > 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_of_other_dtypes_are_the_same_too(pool: RankPool, dtype: str) -> None:
    want = pool.run(2, named, (), {"dtype": dtype})
    same(pool.run(2, named, BOTH, {"dtype": dtype}), want)


def test_rounded_messages_stay_near(pool: RankPool) -> None:
    codecs = Codecs(rows="fp16", gradients="fp16")
    want = pool.run(2, named, (), {"codecs": codecs})
    found = pool.run(2, named, BOTH, {"codecs": codecs})
    for (scores, _, _), (expected, _, _) in zip(found, want, strict=True):
        np.testing.assert_allclose(np.concatenate(scores), np.concatenate(expected), atol=2e-2)


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_learn_the_same(pool: RankPool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 5))
    columns = []
    for _ in range(2):
        parts = int(rng.integers(2, min(ranks, 4) + 1))
        cuts = np.sort(rng.choice(np.arange(1, 4), parts - 1, replace=False))
        sizes = np.diff(np.concatenate([[0], cuts, [4]]))
        columns.append(tuple(np.repeat(rng.permutation(ranks)[:parts], sizes).tolist()))
    changed = {
        "optimizer": OPTIMIZERS[str(rng.choice(list(OPTIMIZERS)))],
        "prune": PRUNED if rng.random() < 0.5 else None,
        "versions": int(rng.integers(1, 6)),
    }
    want = pool.run(ranks, named, (), changed)
    same(pool.run(ranks, named, tuple(columns), changed), want)


COLUMNS = {"user": [0, 0, 1, 1], "cand": [1, 2, 2, 0]}


@pytest.mark.parametrize("name", [pytest.param("news", marks=pytest.mark.long), "pruned"])
def test_a_run_with_columns_publishes_the_bytes_of_one_without(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    folders = [unserved(tmp_path / each).path for each in ("without", "with", "killed")]
    plans = [
        str(plan_file(tmp_path / each, name, 3, columns))
        for each, columns in (("without", {}), ("with", COLUMNS))
    ]
    want = pool.run(3, train, name, str(folders[0]), plans[0])
    found = pool.run(3, train, name, str(folders[1]), plans[1])
    assert found[0]["scores"] == want[0]["scores"]
    assert newest_files(Publication(folders[1])) == newest_files(Publication(folders[0]))
    assert found[0]["columns"]["home"] > 100
    first, *_, last = pool.results(3, train, name, str(folders[2]), plans[1], 16, timeout_s=20)
    assert last is None
    assert isinstance(first, RankFailedError)
    again = pool.run(3, train, name, str(folders[2]), plans[1])
    assert again[0]["scores"] == want[0]["scores"]
    assert newest_files(Publication(folders[2])) == newest_files(Publication(folders[0]))


@pytest.mark.parametrize("name", [pytest.param("news", marks=pytest.mark.long), "pruned"])
def test_a_killed_run_goes_on_at_another_count_with_other_columns(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    folders = [unserved(tmp_path / each).path for each in ("without", "with", "to columns")]
    before = [{}, COLUMNS, {}]
    after = [{}, {}, {"user": [1, 0, 0, 0], "cand": [0, 0, 1, 1]}]
    scores = []
    for folder, columns, later in zip(folders, before, after, strict=True):
        plans = [
            str(plan_file(folder, name, ranks, each)) for ranks, each in ((3, columns), (2, later))
        ]
        pool.results(3, train, name, str(folder), plans[0], 12, timeout_s=20)
        scores.append(pool.run(2, train, name, str(folder), plans[1])[0]["scores"])
    for folder, found in zip(folders[1:], scores[1:], strict=True):
        assert found == scores[0]
        assert newest_files(Publication(folder)) == newest_files(Publication(folders[0]))


# --- the store ------------------------------------------------------------------------------------


def made(optimizer: Any, chunks: int) -> _store.TrainingStore:
    layout = _store.RowLayout(chunks=chunks, chunk_dim=4, dtype="fp32")
    table = _store.TableConfig(name="t", id=0, layout=layout, bucket_bits=0)
    return _store.TrainingStore(tables=[table], optimizer=optimizer)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_parts_take_the_step_of_whole_rows(optimizer: str) -> None:
    rng = np.random.default_rng(5)
    keys = np.arange(30)
    whole, parts = made(optimizer, 3), [(made(optimizer, 1), 0), (made(optimizer, 2), 1)]
    values = rng.standard_normal((30, 12)).astype(np.float32)
    layouts = [_store.RowLayout(chunks=n, chunk_dim=4, dtype="fp32") for n in (1, 2, 3)]
    whole.import_records(0, 0, encode_rows(layouts[2], keys.astype(np.uint64), values).tobytes())
    cut = [values[:, :4], values[:, 4:]]
    for (store, _), layout, of in zip(parts, layouts, cut, strict=False):
        records = encode_rows(layout, keys.astype(np.uint64), np.ascontiguousarray(of))
        store.import_records(0, 0, records.tobytes())
    step: dict[str, Any] = {"learning_rate": 0.1, "epsilon": 1e-4, "max_gradient_norm": 3.0}
    for _ in range(6):
        came = rng.integers(0, 30, 50)
        gradients = rng.standard_normal((50, 12)).astype(np.float32)
        whole.apply_gradients([(0, came, None, gradients)], **step)
        cut = [gradients[:, :4], gradients[:, 4:]]
        squares = []
        for layout, of in zip(layouts, cut, strict=False):
            place_N, squares_Uc = _store.squares_of_keys(layout, came, np.ascontiguousarray(of))
            squares.append(squares_Uc)
        behind = np.ascontiguousarray(np.concatenate(squares, axis=1)[place_N]).view(np.float32)
        for (store, first), of in zip(parts, cut, strict=True):
            wide = np.concatenate([of, behind], axis=1)
            store.apply_gradients([(0, came, None, wide)], parts={0: (first, 3)}, **step)
    _, live, payload = chunks_of(layouts[2], whole.export_bucket(0, 0))
    assert (live == 0b111).all()
    its = [
        chunks_of(layout, store.export_bucket(0, 0))[2]
        for (store, _), layout in zip(parts, layouts, strict=False)
    ]
    assert np.concatenate(its, axis=1).tobytes() == payload.tobytes()
    want = whole.bucket_state(0, 0)
    states = [store.bucket_state(0, 0) for store, _ in parts]
    for state in states:
        for n in (0, 1, 3):  # accumulators, ages, steps
            assert state[n].tobytes() == want[n].tobytes()
    for n in (2, 4):  # utilities, elements
        joined = np.concatenate([state[n] for state in states], axis=1)
        assert joined.tobytes() == want[n].tobytes()
    assert whole.stats()["clipped_gradients"] > 0


def test_a_part_makes_no_row_and_says_so() -> None:
    store = made("sgd", 1)
    wide = np.zeros((2, 4 + 6), np.float32)
    step: dict[str, Any] = {"learning_rate": 0.1, "parts": {0: (1, 3)}}
    assert store.apply_gradients([(0, np.array([5, 6]), None, wide)], **step) == 0
    assert store.stats()["dropped_gradients"] == 2
    assert store.stats()["rows"] == 0
    with pytest.raises(_store.StoreError, match="have their squares behind them"):
        store.apply_gradients([(0, np.array([5, 6]), None, wide[:, :8])], **step)
    step["parts"] = {0: (3, 3)}
    with pytest.raises(_store.StoreError, match="a part from chunk 3 on of rows of 3 chunks"):
        store.apply_gradients([(0, np.array([5, 6]), None, wide)], **step)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("seed", range(4))
def test_records_are_cut_into_chunks_and_put_together(dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = _store.RowLayout(chunks=5, chunk_dim=4, dtype=dtype)
    table = _store.TableConfig(name="t", id=0, layout=layout)
    store = _store.TrainingStore(tables=[table])
    keys = rng.permutation(200)
    if seed:
        store.ensure_rows(0, keys)
        for key in keys[: 50 * (seed - 1)].tolist():
            store.set_live(0, key, int(rng.integers(0, 32)))
    records = store.export_bucket(0, 0)
    key_N, live_N, payload_NCb = chunks_of(layout, records)
    assert key_N.tolist() == _store.record_keys(layout, records).tolist()
    assert records_of(layout, key_N, live_N, payload_NCb) == records
    assert len(key_N) == store.stats()["rows"]
