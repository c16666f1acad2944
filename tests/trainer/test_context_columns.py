"""Which columns of a model are the user's: by name, made ones too, and in the net's inputs."""

import dataclasses
from typing import Any

import pytest
from shop import DENSE, model

from embertide.trainer.config import SequenceConfig
from embertide.trainer.config.context import context_columns, context_features
from embertide.trainer.model.build import build_net
from embertide.trainer.model.rewrite.package import contexts_of_model
from embertide.trainer.presets import PRESETS


def test_a_model_that_names_none_has_no_program_for_contexts() -> None:
    assert contexts_of_model(model(*DENSE)) is None


def test_columns_of_the_net_are_the_users_if_their_names_are() -> None:
    named = model(*DENSE, context=("user", "price", "stars"))
    # price has a second column, which says whether it is missing.
    assert context_columns(named) == (
        (True, True, False, True),
        (True,) * 4 + (False,) * 4,
    )


def test_crosses_and_histories_follow_what_they_are_made_from() -> None:
    preset = PRESETS["news-crossed"]()
    own = tuple(each.name for each in preset.event_features if each.name != "cand")
    crossed = dataclasses.replace(preset, context=own)
    (sequence,) = preset.sequences
    with_cand = {each.name for each in preset.features if "cand" in each.crossed}
    names = {each.name for each in preset.columns}
    assert context_features(crossed) == names - {"cand"} - with_cand
    assert {*sequence.columns} <= context_features(crossed)
    dense, embeddings = context_columns(crossed)
    assert dense == (True, False)  # how long the history is; whether it has the candidate
    assert len(embeddings) == sum(preset.feature_widths)
    one = dataclasses.replace(preset, context=own[1:])
    assert own[0] == sequence.user
    assert not {*sequence.columns} & context_features(one)
    assert context_columns(one)[0] == (False, False)


def test_times_of_a_history_are_the_users() -> None:
    preset = PRESETS["news-hstu"]()
    (sequence,) = preset.sequences
    own = tuple(each.name for each in preset.event_features if each.name != "cand")
    dense, _ = context_columns(dataclasses.replace(preset, context=own))
    assert dense == (True, False, *[True] * sequence.length)


def test_a_history_that_requests_carry_is_named_by_its_columns() -> None:
    sequence = SequenceConfig(name="last", user="user", item="it", length=2)
    named: Any = {"net": "history", "sequences": (sequence,), "bottom_mlp": ()}
    base = dataclasses.replace(model(), **named)
    context = ("user", "last0", "last1", "last_length")
    assert context_features(dataclasses.replace(base, context=context)) == {*context[:3]}
    assert context_columns(dataclasses.replace(base, context=context))[0] == (True, False)
    assert context_columns(dataclasses.replace(base, context=("user",)))[0] == (False, False)
    build_net(dataclasses.replace(base, context=context))


@pytest.mark.parametrize(
    ("context", "says"),
    [
        (("user", "usr"), "context names 'usr'; name columns that a request carries: user, it, pr"),
        (("price",), "name at least one of the features user, it"),
        (("user", "it"), "leave at least one to the candidates"),
    ],
)
def test_a_context_that_is_none_is_refused(context: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model(*DENSE, context=context)


def test_what_nodes_make_is_not_named() -> None:
    preset = PRESETS["news-crossed"]()
    made = next(each.name for each in preset.features if each.crossed)
    with pytest.raises(ValueError, match=f"context names '{made}'"):
        dataclasses.replace(preset, context=("user", made))
