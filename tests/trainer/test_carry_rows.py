"""Rows go over to a table of another form with their keys, their values and what training knows.

Shapes: N rows, D values of a row.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.data.keys import initial_values
from embertide.trainer.embedding.carry import Part, RowCarrier
from embertide.trainer.errors import TrainerError

ROWS, DIM = 300, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A table's form, in short."""

    dim: int = DIM
    chunks: int = 2
    dtype: str = "fp32"
    bits: int = 1
    counters: int = 0

    def table(self) -> _store.TableConfig:
        layout = _store.RowLayout(
            dtype=self.dtype,
            chunks=self.chunks + self.counters,
            chunk_dim=self.dim // self.chunks,
        )
        return _store.TableConfig(
            name="item",
            id=3,
            layout=layout,
            bucket_bits=self.bits,
            init_seed=5,
            init_scale=0.05,
            counter_chunks=self.counters,
        )


def trained(form: Form, optimizer: str = "adagrad") -> _store.TrainingStore:
    """A store of rows that have learned, some with a dead chunk."""
    store = _store.TrainingStore(
        tables=[form.table()], optimizer=optimizer, ddr_budget_bytes=64 << 20
    )
    keys_N = np.arange(1, ROWS + 1, dtype=np.int64) * 7919
    store.ensure_rows(0, keys_N)
    generator = np.random.default_rng(4)
    for _ in range(3):
        gradients_ND = generator.normal(size=(ROWS, form.dim)).astype(np.float32)
        store.apply_gradients([(0, keys_N, None, gradients_ND)], learning_rate=0.1)
    if form.counters:
        counts = np.ones((ROWS, form.counters * form.dim // form.chunks), np.float32)
        store.add_counts(0, keys_N, counts)
    for key in keys_N[:40].tolist():
        store.set_live(0, key, 0b01 | (0b100 if form.counters else 0))
    return store


def carried(
    source: _store.TrainingStore, old: Form, new: Form, *, optimizer: str = "adagrad", **more: bool
) -> _store.TrainingStore:
    """The rows of a store in one of another form."""
    carrier = RowCarrier(old.table(), new.table(), **{"state": True, "counters": True, **more})
    store = _store.TrainingStore(
        tables=[new.table()], optimizer=optimizer, ddr_budget_bytes=64 << 20
    )
    for olds, news in carrier.groups():
        parts = [Part(source.export_bucket(0, b), source.bucket_state(0, b)) for b in olds]
        for bucket, part in carrier.carry(parts, news):
            store.import_records(0, bucket, part.records)
            if part.state is not None:
                store.set_bucket_state(0, bucket, part.state)
    return store


def rows_of(store: _store.TrainingStore, form: Form) -> dict[int, tuple[int, NDArray[np.float32]]]:
    """Mask and values of every row, by key."""
    rows: dict[int, tuple[int, NDArray[np.float32]]] = {}
    for bucket in range(1 << form.bits):
        records = store.export_bucket(0, bucket)
        keys_N, live_N, _, values_ND = _store.decode_records(form.table().layout, records)
        rows |= {
            key: (live, values)
            for key, live, values in zip(keys_N.tolist(), live_N.tolist(), values_ND, strict=True)
        }
    return rows


def states_of(store: _store.TrainingStore, form: Form) -> dict[int, list[Any]]:
    """Return training's state of every row, by key."""
    states: dict[int, list[Any]] = {}
    for bucket in range(1 << form.bits):
        keys = _store.record_keys(form.table().layout, store.export_bucket(0, bucket)).tolist()
        for key, *state in zip(keys, *store.bucket_state(0, bucket), strict=True):
            states[key] = state
    return states


def test_equal_forms_give_equal_bytes() -> None:
    form = Form()
    source = trained(form)
    target = carried(source, form, form)
    for bucket in range(2):
        assert target.export_bucket(0, bucket) == source.export_bucket(0, bucket)
        for mine, theirs in zip(
            target.bucket_state(0, bucket), source.bucket_state(0, bucket), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("bits", [0, 3])
def test_other_buckets_hold_the_same_rows(bits: int) -> None:
    form, new = Form(), Form(bits=bits)
    source = trained(form)
    target = carried(source, form, new)
    target.check_integrity()
    before, after = rows_of(source, form), rows_of(target, new)
    assert before.keys() == after.keys()
    assert len(after) == ROWS
    for key, (live, values) in before.items():
        assert after[key][0] == live
        np.testing.assert_array_equal(after[key][1], values)
    states = states_of(target, new)
    for key, state in states_of(source, form).items():
        for mine, theirs in zip(states[key], state, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_wider_row_begins_its_new_values_as_a_new_row_does() -> None:
    form, new = Form(), Form(dim=3 * DIM // 2, chunks=3)  # chunks of the same width
    source = trained(form)
    target = carried(source, form, new)
    before, after = rows_of(source, form), rows_of(target, new)
    for key, (live, values) in before.items():
        mask, wide = after[key]
        assert mask == live | 0b100
        np.testing.assert_array_equal(wide[:DIM], values)
        expected = [_store.initial_value(5, 3, key, d, 0.05) for d in range(DIM, 3 * DIM // 2)]
        np.testing.assert_array_equal(wide[DIM:], np.array(expected, np.float32))
    elements = states_of(target, new)[7919][4]
    np.testing.assert_array_equal(elements[:DIM], states_of(source, form)[7919][4])
    assert not elements[DIM:].any()


def test_a_narrower_row_keeps_its_first_values() -> None:
    form, new = Form(), Form(dim=DIM // 2, chunks=1)
    source = trained(form)
    after = rows_of(carried(source, form, new), new)
    for key, (_, values) in rows_of(source, form).items():
        np.testing.assert_array_equal(after[key][1], values[: DIM // 2])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_another_dtype_rounds_values_once(dtype: str) -> None:
    form, new = Form(), Form(dtype=dtype)
    source = trained(form)
    after = rows_of(carried(source, form, new), new)
    tolerance = {"fp16": 2**-10, "bf16": 2**-7, "int8": 1 / 127}[dtype]
    for key, (live, values) in rows_of(source, form).items():
        assert after[key][0] == live
        scale = np.abs(values).max() if dtype == "int8" else np.abs(values)
        assert (np.abs(after[key][1] - values) <= tolerance * scale).all()


def test_a_value_that_does_not_fit_is_named() -> None:
    form, new = Form(bits=0), Form(bits=0, dtype="fp16")
    store = _store.TrainingStore(tables=[form.table()], ddr_budget_bytes=16 << 20)
    store.ensure_rows(0, np.array([5], np.int64))
    big = np.full((1, DIM), 1e9, np.float32)
    store.apply_gradients([(0, np.array([5], np.int64), None, big)], learning_rate=1e6)
    with pytest.raises(TrainerError, match=r"table 'item'.*key 5.*bf16"):
        carried(store, form, new, optimizer="rowwise_adagrad")


def test_counts_go_along_where_they_mean_the_same() -> None:
    form = Form(counters=1)
    source = trained(form)
    left = rows_of(carried(source, form, form, counters=False), form)
    for key, (live, values) in rows_of(source, form).items():
        mask, without = left[key]
        assert mask == live & 0b11
        np.testing.assert_array_equal(without[:DIM], values[:DIM])
        assert not without[DIM:].any()
    wide = Form(dim=3 * DIM // 2, chunks=3, counters=1)
    after = rows_of(carried(source, form, wide), wide)
    for key, (live, values) in rows_of(source, form).items():
        assert after[key][0] == (live & 0b11) | 0b100 | (live >> 2) << 3
        np.testing.assert_array_equal(after[key][1][3 * DIM // 2 :], values[DIM:])


def test_another_optimizer_begins_with_nothing_known() -> None:
    form = Form()
    target = carried(trained(form), form, form, optimizer="sgd", state=False)
    assert len(rows_of(target, form)) == ROWS


def test_initial_values_are_those_of_the_store() -> None:
    keys_N = np.array([0, 1, -5], np.int64)
    values_ND = initial_values(Form().table(), keys_N.view(np.uint64), range(4))
    for n, key in enumerate(keys_N.tolist()):
        for d in range(4):
            assert values_ND[n, d] == np.float32(_store.initial_value(5, 3, key, d, 0.05))
