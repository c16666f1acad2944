"""Strategies of synchronisation as settings: what is refused, and what a run may change."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.commands.run_file import explained, load
from embertide.trainer.config import (
    DCT,
    AllReduce,
    Hop,
    LocalSGD,
    PartialAllReduce,
    RunConfig,
    Sync,
)
from embertide.trainer.config.sync import STRATEGIES, check_ranks, parse_sync
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model
from embertide.trainer.run.checkpoint import settings
from embertide.trainer.run.checkpoint.settings import changed_from_default, differences, parsed

RUN = RunConfig(model=news_model())
TRIANGLE = ((0, 1), (1, 2), (2, 0))


def with_sync(sync: Sync) -> RunConfig:
    return dataclasses.replace(RUN, sync=sync)


def saved(run: RunConfig) -> dict[str, Any]:
    """The settings as a checkpoint's JSON gives them back."""
    restored: dict[str, Any] = json.loads(json.dumps(settings.settings(run)))
    return restored


def test_a_density_that_is_not_given_follows_the_ranks() -> None:
    assert [DCT().density_of(ranks) for ranks in (2, 4, 8)] == [0.008, 0.004, 0.002]
    assert DCT(density=0.5).density_of(8) == 0.5


@pytest.mark.parametrize("density", [0.0, -0.1, 1.001, float("nan"), float("inf")])
def test_a_density_that_is_no_share_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match=r"DCT: density is .*; give a share above 0"):
        DCT(density=density)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (AllReduce, {"values": "int8"}, "values is 'int8'; use 'fp32' or 'fp16'"),
        (DCT, {"refresh_every": 0}, "refresh_every is 0; give 1 or more"),
        (PartialAllReduce, {"group_size": 1}, "group_size is 1; give 2 or more"),
        (PartialAllReduce, {"schedule": "random"}, "use 'generated' or 'static'"),
        (PartialAllReduce, {"max_row_staleness": -1}, "max_row_staleness is -1; give 0"),
        (LocalSGD, {"every": 0}, "every is 0"),
        (LocalSGD, {"max_batches_apart": 0}, "max_batches_apart is 0"),
        (Hop, {"max_ig": 0}, "max_ig is 0"),
        (Hop, {"graph": "star"}, "graph is 'star'; use 'ring' or pairs of ranks"),
        (Hop, {"graph": ()}, "has no edges"),
        (Hop, {"graph": ((0, 0),)}, r"the edge \(0, 0\)"),
        (Hop, {"graph": TRIANGLE, "backup": 1}, "hears from 1 others"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    kind: type, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        kind(**given)


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (((0, 1), (1, 0), (2, 3), (3, 2)), "rank 2 is not reached from rank 0"),
        (((0, 1), (1, 2), (0, 2)), "rank 1 does not reach rank 0"),
        (((0, 1), (1, 0), (1, 2)), "rank 2 does not reach rank 0"),
        (((0, 2), (2, 0)), "rank 1 is not reached from rank 0"),
    ],
)
def test_a_graph_that_is_not_connected_is_refused(
    graph: tuple[tuple[int, int], ...], says: str
) -> None:
    with pytest.raises(ValueError, match=f"not connected: {says}; add edges"):
        Hop(graph=graph)


def test_a_ring_has_both_neighbours_of_each_rank() -> None:
    assert Hop().edges(2) == ((0, 1), (1, 0))
    assert Hop().edges(4) == tuple(sorted((r, (r + s) % 4) for r in range(4) for s in (1, 3)))
    assert Hop(graph=TRIANGLE).edges(3) == TRIANGLE
    with pytest.raises(ConfigurationError, match="the graph has 3 ranks, and the run has 4"):
        Hop(graph=TRIANGLE).edges(4)


@pytest.mark.parametrize(
    ("sync", "ranks", "says"),
    [
        (PartialAllReduce(group_size=3), 2, "groups need 3 ranks or more, and the run has 2"),
        (PartialAllReduce(), 1, "--nproc 2"),
        (Hop(), 1, "the run has 1"),
        (Hop(graph=TRIANGLE), 4, "the graph has 3 ranks"),
        (Hop(backup=1), 2, "hears from 1 others"),
    ],
)
def test_fewer_ranks_than_a_group_needs_are_refused(sync: Sync, ranks: int, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_ranks(sync, ranks)
    if ranks == 1:
        with pytest.raises(ConfigurationError, match=says):
            Learner(with_sync(sync))


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sync is 'dct'; use one of AllReduce\(\), DCT\(\)"):
        RunConfig(model=news_model(), sync="dct")  # type: ignore[arg-type]


def test_every_strategy_has_its_name() -> None:
    for name, kind in STRATEGIES.items():
        assert kind().strategy == name
        assert parse_sync(name) == parse_sync(name.replace("_", "-")) == kind()


def test_an_option_names_a_strategy_and_its_settings() -> None:
    assert parse_sync("dct:density=0.01,values=fp32,error_feedback=false") == DCT(
        density=0.01, values="fp32", error_feedback=False
    )
    assert parse_sync("hop:max_ig=2,max_row_staleness=0") == Hop(max_ig=2, max_row_staleness=0)
    for text, says in (
        ("gossip", "sync is 'gossip'; use one of all_reduce, dct"),
        ("dct:rate=1", "'rate=1' is no setting; write NAME=VALUE with one of density"),
        ("dct:strategy=hop", "is no setting"),
        ("dct:", "is no setting"),
        ("dct:density=much", "give numbers"),
        ("dct:density=2", "density is 2"),
    ):
        with pytest.raises(ValueError, match=says):
            parse_sync(text)


def test_the_command_refuses_an_unknown_strategy() -> None:
    result = CliRunner().invoke(app, ["train", "out", "--demo", "--sync", "gossip"])
    assert result.exit_code == 2
    assert "gossip" in result.output


def test_another_strategy_is_one_difference_that_can_be_allowed() -> None:
    for before, after in ((AllReduce(), DCT()), (DCT(), Hop()), (DCT(), DCT(density=0.01))):
        (found,) = differences(saved(with_sync(before)), with_sync(after))
        assert (found.path, found.may_change, found.is_known) == ("sync", True, True)
        assert "--allow-change sync" in str(found)
    settings.check_allowed(["sync"])
    for sync in (*(kind() for kind in STRATEGIES.values()), Hop(graph=TRIANGLE)):
        assert differences(saved(with_sync(sync)), with_sync(sync)) == []


def test_four_ranks_do_not_wait_for_one_that_is_five_times_slower() -> None:
    for sync in (PartialAllReduce(), Hop(), LocalSGD()):
        assert min(sync.max_row_staleness, sync.max_batches_apart) >= 5 * 3


def test_a_checkpoint_without_a_strategy_is_of_all_reduce() -> None:
    older = saved(RUN)
    del older["sync"]
    assert differences(older, RUN) == []
    (found,) = differences(older, with_sync(DCT()))
    assert found.path == "sync"


def test_a_strategy_with_its_defaults_is_a_change_from_the_default() -> None:
    assert "sync" not in changed_from_default(RUN)
    assert "sync" in changed_from_default(with_sync(DCT()))
    assert "sync.values" in changed_from_default(with_sync(AllReduce(values="fp16")))


@pytest.mark.parametrize(
    "sync", [*(kind() for kind in STRATEGIES.values()), Hop(graph=TRIANGLE), DCT(density=0.5)]
)
def test_a_strategy_is_read_back_as_it_was(sync: Sync, tmp_path: Path) -> None:
    run = with_sync(sync)
    assert parsed(RunConfig, saved(run)) == run
    path = tmp_path / "run.py"
    path.write_text(explained(run))
    assert load(path).run == run
