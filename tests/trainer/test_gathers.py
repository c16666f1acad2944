"""Columns that nets take by constant numbers: ranges give the same bits."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.package.package import load_package

from embertide.trainer.config import FeatureConfig
from embertide.trainer.model import export, gathers
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.export import named_tensors
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.presets import news_model

COLUMNS = 40


class Taking(nn.Module):
    """Some columns, by number."""

    def __init__(self, numbers: list[int], dim: int = 1) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.tensor(numbers, dtype=torch.int64), persistent=False)
        self._dim = dim

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC.index_select(self._dim, self.get_buffer("numbers")) + 1


def exported(net: nn.Module) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch", min=1, max=1 << 20)},)
    return torch.export.export(net, (torch.zeros(3, COLUMNS),), dynamic_shapes=shapes)


def gathered(program: torch.export.ExportedProgram) -> int:
    return sum(node.target == torch.ops.aten.index_select.default for node in program.graph.nodes)


@hypothesis.given(st.lists(st.integers(0, COLUMNS - 1), min_size=1, max_size=60))
def test_ranges_are_the_numbers(numbers: list[int]) -> None:
    ranges = list(gathers.ranges_of(numbers))
    assert [n for begin, end in ranges for n in range(begin, end)] == numbers
    # None could be longer.
    assert all(end != begin for (_, end), (begin, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("numbers", "left"),
    [
        (list(range(5, 30)), 0),
        ([*range(9, 20), *range(3), *range(20, 36), 0], 0),
        ([0, 2, 3, 4, 5, 9, 11], 1),  # four ranges of seven
        ([3, 1, 2], 1),
        ([7] * 20, 1),
        ([], 1),
    ],
)
def test_long_ranges_are_taken_as_such(numbers: list[int], left: int) -> None:
    net = Taking(numbers)
    program = exported(net)
    gathers.take_ranges(program)
    assert gathered(program) == left
    x_BC = torch.randn(11, COLUMNS)
    assert torch.equal(program.module()(x_BC), net(x_BC))


def test_numbers_that_a_request_brings_are_left() -> None:
    class Given(nn.Module):
        def forward(self, x_BC: Tensor, numbers: Tensor) -> Tensor:
            return x_BC.index_select(1, numbers)

    numbers = torch.arange(20)
    program = torch.export.export(Given(), (torch.zeros(3, COLUMNS), numbers))
    gathers.take_ranges(program)
    assert gathered(program) == 1
    x_BC = torch.randn(3, COLUMNS)
    assert torch.equal(program.module()(x_BC, numbers + 7), x_BC[:, 7:27])


def test_the_pairs_of_dlrm_are_copied_by_ranges(tmp_path: Path) -> None:
    torch.manual_seed(3)
    features = tuple(FeatureConfig(name=f"f{f}", table="cand") for f in range(20))
    config = dataclasses.replace(news_model(), features=features)
    net, path = Probability(Dlrm(config)).eval(), tmp_path / "net.pt2"
    widths = config.dense_columns, sum(config.feature_widths)
    tensors = named_tensors(net)
    with quiet_torch():
        programs = export._programs(net, tensors, *widths, 1)
    assert {gathered(each) for each in programs.values()} == {0}
    export.export_dense(net, path, dense_features=widths[0], embedding_dim=widths[1])
    program: Any = load_package(str(path), "model")
    given = [torch.randn(9, width) for width in widths]
    with torch.no_grad():
        scores = program(*given, *tensors.values())
        torch.testing.assert_close(scores, net(*given), rtol=0, atol=1e-6)
