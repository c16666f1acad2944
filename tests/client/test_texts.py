"""Features of text: the client hashes their texts as the trainer did, whatever holds them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embertide.client import Feature, InputError, Schema, text_keys
from embertide.client.requests import cut, read
from embertide.trainer.data import open_events
from embertide.trainer.data.base import EventSchema, FeatureColumn

SCHEMA = Schema(
    model="m",
    ranking=True,
    features=(
        Feature(name="user", dim=2, text=True),
        Feature(name="tags", dim=2, text=True),
        Feature(name="hour", dim=2),
    ),
    dense=(),
    dense_columns=0,
    max_batch=1 << 15,
    max_samples=1 << 15,
)
WORDS = ['it\'s "quoted"', "", "7", "é\n"]
KEYS = text_keys(WORDS).tolist()


def sent(features: Any, **more: Any) -> list[list[int]]:
    (request,) = cut(read(SCHEMA, features, **more))
    keys: list[list[int]] = request.arrays["KEYS"].tolist()
    return keys


@pytest.mark.parametrize(
    "column",
    [
        WORDS,
        np.array(WORDS),
        np.array(WORDS, object),
        pd.Series(WORDS),
        pd.Series(WORDS, dtype="string"),
        pa.array(WORDS),
        text_keys(WORDS),
        ['it\'s "quoted"', None, "7", KEYS[3]],  # keys as they are, and a text that is missing
        pd.Series(['it\'s "quoted"', None, "7", "é\n"], dtype="category"),
    ],
    ids=lambda column: type(column).__name__,
)
def test_texts_are_sent_as_their_keys(column: Any) -> None:
    given_columns = {"user": column, "tags": [1, 2, 3, 4], "hour": [0, 1, 2, 3]}
    assert sent(given_columns) == [[KEYS[n], n + 1, n] for n in range(4)]


def test_keys_that_are_integers_need_no_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a caller of integers works where xxhash is not installed."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert sent({"user": [7], "tags": [[8]], "hour": [1]})[0][:3] == [7, 8, 1]


def test_lists_and_contexts_of_texts_are_hashed_too() -> None:
    lists = {"user": ["a", "b"], "tags": [["x", "7"], []], "hour": [1, 2]}
    found = sent(lists)
    (a, b), (x, seven) = text_keys(["a", "b"]).tolist(), text_keys(["x", "7"]).tolist()
    assert np.concatenate(found).tolist() == [a, x, seven, 1, b, 2]
    assert sent({"hour": [1, 2]}, context={"user": "a", "tags": "x"}) == [[a, x, 1], [a, x, 2]]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"hour": ["1"]}, "feature 'hour', row 0: '1' is no integer"),
        ({"user": [b"a"]}, "feature 'user', row 0: b'a' is no integer"),
        ({"user": [1.5]}, r"feature 'user', row 0: 1\.5 is no integer"),
        ({"tags": [["x", None]]}, "feature 'tags', row 0, place 1 is missing: leave it out"),
    ],
)
def test_other_values_are_refused_as_ever(columns: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        sent({"user": ["a"], "tags": ["x"], "hour": [1]} | columns)


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_keys_are_those_that_the_trainer_read(
    tmp_path_factory: pytest.TempPathFactory, words: list[str | None]
) -> None:
    path: Path = tmp_path_factory.mktemp("texts") / "events.parquet"
    pq.write_table(pa.table({"u": pa.array(words, pa.string()), "y": [0] * len(words)}), path)
    feature = FeatureColumn(name="user", column="u", kind="string")
    events = open_events(str(path), schema=EventSchema(features=(feature,), label="y"))
    learned = np.concatenate([batch.keys_BF[:, 0] for batch in events.batches(batch_size=4096)])
    found = sent({"user": words, "tags": ["x"] * len(words), "hour": [1] * len(words)})
    assert [row[0] for row in found] == learned.tolist()
