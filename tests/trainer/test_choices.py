"""Each setting that is one of some names is refused with another: found by its type, `Literal`."""

import dataclasses
import typing
from typing import Any, Literal, get_args, get_origin

import pytest

from embertide import config
from embertide.config import FeatureConfig, ModelConfig, TableConfig

_NEEDED: dict[str, dict[str, Any]] = {
    "FeatureConfig": {"name": "a", "table": "a"},
    "TableConfig": {"name": "a"},
    "DenseConfig": {"name": "a"},
    "PruneConfig": {"ratio": 2.0},
    "RunConfig": {
        "model": ModelConfig(
            name="a",
            tables=(TableConfig(name="a"),),
            features=(FeatureConfig(name="a", table="a"),),
        )
    },
}


def _literals(hint: Any) -> bool:
    return get_origin(hint) is Literal or any(_literals(each) for each in get_args(hint))


def _choices() -> list[Any]:
    found = []
    for name in config.__all__:
        kind = getattr(config, name)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            continue
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.init and _literals(hints[field.name]):
                several = get_origin(hints[field.name]) is tuple
                found.append(pytest.param(kind, field.name, several, id=f"{name}.{field.name}"))
    return found


CHOICES = _choices()


def test_settings_of_choices_are_found() -> None:
    assert len(CHOICES) >= 12


@pytest.mark.parametrize(("kind", "setting", "several"), CHOICES)
def test_an_unknown_name_is_refused_and_named(kind: type[Any], setting: str, several: bool) -> None:
    given = {setting: ("no-such-name",) if several else "no-such-name"}
    with pytest.raises(ValueError, match=r"'no-such-name'; use"):
        kind(**_NEEDED.get(kind.__name__, {}) | given)


def test_a_net_takes_no_feature_whose_rows_are_not_pooled() -> None:
    with pytest.raises(ValueError, match=r"feature 'a': pooling is 'none'.*use 'sum' or 'mean'"):
        ModelConfig(
            name="a",
            tables=(TableConfig(name="a"),),
            features=(FeatureConfig(name="a", table="a", pooling="none"),),
        )
