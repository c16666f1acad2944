"""Columns by name become requests, and answers columns again: without a server."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from embertide.client import InputError, text_keys
from embertide.client.requests import cut, embeddings_of, places_of, read, sources_of
from embertide.client.schema import Feature, Schema
from embertide.trainer.data.arrow import typed_column
from embertide.trainer.data.assemble import column_keys, hash_strings
from embertide.trainer.data.base import MISSING_KEY

USER, TAGS, CROSS = (
    Feature(name="user", dim=2),
    Feature(name="tags", dim=3, pooling="mean"),
    Feature(name="user_tags", dim=2, made=True),
)
PLAIN = Schema(
    model="m",
    ranking=True,
    features=(USER, TAGS),
    dense=("price", "age"),
    dense_columns=2,
    max_batch=4,
    max_samples=3,
    max_keys=8,
)
KEYS = {"user": [1, 2, 3], "price": [1.0, None, 3.0], "age": [5, 6, 7]}


def frame_of(kind: str, tags: list[list[int]]) -> Any:
    columns = {**KEYS, "tags": tags}
    if kind == "pandas":
        return pd.DataFrame(columns)
    return columns if kind == "mapping" else pa.table(columns)


@pytest.mark.parametrize("kind", ["mapping", "arrow", "pandas"])
def test_a_request_has_keys_sample_by_sample_and_dense_as_it_is(kind: str) -> None:
    columns = read(PLAIN, frame_of(kind, [[7, 8], [], [9]]))
    (request,) = cut(columns)
    assert request.arrays["KEYS"].tolist() == [[1, 7, 8, 2, 3, 9]]
    assert request.arrays["LENGTHS"].tolist() == [[1, 2, 1, 0, 1, 1]]
    assert request.arrays["DENSE"][0, [0, 1, 3, 4, 5]].tolist() == [1, 5, 6, 3, 7]
    assert np.isnan(request.arrays["DENSE"][0, 2])


def test_one_key_a_feature_is_the_rectangular_form() -> None:
    (request,) = cut(read(PLAIN, {**KEYS, "tags": np.array([4, 5, 2**64 - 1], np.uint64)}))
    assert request.arrays["KEYS"].tolist() == [[1, 4], [2, 5], [3, -1]]
    assert request.arrays["DENSE"].shape == (3, 2)


def test_a_call_is_cut_at_samples_and_at_keys() -> None:
    tags = [[1] * n for n in (1, 2, 5, 1, 1, 1, 1)]
    whole = {"user": list(range(7)), "tags": tags, "price": [0] * 7, "age": [0] * 7}
    requests = cut(read(PLAIN, whole), version=9)
    assert [(each.begin, each.end) for each in requests] == [(0, 2), (2, 4), (4, 7)]
    assert all(each.parameters == {"version": 9} for each in requests)
    joined = np.concatenate([each.arrays["KEYS"][0] for each in requests]).tolist()
    assert joined == [key for user, bag in enumerate(tags) for key in (user, *bag)]


def test_made_columns_are_left_out_all_or_none() -> None:
    schema = Schema(model="m", ranking=True, features=(USER, CROSS), max_batch=8)
    (own,) = cut(read(schema, {"user": [1, 2]}))
    assert own.arrays["KEYS"].tolist() == [[1], [2]]
    assert own.lengths_BF.tolist() == [[1, 1], [1, 1]]
    (all_of_them,) = cut(read(schema, {"user": [1, 2], "user_tags": [5, 6]}))
    assert all_of_them.arrays["KEYS"].tolist() == [[1, 5], [2, 6]]
    (lists,) = cut(read(schema, {"user": [[1], [2]]}))
    assert lists.parameters == {"columns": 1}


def test_weights_stand_beside_their_keys() -> None:
    schema = Schema(
        model="m",
        ranking=False,
        features=(USER, Feature(name="tags", dim=3, weighed=True)),
        max_batch=8,
    )
    (request,) = cut(
        read(schema, {"user": [1, 2], "tags": [[7, 8], [9]]}, {"tags": [[0.5, 2], [3]]})
    )
    assert request.arrays["WEIGHTS"].tolist() == [[1, 0.5, 2, 1, 3]]
    table = pa.table({"user": [1], "tags": [[7]], "w": [[0.25]], "more": ["x"]})
    (request,) = cut(read(schema, table, {"tags": "w"}))
    assert request.arrays["WEIGHTS"].tolist() == [[1, 0.25]]


def test_vectors_and_sources_come_back_by_feature() -> None:
    features = (USER, Feature(name="seen", dim=2, pooling="none"))
    schema = Schema(model="m", ranking=False, features=features, max_samples=2)
    columns = read(schema, {"user": [1, 2, 3], "seen": [[4, 5], [], [6]]})
    requests = cut(columns)
    # Sample by sample: the user's two values, then two for each item.
    values = [np.arange(8, dtype=np.float32), np.arange(8, 12, dtype=np.float32)]
    found = embeddings_of(values, requests, schema)
    assert found["user"].tolist() == [[0, 1], [6, 7], [8, 9]]
    assert [each.tolist() for each in found["seen"]] == [[[2, 3], [4, 5]], [], [[10, 11]]]
    sources = sources_of([np.array([1, 2, 3, 1]), np.array([4, 5])], requests, schema)
    assert {name: each.tolist() for name, each in sources.items()} == {
        "user": [1, 1, 4],
        "seen": [2, 3, 5],
    }


def test_places_cover_every_value_once() -> None:
    widths_BF = np.random.default_rng(1).integers(0, 4, (50, 3))
    assert sorted(np.concatenate(places_of(widths_BF))) == list(range(widths_BF.sum()))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"tags": None}, "feature 'tags' is missing; model 'm' takes user, tags"),
    "unknown": ({"tgas": [1, 2, 3]}, "feature 'tgas' is unknown"),
    "float": ({"user": [1, 2.5, 3]}, "feature 'user', row 1: 2.5 is no integer"),
    "bool": ({"user": [True, 1, 2]}, "feature 'user', row 0: True is no integer"),
    "text": (
        {"user": ["a", "b", "c"]},
        "feature 'user', row 0: 'a' is no integer; keys are 64-bit integers, as the trainer got "
        "them; of a column of text send embertide.client.text_keys(values)",
    ),
    "nothing in a list": (
        {"tags": [[1], [2, None], []]},
        "feature 'tags', row 1, place 1 is missing: leave it out of the list",
    ),
    "wide float": ({"user": [1, 2.0**60, 3]}, "feature 'user', row 1: 1.152921504606847e+18 is"),
    "large": ({"user": [1, 2, 2**64]}, f"feature 'user', row 2: {2**64} does not fit 64 bits"),
    "in a list": ({"tags": [[1], [2, "x"], []]}, "feature 'tags', row 1, place 1: 'x'"),
    "no list": ({"tags": [[1], 2, []]}, "feature 'tags', row 1: 2 is no list"),
    "length": (
        {"user": [1, 2]},
        "columns differ in length: {'user': 2, 'tags': 3}; what all rows have in common goes into "
        "context=",
    ),
    "dense": ({"age": [1, "x", 3]}, "dense feature 'age', row 1: 'x' is no number"),
    "dense missing": ({"age": None}, "dense feature 'age' is missing; model 'm' takes price, age"),
    "infinite": ({"age": [1, 1e300, 3]}, "dense feature 'age', row 1: 1e+300 is no finite fp32"),
    "too long": ({"tags": [[1], [2] * 8, []]}, "row 1 alone has 9 keys; model 'm' takes 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_feature_the_row_and_the_value(name: str) -> None:
    changes, says = REFUSED[name]
    given = {**KEYS, "tags": [[1], [2], [3]], **changes}
    with pytest.raises(InputError) as refusal:
        cut(read(PLAIN, {name: column for name, column in given.items() if column is not None}))
    assert says in str(refusal.value)


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
def test_tables_may_have_more_columns_and_may_not_lack_keys(kind: str) -> None:
    columns = {**KEYS, "tags": [1, 2, 3], "title": ["a", "b", "c"]}
    table = pa.table(columns) if kind == "arrow" else pd.DataFrame(columns)
    assert read(PLAIN, table).size == 3
    holes = pa.array([1, None, 3]) if kind == "arrow" else pd.array([1, None, 3], "Int64")
    columns["user"] = holes
    table = pa.table(columns) if kind == "arrow" else pd.DataFrame(columns)
    (request,) = cut(read(PLAIN, table))
    assert request.arrays["KEYS"][:, 0].tolist() == [1, MISSING_KEY, 3]


BLANKS: dict[str, Any] = {
    "list": [1, None, 3],
    "floats": np.array([1.0, np.nan, 3.0]),
    "arrow": pa.array([1, None, 3]),
    "series of floats": pd.Series([1, None, 3]),
    "series of integers": pd.Series([1, None, 3], dtype="Int64", index=[9, 8, 7]),
}


@pytest.mark.parametrize("kind", BLANKS)
def test_a_missing_key_is_the_one_that_the_trainer_reads(kind: str) -> None:
    """And a blank makes floats of integers, in pandas as in the trainer."""
    (request,) = cut(read(PLAIN, {**KEYS, "tags": [1, 2, 3], "user": BLANKS[kind]}))
    of_events = column_keys(typed_column(pa.array([1, None, 3])))
    assert request.arrays["KEYS"][:, 0].tolist() == of_events.tolist() == [1, MISSING_KEY, 3]


def test_dense_without_names_is_an_array_or_named_by_the_caller() -> None:
    schema = Schema(model="m", ranking=True, features=(USER,), dense_columns=2, max_batch=8)
    with pytest.raises(InputError, match=r"takes 2 dense columns, and does not tell their names"):
        read(schema, {"user": [1]})
    (request,) = cut(read(schema, {"user": [1]}, dense=[[1, 2]]))
    assert request.arrays["DENSE"].tolist() == [[1, 2]]
    named = read(schema, {"user": [1], "a": [3], "b": [4]}, dense=["b", "a"])
    assert cut(named)[0].arrays["DENSE"].tolist() == [[4, 3]]
    with pytest.raises(InputError, match=r"dense has shape \[1, 3\]; model 'm' takes \[1, 2\]"):
        read(schema, {"user": [1]}, dense=[[1, 2, 3]])


CANDIDATES = {"user": [1, 2, 3], "price": [1.0, None, 3.0]}


@pytest.mark.parametrize("kind", ["mapping", "arrow", "pandas"])
def test_a_context_is_the_same_for_each_candidate(kind: str) -> None:
    whole = {**CANDIDATES, "tags": [[7, 8]] * 3, "age": [5.0] * 3}
    given: Any = CANDIDATES if kind == "mapping" else pd.DataFrame(CANDIDATES)
    if kind == "arrow":
        given = pa.table(CANDIDATES)
    requests = cut(read(PLAIN, given, context={"tags": [7, 8], "age": 5}))
    expected = cut(read(PLAIN, whole))
    assert len(requests) == len(expected) == 2
    for ours, theirs in zip(requests, expected, strict=True):
        assert {*ours.arrays} == {*theirs.arrays} == {"KEYS", "LENGTHS", "DENSE"}
        for name, array in theirs.arrays.items():
            np.testing.assert_array_equal(ours.arrays[name], array)


def test_a_context_of_one_key_leaves_the_rectangular_form() -> None:
    candidates = {"tags": range(3), "price": [0] * 3, "age": [0] * 3}
    (request,) = cut(read(PLAIN, candidates, context={"user": 9}))
    assert request.arrays["KEYS"].tolist() == [[9, 0], [9, 1], [9, 2]]


def test_weights_of_a_context_are_of_its_keys() -> None:
    schema = Schema(
        model="m",
        ranking=True,
        features=(USER, Feature(name="tags", dim=3, weighed=True)),
        max_batch=8,
        max_samples=8,
    )
    context, weights = {"tags": [7, 8]}, {"tags": [0.5, 2]}
    (request,) = cut(read(schema, {"user": [1, 2]}, weights, context=context))
    assert request.arrays["WEIGHTS"].tolist() == [[1, 0.5, 2, 1, 0.5, 2]]


WRONG_CONTEXTS: dict[str, tuple[Any, str]] = {
    "twice": ({"user": 4, "tags": 1, "age": 5}, "'user' is in the context and a column"),
    "unknown": ({"tags": 1, "age": 5, "hour": 3}, "feature 'hour' is unknown; model 'm' takes"),
    "no key": ({"tags": 1.5, "age": 5}, "feature 'tags' of the context, row 0: 1.5 is no integer"),
    "no number": ({"tags": 1, "age": "x"}, "dense feature 'age' of the context, row 0: 'x'"),
    "no mapping": ([1, 2], "context is a list; give a mapping of one value by name"),
    "lacks": ({"tags": 1}, "dense feature 'age' is missing"),
}


@pytest.mark.parametrize("name", WRONG_CONTEXTS)
@pytest.mark.parametrize("kind", ["mapping", "arrow"])
def test_a_wrong_context_is_named(kind: str, name: str) -> None:
    context, says = WRONG_CONTEXTS[name]
    given = CANDIDATES if kind == "mapping" else pa.table(CANDIDATES)
    with pytest.raises(InputError) as refusal:
        read(PLAIN, given, context=context)
    assert says in str(refusal.value)


def test_a_context_of_all_features_has_no_candidates() -> None:
    with pytest.raises(InputError, match="all features of model 'm' are in the context"):
        read(PLAIN, {}, context={"user": 1, "tags": 2, "price": 3, "age": 4})


def test_a_column_that_is_there_twice_is_refused_if_it_is_wanted() -> None:
    frame = pd.DataFrame([[1, 4, 2, 1.0, 5.0]], columns=["user", "tags", "user", "price", "age"])
    table = pa.Table.from_arrays(
        [pa.array(frame.iloc[:, n]) for n in range(5)], names=list(frame.columns)
    )
    for columns in (frame, table):
        with pytest.raises(InputError, match="column 'user' is there 2 times; give it once"):
            read(PLAIN, columns)
    other = frame.set_axis(["user", "tags", "more", "more", "age"], axis=1).assign(price=1.0)
    assert read(PLAIN, other).size == 1


def test_keys_are_64_bits_whatever_their_sign() -> None:
    high = 2**63 + 5
    signed = high - 2**64
    columns: list[Any] = [
        [high],
        [signed],
        np.array([high], np.uint64),
        pd.Series([high], dtype="UInt64"),
        pa.array([high], pa.uint64()),
        pa.array([high, None], pa.uint64())[:1],
    ]
    for column in columns:
        (request,) = cut(read(PLAIN, {"user": column, "tags": [1], "price": [1], "age": [1]}))
        assert request.arrays["KEYS"][0, 0] == signed
    nulls = {"user": pa.array([high, None], pa.uint64()), "tags": [1, 2]}
    (request,) = cut(read(PLAIN, {**nulls, "price": [1, 2], "age": [1, 2]}))
    assert request.arrays["KEYS"][:, 0].tolist() == [signed, MISSING_KEY]


def test_text_has_the_keys_that_the_trainer_gives_it() -> None:
    texts = ["shirt-17", "", "17", "Größe 42"]
    ours = text_keys(texts)
    theirs = hash_strings(np.array([text.encode() for text in texts], object))
    assert ours.tolist() == theirs.tolist()
    assert len({*ours.tolist()}) == 4
    holes = ["shirt-17", None]
    series = [pd.Series(holes, dtype=kind) for kind in (object, "str", "string", "category")]
    arrow = pa.array(holes)
    arrays = [arrow, arrow.cast(pa.large_string()), arrow.dictionary_encode()]
    columns: list[Any] = [holes, ["shirt-17", float("nan")], *series, *arrays]
    columns += [pa.chunked_array([arrow]), pa.table({"a": arrow}).column("a"), np.array(holes)]
    for column in columns:
        assert text_keys(column).tolist() == ours[:2].tolist()
    assert text_keys(pa.nulls(2)).tolist() == [ours[1]] * 2
    assert text_keys(np.array(["17"])).tolist() == [ours[2]]
    for wrong in ("shirt-17", b"shirt-17", 17, None):
        with pytest.raises(InputError, match="is no column of text"):
            text_keys(wrong)
    with pytest.raises(InputError, match="row 1: 17 is no text"):
        text_keys(["a", 17])
