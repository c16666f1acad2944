"""Bins of amounts: the client makes those that the trainer learned from, whatever the amount."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from embertide.client import Bins, Feature, InputError, Schema
from embertide.client.requests import cut, read
from embertide.trainer.data import open_events
from embertide.trainer.data.base import MISSING_KEY, EventSchema, FeatureColumn

EDGES = (0.1, 1.5, 20.0)
USER = Feature(name="user", dim=2)
BINNED = Feature(name="price_bin", dim=2, bins=Bins(dense=1, edges=EDGES))


def schema(*, ranking: bool = True, named: bool = True, edges: tuple[float, ...] = EDGES) -> Schema:
    return Schema(
        model="m",
        ranking=ranking,
        features=(USER, Feature(name="price_bin", dim=2, bins=Bins(dense=1, edges=edges))),
        dense=("age", "price") if named else None,
        dense_columns=2,
        max_batch=1 << 15,
        max_samples=1 << 15,
    )


CALL: dict[str, Any] = {"user": [7, 8, 9], "age": [1, 2, 3], "price": [0.05, 1.5, None]}
MADE = [[7, 0], [8, 2], [9, MISSING_KEY]]


def sent(features: Any, *, of: Schema | None = None, **more: Any) -> list[list[int]]:
    (request,) = cut(read(of or schema(), features, **more))
    keys: list[list[int]] = request.arrays["KEYS"].tolist()
    return keys


def learned(path: Path, edges: tuple[float, ...], price: Any) -> NDArray[np.int64]:
    """The bins that the trainer reads of a file of prices."""
    pq.write_table(pa.table({"p": price, "y": np.zeros(len(price), np.int64)}), path)
    feature = FeatureColumn(name="price_bin", column="p", transform="bin", edges=edges)
    source = open_events(
        str(path), schema=EventSchema(features=(feature,), label="y", dense=("p",))
    )
    return np.concatenate([batch.keys_BF[:, 0] for batch in source.batches(batch_size=4096)])


def doubtful(edges: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Amounts anywhere, and at the edges: themselves, and beside them in 32 and in 64 bits."""
    anywhere = rng.normal(0, 30, 5000)
    narrow = edges.astype(np.float32)
    beside = [np.nextafter(edges, way) for way in (-np.inf, np.inf)]
    beside += [np.nextafter(narrow, np.float32(way)).astype(np.float64) for way in (-1e9, 1e9)]
    none = [np.nan, 0.0, -0.0, 3e38, -3e38]
    return np.concatenate([anywhere, edges, narrow.astype(np.float64), *beside, none])


@pytest.mark.parametrize("seed", range(5))
def test_a_bin_is_the_one_that_the_trainer_learned(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = np.unique(rng.normal(0, 30, 40) if seed else np.arange(1, 40) / 10)
    price = doubtful(edges, rng)
    learned_N = learned(tmp_path / "p.parquet", tuple(edges.tolist()), price)
    of = schema(edges=tuple(edges.tolist()))
    columns = {"user": np.zeros(len(price), np.int64), "age": np.zeros(len(price)), "price": price}
    assert [bin for _, bin in sent(columns, of=of)] == learned_N.tolist()
    dense = np.column_stack([columns["age"], price])
    assert sent({"user": columns["user"]}, of=of, dense=dense) == sent(columns, of=of)
    # It matters in how many bits one compares.
    wide_N = np.searchsorted(edges, price, side="right")
    assert (wide_N != np.where(learned_N == MISSING_KEY, wide_N, learned_N)).any()


def test_integers_are_amounts_too(tmp_path: Path) -> None:
    price = np.array([0, 1, 2, 19, 20, 21, 2**53 + 1, 2**62])
    learned_N = learned(tmp_path / "p.parquet", EDGES, price)
    columns = {"user": price, "age": price, "price": price}
    assert [bin for _, bin in sent(columns)] == learned_N.tolist()


@pytest.mark.parametrize("kind", ["mapping", "arrow", "pandas"])
def test_a_call_has_the_amount_alone(kind: str) -> None:
    given: Any = CALL
    if kind != "mapping":
        given = pa.table(CALL) if kind == "arrow" else pd.DataFrame(CALL)
    (request,) = cut(read(schema(), given))
    assert request.arrays["KEYS"].tolist() == MADE
    assert request.arrays["DENSE"][:2].tolist() == [[1, np.float32(0.05)], [2, 1.5]]
    assert request.lengths_BF.tolist() == [[1, 1]] * 3


def test_amounts_may_come_as_an_array_and_by_names_of_the_callers() -> None:
    dense = [[1, 0.05], [2, 1.5], [3, np.nan]]
    users = {"user": CALL["user"]}
    for of in (schema(), schema(named=False)):
        assert sent(users, of=of, dense=dense) == MADE
    renamed = {**users, "years": CALL["age"], "euros": CALL["price"]}
    assert sent(renamed, dense=["years", "euros"]) == MADE


def test_amounts_may_be_of_the_context_and_of_the_candidates() -> None:
    assert sent({"user": [1, 2]}, context={"price": 1.5, "age": 3}) == [[1, 2], [2, 2]]
    # Candidates that differ in their amounts alone.
    assert sent({"price": [0.0, 30.0]}, context={"user": 4, "age": 3}) == [[4, 0], [4, 3]]
    jagged = cut(read(schema(), {"price": [0.0, 30.0]}, context={"user": [4, 5], "age": 3}))
    assert jagged[0].arrays["KEYS"].tolist() == [[4, 5, 0, 4, 5, 3]]
    assert jagged[0].arrays["LENGTHS"].tolist() == [[2, 1, 2, 1]]


def test_bins_that_a_caller_worked_out_must_be_right() -> None:
    """As callers of models whose bins nobody told do; and None asks without a bin."""
    assert sent({**CALL, "price_bin": [0, 2, None]}) == MADE
    assert sent({**CALL, "price_bin": [0, 2, -1]}) == MADE
    assert sent({**CALL, "price_bin": [None] * 3}) == [[user, MISSING_KEY] for user, _ in MADE]
    alone = {"user": [7, 8], "age": [1, 2], "price": [1.5, 1.5]}
    assert sent({n: alone[n] for n in ("user", "age")}, context={"price": 1.5, "price_bin": 2})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another bin": (
        {"price_bin": [0, 1, -1]},
        "feature 'price_bin', row 1 is 1, where 'price' is 1.5, of bin 2; leave 'price_bin' out: "
        "the client makes it of 'price'",
    ),
    "a bin of nothing": ({"price_bin": [0, 2, 0]}, "row 2 is 0, where 'price' is nan, of bin -1"),
    "the amount": ({"price_bin": [0.05, 1.5, None]}, "feature 'price_bin', row 0: 0.05 is no int"),
    "lists": ({"price_bin": [[0], [2], []]}, "'price_bin' is the bin of an amount, one a row"),
    "no number": ({"price": [1, "dear", 3]}, "dense feature 'price', row 1: 'dear' is no number"),
    "no amount": ({"price": None}, "dense feature 'price' is missing"),
    "other rows": ({"price": [1, 2]}, "dense feature 'price' has 2 rows, other columns 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_is_wrong_and_what_to_do(name: str) -> None:
    changes, says = REFUSED[name]
    given = {n: column for n, column in {**CALL, **changes}.items() if column is not None}
    with pytest.raises(InputError) as refusal:
        sent(given)
    assert says in str(refusal.value)


def test_an_array_that_holds_no_numbers_is_named() -> None:
    with pytest.raises(InputError, match=r"dense is no array of numbers, \[1, 2\]: .*'dear'"):
        sent({"user": [1]}, dense=[[1, "dear"]])


def test_a_lookup_takes_the_amount_and_sends_no_dense() -> None:
    """A model that is looked up has no DENSE."""
    of = schema(ranking=False)
    call = {n: CALL[n] for n in ("user", "price")}
    (request,) = cut(read(of, call))
    assert {*request.arrays} == {"KEYS"}
    assert request.arrays["KEYS"].tolist() == MADE
    assert sent({"user": [1], "price_bin": [3]}, of=of) == [[1, 3]]
    with pytest.raises(InputError, match="'price_bin' is missing: it is the bin of 'price'"):
        sent({"user": [1]}, of=of)


def config(told: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration as Triton tells it."""
    said = {"schema": json.dumps(told), "kind": "ranking"}
    return {
        "name": "m",
        "backend": "embertide",
        "max_batch_size": 8,
        "parameters": {name: {"string_value": value} for name, value in said.items()},
        "input": [{"name": "KEYS"}, {"name": "LENGTHS"}],
        "output": [{"name": "SCORE"}],
    }


def test_a_model_tells_its_bins_or_has_none() -> None:
    features = [{"name": name, "dim": 2, "pooling": "sum"} for name in ("user", "price_bin")]
    told: dict[str, Any] = {
        "features": features,
        "dense": {"columns": 2, "names": ["age", "price"]},
    }
    bins = [{"feature": "price_bin", "dense": 1, "edges": [*EDGES]}]
    assert Schema.of(config(told | {"bins": bins})).features == (USER, BINNED)
    before = Schema.of(config(told))
    assert [feature.bins for feature in before.features] == [None, None]
    # Who asks has to send the bin, as ever.
    with pytest.raises(InputError, match="feature 'price_bin' is missing"):
        read(before, CALL)
    (request,) = cut(read(before, {**CALL, "price_bin": [5, 5, 5]}))
    assert request.arrays["KEYS"].tolist() == [[7, 5], [8, 5], [9, 5]]
