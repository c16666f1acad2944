"""The search for the cheapest of equal graphs, its measured costs, and its explanation."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drawn_nets import DrawnNet
from rewriting import Net, drawn, named, of_features
from torch import Tensor, nn

from embertide.trainer.model.build import build_net
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.export import named_tensors
from embertide.trainer.model.rewrite.check import TOLERANCE
from embertide.trainer.model.rewrite.costs import MeasuredCosts, graph_cost
from embertide.trainer.model.rewrite.explain import explain
from embertide.trainer.model.rewrite.graph import ROWS, USERS, Graph, Mark, Pseudo, Value, make
from embertide.trainer.model.rewrite.programs import exported_run, tensors_for_run, tensors_of
from embertide.trainer.model.rewrite.reading import Contexts
from embertide.trainer.model.rewrite.rowwise import MOVING
from embertide.trainer.model.rewrite.search import search
from embertide.trainer.presets import PRESETS

OF_USER = Contexts(dense=(True,) * 4, embeddings=(True,) * 8 + (False,) * 8)


def counted(value: Value) -> float:
    """A cost that no machine changes: products and copied numbers, of one user's 256 candidates."""
    if value.mark is Mark.FIXED or isinstance(value.op, Pseudo):
        return 0
    rows = {USERS: 1, ROWS: 256}
    size = math.prod(rows.get(each, each) for each in value.shape)
    name = str(value.op)
    if name.startswith(("aten.linear", "aten.bmm")):
        return size * value.inputs[0].shape[-1] / 8
    view = value.op in MOVING and not name.startswith(("aten.cat", "aten.index_select"))
    return 0 if view else size


def news(net: str = "dlrm") -> Net:
    config = dataclasses.replace(PRESETS["news"](), net=net)
    torch.manual_seed(1)
    return Net.of(Probability(build_net(config)), of_features(config, {"cand"}))


def test_what_is_slower_by_itself_leads_to_what_is_faster() -> None:
    net = news("deepfm")
    greedy = search(net.graph, counted, net.check.same, alpha=1.0)
    relaxed = search(net.graph, counted, net.check.same, alpha=1.05)
    assert "split function" not in greedy.steps
    assert "split function" in relaxed.steps
    assert relaxed.cost_us < greedy.cost_us < greedy.before_us
    assert net.difference(relaxed.graph) <= TOLERANCE


@pytest.mark.parametrize("operators", [5, 14, 23, 32, 40])
def test_what_is_found_has_the_scores_of_random_nets(operators: int) -> None:
    net = Net.of(DrawnNet(operators, operators, 4, 16), drawn(operators, 4, 16))
    found = search(net.graph, counted, net.check.same, budget=10)
    assert net.difference(found.graph) <= TOLERANCE
    assert found.cost_us == graph_cost(found.graph, counted) <= found.before_us


def test_a_rule_that_changes_scores_is_put_aside() -> None:
    def double(graph: Graph) -> Iterator[Graph]:
        (score,) = graph.outputs
        yield Graph((make(torch.ops.aten.mul.Tensor, score, 1.00001),))

    net = news()
    found = search(net.graph, lambda value: 0.0, net.check.same, rules={"double": double})
    assert found.refused == {"double": 1}
    assert found.graph.digest == net.graph.digest


def test_the_budget_bounds_the_graphs_that_are_taken() -> None:
    taken = []

    def longer(graph: Graph) -> Iterator[Graph]:
        taken.append(graph)
        (score,) = graph.outputs
        yield Graph((make(torch.ops.aten.neg.default, score),))

    net = news()
    search(net.graph, lambda value: 0.0, lambda graph: True, budget=7, rules={"longer": longer})
    assert len(taken) == 7


def test_a_search_is_the_same_with_the_same_file_of_costs(tmp_path: Path) -> None:
    net, file = news(), tmp_path / "costs.json"
    first = MeasuredCosts(file)
    found = search(net.graph, first, net.check.same, budget=5)
    first.save()
    again = MeasuredCosts(file)
    same = search(net.graph, again, net.check.same, budget=5)
    assert first.measured > 0
    assert again.measured == 0
    assert (same.graph.digest, same.cost_us) == (found.graph.digest, found.cost_us)


def test_costs_of_another_machine_are_measured_anew(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    layer = named(news().graph, "linear")[0]
    (first := MeasuredCosts(file))(layer)
    first.save()
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, "cpu": "another"}))
    (other := MeasuredCosts(file))(layer)
    assert other.measured == first.measured == 1


def test_it_is_exported_for_any_numbers_of_users_and_candidates() -> None:
    net = news()
    found = search(net.graph, counted, net.check.same)
    tensors = named_tensors(net.module)
    program = exported_run(found.graph, net.contexts, tensors).module(check_guards=False)
    taken = tensors_for_run(tensors_of(found.graph), tensors)
    for users, candidates in ((1, 9), (5, 4)):
        split, user_of_row = net.request(users, candidates)
        (scores,) = program(*split, user_of_row, *taken)
        assert scores.shape == (candidates,)


class Sorted(nn.Module):
    """A net with what rules do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 1)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        flipped = embeddings[:, :8].flip(1)
        made: Tensor = self.layer(torch.cat([dense, flipped, embeddings[:, 8:]], 1))
        return made.squeeze(1)


def test_what_could_not_be_used_is_named() -> None:
    said = explain(Sorted().eval(), OF_USER, None)
    assert (said.context_columns, said.columns) == (12, 20)
    assert "flip is not known to work row by row: computed for each candidate" in said.left
    assert said.lines()[0].startswith("one user, 256 candidates: ")
