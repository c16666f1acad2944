"""Requests of events where a model takes a user's columns once for all candidates."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import service_pb2

from embertide.server.adapters.triton import ModelOptions, model_config
from embertide.server.cli.demo.options import CONTEXT
from embertide.trainer.config import RunConfig
from embertide.trainer.config.assign import assigned
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import take
from embertide.trainer.eval.context_form import ContextForm
from embertide.trainer.presets import PRESETS

NEWS = NewsSource(NewsConfig(hours=1, views_per_hour=60))


def told(context: tuple[str, ...], **schema: Any) -> Any:
    """Return a server's answer about a model of three features, whose last one nodes make."""
    features = [{"name": name, "dim": 4, "pooling": "sum"} for name in ("user", "cand", "cross")]
    features[2]["made"] = True
    given = {"features": features, "dense": {"columns": 2, "names": ["age", "price"]}} | schema
    options = ModelOptions(kind="ranking", context=context, schema=json.dumps(given))
    response = service_pb2.ModelConfigResponse()
    text_format.Parse(model_config("m", options), response.config)
    return response


def batch() -> Batch:
    made = next(NEWS.batches(batch_size=4, start=0))
    return dataclasses.replace(
        made,
        keys_BF=np.array([[7, 1], [7, 2], [8, 3], [7, 4]], np.int64),
        dense_BD=np.array([[np.nan, 1], [np.nan, 2], [3, 3], [4, 4]], np.float32),
        ts_ms_B=np.zeros(4, np.int64),
        label_B=np.zeros(4, np.float32),
    )


def test_neighbours_of_one_user_carry_its_columns_once() -> None:
    form = ContextForm.told(told(("user", "age")), "m")
    assert form is not None
    assert form.takes(batch())
    found = form.tensors(batch())
    np.testing.assert_array_equal(found["CONTEXT_KEYS"], [[7, 8, 7]])
    np.testing.assert_array_equal(found["CONTEXT_DENSE"], [[np.nan, 3, 4]])
    np.testing.assert_array_equal(found["CANDIDATES"], [[2, 1, 1]])
    np.testing.assert_array_equal(found["KEYS"], [[1, 2, 3, 4]])
    np.testing.assert_array_equal(found["DENSE"], [[1, 2, 3, 4]])
    assert found["CANDIDATES"].dtype == np.int32


def test_the_bytes_are_those_of_the_example_in_the_docs() -> None:
    """Here a bag has one key; in the docs the second user has two."""
    dense = {"columns": 3, "names": ["price", "age", "stars"]}
    features = [{"name": name, "dim": 4, "pooling": "sum"} for name in ("user", "it")]
    form = ContextForm.told(told(("user", "age"), features=features, dense=dense), "m")
    assert form is not None
    values = [[9.5, 30, 4], [12, 30, 3], [9.5, 41, 5]]
    events = dataclasses.replace(
        take(batch(), 0, 3),
        keys_BF=np.array([[7, 100], [7, 101], [8, 102]], np.int64),
        dense_BD=np.array(values, np.float32),
    )
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| (\[.*?\]) \| ([0-9a-f ]+) \|", page, re.MULTILINE)
    example = {name: (json.loads(shape), bytes.fromhex(data)) for name, shape, data in rows}
    found = form.tensors(events)
    for name in ("CONTEXT_DENSE", "CANDIDATES", "KEYS", "DENSE"):
        assert ([*found[name].shape], found[name].tobytes()) == example[name], name


def test_one_user_with_another_value_is_another_context() -> None:
    form = ContextForm.told(told(("user", "age")), "m")
    assert form is not None
    other = batch()
    other.dense_BD[1, 0] = 5.0
    np.testing.assert_array_equal(form.tensors(other)["CANDIDATES"], [[1, 1, 1, 1]])


def test_tensors_without_a_value_are_left_out() -> None:
    form = ContextForm.told(told(("user", "age", "price")), "m")
    assert form is not None
    assert "DENSE" not in form.tensors(batch())


def test_a_model_that_names_no_context_gets_whole_rows() -> None:
    assert ContextForm.told(told(()), "m") is None
    response = told(("user",))
    del response.config.parameters["schema"]
    assert ContextForm.told(response, "m") is None


def test_events_of_other_columns_are_sent_whole() -> None:
    form = ContextForm.told(told(("user",)), "m")
    assert form is not None
    wider = dataclasses.replace(batch(), keys_BF=np.zeros((4, 3), np.int64))
    assert not form.takes(wider)


def test_the_demos_contexts_are_all_columns_of_events_but_the_article_shown() -> None:
    for name, context in CONTEXT.items():
        names = [each.name for each in PRESETS[name]().event_features]
        assert {*context, "cand"} == {*names}
        run = assigned(RunConfig(model=PRESETS[name]()), [f"model.context={','.join(context)}"])
        assert run.model.context == context
