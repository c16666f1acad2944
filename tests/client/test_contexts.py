"""A call whose context has the model's context columns sends them once: without a server."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from context_page import printed_request
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from embertide._common import kserve
from embertide.client import ClientError, InputError
from embertide.client.bins import Bins
from embertide.client.requests import Request, cut, read
from embertide.client.schema import Feature, Schema

SCHEMA = Schema(
    model="m",
    ranking=True,
    features=(
        Feature(name="user", dim=4),
        Feature(name="cand", dim=4),
        Feature(name="clicks", dim=2, pooling="mean"),
        Feature(name="user_cand", dim=2, made=True),
    ),
    dense=("price", "age"),
    dense_columns=2,
    dense_made=2,
    context=("user", "clicks", "age"),
)
CONTEXT: dict[str, Any] = {"user": 7, "clicks": [1, 2, 3], "age": 41}


def listed(request: Request) -> dict[str, list[Any]]:
    return {name: array.tolist() for name, array in request.arrays.items()}


def sent(call: dict[str, Any], context: Any = None, **more: Any) -> list[dict[str, list[Any]]]:
    return [listed(each) for each in cut(read(SCHEMA, call, context=context, **more))]


def test_a_context_goes_once_and_lengths_of_ones_do_not() -> None:
    assert sent({"cand": [4, 5], "price": [1, 2]}, CONTEXT) == [
        {
            "CONTEXT_KEYS": [[7, 1, 2, 3]],
            "CONTEXT_LENGTHS": [[1, 3]],
            "CONTEXT_DENSE": [[41]],
            "CANDIDATES": [[2]],
            "KEYS": [[4, 5]],
            "DENSE": [[1, 2]],
        }
    ]


@pytest.mark.parametrize(
    ("call", "context"),
    [
        ({"user": [7, 7], "cand": [4, 5], "price": [1, 2]}, {"clicks": [1], "age": 41}),
        ({"cand": [4, 5], "price": [1, 2], "age": [3, 4]}, {"user": 7, "clicks": [1]}),
        ({"cand": [4, 5], "price": [1, 2], "age": [3, 4], "user": [7, 7], "clicks": [1, 1]}, None),
    ],
)
def test_a_call_without_all_of_the_context_has_rows_alone(call: Any, context: Any) -> None:
    assert all("CANDIDATES" not in request for request in sent(call, context))


def test_columns_that_nodes_make_and_sources_leave_rows_alone() -> None:
    call = {"cand": [4, 5], "price": [1, 2]}
    (repeated,) = sent(call, CONTEXT, repeat=True)
    assert repeated["KEYS"] == [[7, 4, 1, 2, 3, 7, 5, 1, 2, 3]]
    schema = dataclasses.replace(SCHEMA, dense_made=0)
    (made,) = cut(read(schema, {**call, "user_cand": [8, 9]}, context=CONTEXT))
    assert "CANDIDATES" not in made.arrays


def test_what_more_is_in_a_context_is_repeated() -> None:
    (request,) = sent({"cand": [4, 5]}, {**CONTEXT, "price": 9})
    assert request["DENSE"] == [[9, 9]]
    assert request["CONTEXT_DENSE"] == [[41]]


def test_names_that_the_model_no_longer_has_leave_rows_alone() -> None:
    schema = dataclasses.replace(SCHEMA, context=("user", "clicks", "age", "gone"))
    (request,) = cut(read(schema, {"cand": [4], "price": [1]}, context=CONTEXT))
    assert "CANDIDATES" not in request.arrays


def test_weights_stand_on_the_side_of_their_keys() -> None:
    weights = {"clicks": [0.5, 1, 2]}
    columns = read(SCHEMA, {"cand": [4, 5], "price": [1, 2]}, weights, context=CONTEXT)
    (request,) = cut(columns)
    assert listed(request)["CONTEXT_WEIGHTS"] == [[1, 0.5, 1, 2]]
    assert "WEIGHTS" not in request.arrays


def test_the_bin_of_an_amount_of_the_context_is_made_once() -> None:
    binned = dataclasses.replace(SCHEMA.features[0], bins=Bins(dense=1, edges=(10.0, 40.0)))
    schema = dataclasses.replace(SCHEMA, features=(binned, *SCHEMA.features[1:]))
    context = {"clicks": [1], "age": 41}
    (request,) = cut(read(schema, {"cand": [4, 5], "price": [1, 2]}, context=context))
    assert listed(request)["CONTEXT_KEYS"] == [[2, 1]]
    with pytest.raises(InputError, match="'user', row 0 is 1"):
        read(schema, {"cand": [4, 5], "price": [1, 2]}, context={**context, "user": 1})


def test_a_call_is_cut_by_what_its_candidates_have_beside_the_context() -> None:
    schema = dataclasses.replace(SCHEMA, max_keys=10)  # 4 of the context, 2 of a candidate
    call = {"cand": range(7), "price": [0] * 7}
    requests = cut(read(schema, call, context=CONTEXT))
    assert [(each.begin, each.end) for each in requests] == [(0, 3), (3, 6), (6, 7)]
    assert [each.arrays["CANDIDATES"].tolist() for each in requests] == [[[3]], [[3]], [[1]]]
    assert all(each.arrays["CONTEXT_KEYS"].shape == (1, 4) for each in requests)
    assert [int(each.lengths_BF.sum()) for each in requests] == [10, 10, 6]
    with pytest.raises(InputError, match=r"row 0 alone has 6 keys; model 'm' takes 5 in a"):
        cut(read(dataclasses.replace(SCHEMA, max_keys=5), call, context=CONTEXT))


@given(
    clicks=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    cands=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=9),
    most=st.integers(1, 4),
)
def test_repeating_the_context_gives_the_rows_of_the_other_form(
    clicks: list[int], cands: list[list[int]], most: int
) -> None:
    schema = dataclasses.replace(SCHEMA, max_samples=most)
    call = {"cand": cands, "price": range(len(cands))}
    context = {**CONTEXT, "clicks": clicks}
    once = cut(read(schema, call, context=context))
    each = cut(read(schema, call, context=context, repeat=True))
    assert [(r.begin, r.end) for r in once] == [(r.begin, r.end) for r in each]
    for with_context, wanted in zip(once, each, strict=True):
        arrays = with_context.arrays
        count = with_context.end - with_context.begin
        cand_bags = _bags(arrays["KEYS"], arrays.get("LENGTHS"))
        user, clicked = _bags(arrays["CONTEXT_KEYS"], arrays.get("CONTEXT_LENGTHS"))
        bags = [bag for cand in cand_bags for bag in (user, cand, clicked)]
        assert bags == _bags(wanted.arrays["KEYS"], wanted.arrays["LENGTHS"])
        age = np.repeat(arrays["CONTEXT_DENSE"], count)
        dense = np.stack([arrays["DENSE"].ravel(), age], 1).reshape(1, -1)
        np.testing.assert_array_equal(dense, wanted.arrays["DENSE"])


def _bags(keys: NDArray[np.int64], lengths: NDArray[np.int32] | None) -> list[list[int]]:
    each = [1] * keys.size if lengths is None else lengths.ravel().tolist()
    return [bag.tolist() for bag in np.split(keys.ravel(), np.cumsum(each)[:-1])]


def test_the_printed_bytes_are_those_of_its_arrays() -> None:
    arrays: dict[str, NDArray[Any]] = {
        "CONTEXT_KEYS": np.array([[7, 8, 9]]),
        "CONTEXT_LENGTHS": np.array([[1, 2]], np.int32),
        "CONTEXT_DENSE": np.array([[30, 41]], np.float32),
        "CANDIDATES": np.array([[2, 1]], np.int32),
        "KEYS": np.array([[100, 101, 102]]),
        "DENSE": np.array([[9.5, 4, 12, 3, 9.5, 5]], np.float32),
    }
    printed = printed_request()
    assert [*printed] == [*arrays]
    sent, wanted = (kserve.infer_request("m", each, ("SCORE",)) for each in (printed, arrays))
    assert sent == wanted


def test_a_model_tells_its_context_by_its_parameter() -> None:
    def schema(context: str | None) -> Schema:
        said = {"kind": {"string_value": "ranking"}}
        said |= {"context": {"string_value": context}} if context is not None else {}
        told = {"features": [{"name": "user", "dim": 2}, {"name": "cand", "dim": 2}]}
        config = {"name": "m", "backend": "embertide", "parameters": said}
        return Schema.of(config, told)

    assert schema(None).context == ()
    assert schema("user").context == ("user",)
    assert schema("user,age").context == ("user", "age")
    for wrong in ("user,,age", ",", "user,user"):
        with pytest.raises(ClientError, match="does not tell its columns right"):
            schema(wrong)
