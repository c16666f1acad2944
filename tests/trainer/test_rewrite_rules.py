"""Rules of rewriting: each gives graphs of the same scores, and does what it is for."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from drawn_nets import DrawnNet
from rewriting import Net, drawn, named, of_features
from torch import Tensor, nn

from embertide.trainer.config import DenseConfig, ModelConfig
from embertide.trainer.model.build import build_net
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.history import SequenceNet
from embertide.trainer.model.rewrite.check import TOLERANCE
from embertide.trainer.model.rewrite.graph import Graph, Mark, RewriteError
from embertide.trainer.model.rewrite.programs import (
    by_one_matrix,
    by_user_matrix,
    multiplies_gathered,
    tensors_of,
)
from embertide.trainer.model.rewrite.reading import Contexts
from embertide.trainer.model.rewrite.rules import RULES, RULES_OF_ONE_USER, Rule
from embertide.trainer.presets import PRESETS

SHOWN = {"cand", "prev_cand", "ref_cand", "device_cand"}


def _dense(net: str) -> ModelConfig:
    dense = tuple(DenseConfig(name=f"dense{i}") for i in range(3))
    return dataclasses.replace(PRESETS["news"](), dense=dense, net=net)


def _ours() -> dict[str, ModelConfig]:
    return {
        "dlrm": PRESETS["news"](),
        "dcn_v2": dataclasses.replace(_dense("dcn_v2"), cross_rank=8),
        "deepfm": _dense("deepfm"),
        "history": PRESETS["news-history"](),
        "crossed": PRESETS["news-crossed"](),
        "hstu": PRESETS["news-hstu"](),
    }


class Towers(nn.Module):
    """Two towers and their product: a net of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.item = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU())
        self.end = nn.Linear(16, 1)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        user = self.user(torch.cat([dense, embeddings[:, :8]], dim=1))
        both = user * self.item(embeddings[:, 8:])
        return torch.sigmoid(self.end(both))


class Experts(nn.Module):
    """A mixture of layers of one input, with weights from the user: a net of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(20, 6) for _ in range(3))
        self.gate = nn.Linear(12, 3)
        self.end = nn.Linear(6, 1)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = torch.cat([dense, embeddings], dim=1)
        made = torch.stack([torch.relu(each(x)) for each in self.experts], dim=1)
        gate = torch.softmax(self.gate(torch.cat([dense, embeddings[:, :8]], 1)), dim=1)
        return torch.sigmoid(self.end((made * gate.unsqueeze(2)).sum(1))).squeeze(1)


class Attended(nn.Module):
    """Softmax attention of a candidate over the user's vectors: a net of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4, bias=False), nn.Linear(4, 4)
        self.end = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        items = embeddings[:, :8].view(embeddings.shape[0], 2, 4)
        query = self.query(embeddings[:, 8:]).unsqueeze(2)
        weight = torch.softmax(torch.matmul(self.key(items), query).squeeze(2), dim=1)
        pooled = (items * weight.unsqueeze(2)).sum(1) * self.scale
        return torch.sigmoid(self.end(torch.cat([pooled, dense, embeddings[:, 8:]], 1))).view(-1)


OWN = {"towers": Towers, "experts": Experts, "attended": Attended}
OF_USER = Contexts(dense=(True,) * 4, embeddings=(True,) * 8 + (False,) * 8)


def net_of(name: str) -> Net:
    torch.manual_seed(3)
    if name in OWN:
        return Net.of(OWN[name](), OF_USER)
    config = _ours()[name]
    net = build_net(config)
    lengths, gaps = dict[int, int](), list[int]()
    if isinstance(net, SequenceNet):
        for column, length, width in zip(
            net.length_columns, net.lengths, net.gap_widths, strict=True
        ):
            lengths[column] = length
            gaps += range(column + 2, column + 2 + width)
        for each in net.attention.parameters():  # what is attended to is to matter
            each.data = 3 * each.data + 0.1 * torch.randn_like(each)
    contexts = of_features(config, SHOWN)
    return Net.of(Probability(net), contexts, lengths=lengths, gaps=gaps)


def reached(
    graph: Graph, most: int, rules: Mapping[str, Rule] = RULES
) -> Iterator[tuple[str, Graph]]:
    """Give graphs that rules lead to, breadth first."""
    seen, waiting = {graph.digest}, [graph]
    while waiting:
        taken = waiting.pop(0)
        for name, rule in rules.items():
            for other in rule(taken):
                if other.digest in seen:
                    continue
                seen.add(other.digest)
                waiting.append(other)
                yield name, other
                if len(seen) > most:
                    return


@pytest.mark.parametrize("name", [*_ours(), *OWN])
def test_rules_keep_the_scores_of_nets(name: str) -> None:
    net = net_of(name)
    assert net.difference(net.graph) <= TOLERANCE
    found = list(reached(net.graph, 20))
    assert found
    for rule, graph in found:
        assert net.difference(graph) <= TOLERANCE, rule


@pytest.mark.parametrize("operators", range(2, 41, 2))
def test_rules_keep_the_scores_of_random_nets(operators: int) -> None:
    net = Net.of(DrawnNet(operators, operators, 4, 16), drawn(operators, 4, 16))
    assert net.difference(net.graph) <= TOLERANCE
    for rule, graph in reached(net.graph, 12):
        assert net.difference(graph) <= TOLERANCE, rule


def only(net: Net, *rules: str) -> Graph:
    """Return the graph after rules, each as often as it gives another one."""
    graph = net.graph
    for rule in rules:
        while (other := next(RULES[rule](graph), None)) is not None:
            graph = other
    assert net.difference(graph) <= TOLERANCE
    return graph


class _Layer(nn.Module):
    def __init__(self, forward: Callable[["_Layer", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._forward = forward
        self.layer, self.other = nn.Linear(16, 5), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16)
        self.after = nn.LayerNorm(16)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return self._forward(self, dense, embeddings).sum(1)


def layer(forward: Callable[[_Layer, Tensor, Tensor], Tensor]) -> Net:
    torch.manual_seed(4)
    made = _Layer(forward)
    for tensor in made.buffers():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2)
    return Net.of(made, OF_USER)


def test_what_depends_on_the_context_is_computed_for_users() -> None:
    graph = only(net_of("towers"), "hoist")
    of_users = [each for each in named(graph, "linear") if each.mark is Mark.CONTEXT]
    assert [each.shape[1] for each in of_users] == [16]
    assert all(each.mark is Mark.CONTEXT for each in named(graph, "batch_norm"))


def test_a_layer_is_split_by_what_its_columns_depend_on() -> None:
    net = layer(lambda self, dense, embeddings: self.layer(embeddings))
    layers = named(only(net, "split linear"), "linear")
    assert sorted((each.mark, each.inputs[0].shape[1]) for each in layers) == [
        (Mark.CONTEXT, 8),
        (Mark.CANDIDATE, 8),
    ]


def test_weights_of_a_split_are_prepared_once_a_version() -> None:
    net = layer(lambda self, dense, embeddings: self.layer(embeddings))
    tensors = tensors_of(only(net, "split linear"))
    assert [each.shape for each in tensors.prepared] == [(5, 8), (5, 8)]
    assert tensors.direct == ("layer.bias",)


def test_products_of_two_vectors_of_a_user_are_computed_once() -> None:
    graph = only(net_of("dlrm"), "split interaction")
    products = named(graph, "bmm")
    assert {(each.mark, each.shape[1:]) for each in products} == {
        (Mark.CONTEXT, (9, 9)),
        (Mark.CANDIDATE, (1, 9)),
        (Mark.CANDIDATE, (1, 1)),
    }
    # With the user's vectors by a matrix that is never copied for a candidate.
    (mixed,) = (each for each in products if multiplies_gathered(each))
    assert mixed.shape[1:] == (1, 9)


def test_what_becomes_of_a_history_is_computed_once_a_user() -> None:
    graph = only(net_of("hstu"), "hoist")
    (items,) = (each for each in named(graph, "matmul") if each.shape[2:] == (20, 20))
    assert items.mark is Mark.CONTEXT
    # The candidate keeps its scores and sums, in both layers.
    of_candidates = [each for each in named(graph, "matmul") if each.mark is Mark.CANDIDATE]
    assert sorted(each.shape[1:] for each in of_candidates) == [(2, 1, 16)] * 2 + [(2, 1, 20)] * 2
    projected = [each for each in named(graph, "linear") if each.shape[2:] == (4 * 32,)]
    rows = {Mark.CANDIDATE: 1, Mark.CONTEXT: 20}
    assert {(each.mark, each.shape[1]) for each in projected} == set(rows.items())


@pytest.mark.parametrize("name", [*_ours(), *OWN])
def test_of_one_user_nothing_is_copied_for_its_candidates(name: str) -> None:
    net = net_of(name)
    graph = next(RULES["hoist"](net.graph))
    assert net.difference(graph, users=1, one_user=True) <= TOLERANCE
    products = [each for each in graph.values if multiplies_gathered(each)]
    assert len(products) == {"hstu": 4, "history": 1, "crossed": 1}.get(name, 0)


@pytest.mark.parametrize(("between", "candidates"), [((), 7), ((), 1), ((2,), 7), ((2, 3), 5)])
def test_rows_times_the_one_matrix_are_the_products_with_its_copies(
    between: tuple[int, ...], candidates: int
) -> None:
    rows = torch.randn(candidates, *between, 4, 6)
    matrix = torch.randn(1, *between, 6, 5)
    torch.testing.assert_close(by_one_matrix(rows, matrix), rows @ matrix)


def test_the_one_matrix_multiplies_weights() -> None:
    weights, matrix = torch.randn(8, 6), torch.randn(1, 6, 5)
    torch.testing.assert_close(by_one_matrix(weights, matrix), weights @ matrix)


@pytest.mark.parametrize("name", _ours())
def test_rules_of_one_user_keep_the_scores_of_nets(name: str) -> None:
    net = net_of(name)
    graph = only(net, "hoist", "split linear", "split interaction")
    found = list(reached(graph, 20, RULES_OF_ONE_USER))
    for rule, other in found:
        assert net.difference(other, users=1, one_user=True) <= TOLERANCE, rule
    by_user = [rule for rule, _ in found if rule == "weights of a user"]
    assert bool(by_user) == (name in {"dlrm", "history", "crossed", "hstu"})


def two_vectors_shown() -> Net:
    """Return a DLRM of two vectors of a candidate, which its first layer does not see."""
    config = dataclasses.replace(_dense("dlrm"), top_sees_embeddings=False)
    return Net.of(Probability(build_net(config)), of_features(config, {"cand", "prev"}))


@pytest.mark.parametrize("make", [lambda: net_of("dlrm"), two_vectors_shown], ids=["seen", "not"])
def test_a_layer_over_products_has_weights_of_the_user(make: Callable[[], Net]) -> None:
    net = make()
    graph = only(net, "split linear", "split interaction")
    for name in ("split linear", "weights of a user", "split linear"):
        graph = next(RULES_OF_ONE_USER[name](graph), graph)
    assert net.difference(graph, users=1, one_user=True) <= TOLERANCE
    assert net.difference(graph) <= TOLERANCE  # and of many, copied
    # The products themselves are needed no more.
    weights, layer = (each for each in graph.values if by_user_matrix(each))
    assert (weights.mark, layer.mark) == (Mark.CONTEXT, Mark.CANDIDATE)
    assert layer.shape[1:] == (1, 256)


def test_a_target_beside_each_item_is_multiplied_once() -> None:
    graph = only(net_of("history"), "widen sum", "split linear")
    first = [each for each in named(graph, "linear") if each.inputs[1].shape[0] == 32]
    shapes = {(each.mark, each.shape[1:], each.inputs[0].shape[-1]) for each in first}
    # The items' columns, their products with the target, and the target alone.
    assert (Mark.CONTEXT, (10, 32), 32) in shapes
    assert (Mark.CANDIDATE, (10, 32), 32) in shapes
    assert (Mark.CANDIDATE, (1, 32), 32) in shapes


def test_parallel_layers_become_one() -> None:
    net = layer(lambda s, d, e: torch.cat([s.layer(e), torch.relu(s.other(e))], dim=1))
    (merged,) = named(only(net, "merge linears"), "linear")
    assert merged.shape[1] == 8


@pytest.mark.parametrize("norm", ["norm", "after"])
def test_a_norm_is_folded_into_the_next_layer(norm: str) -> None:
    net = layer(lambda self, dense, embeddings: self.layer(getattr(self, norm)(embeddings)))
    graph = only(net, "fold normalisation")
    assert not named(graph, "batch_norm")
    assert all(each.args[2:4] == (None, None) for each in named(graph, "layer_norm"))


def test_a_factor_is_folded_into_the_layer_before() -> None:
    net = layer(lambda self, dense, embeddings: self.layer(embeddings) * 3 - self.layer.bias)
    graph = only(net, "fold normalisation")
    assert not [each for each in named(graph, "mul") + named(graph, "sub") if each.mark]


def test_what_is_computed_twice_is_one_value() -> None:
    net = layer(lambda s, d, e: torch.cat([s.layer(e), torch.relu(s.layer(e))], dim=1))
    assert len(named(net.graph, "linear")) == 1


def test_a_sum_along_rows_is_left_to_candidates() -> None:
    net = layer(lambda s, d, e: s.layer(e) + e[:, :8].softmax(0).sum(1, keepdim=True))
    graph = only(net, "hoist", "straighten", "split linear")
    assert [each.mark for each in named(graph, "softmax")] == [Mark.CANDIDATE]


def test_users_may_be_one_or_as_many_as_candidates() -> None:
    net = net_of("crossed")
    graph = only(net, "split linear", "hoist")
    for users, candidates in ((1, 5), (1, 1), (4, 4), (6, 2)):
        assert net.difference(graph, users, candidates) <= TOLERANCE


def test_a_function_in_place_is_one_that_is_not() -> None:
    def forward(self: _Layer, dense: Tensor, embeddings: Tensor) -> Tensor:
        made: Tensor = self.layer(embeddings)
        return made + torch.relu_(made) + torch.zeros(embeddings.shape[0] * 2, 5)[::2]

    assert only(layer(forward), "split linear")


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        made: Tensor = self.layer(embeddings)
        return made


def test_several_heads_are_several_scores() -> None:
    net = Net.of(Tasks(), OF_USER)
    assert [each.shape[1:] for each in net.graph.outputs] == [(), ()]
    assert all(net.check.same(graph) for _, graph in reached(net.graph, 10))


REFUSED: dict[str, tuple[Callable[[_Layer, Tensor, Tensor], Tensor], str]] = {
    "no candidate": (lambda s, d, e: s.layer.weight, "does not depend on candidates"),
    "numbers of rows": (
        lambda s, d, e: s.layer(e) + torch.zeros(e.shape[0] + 1, 5)[1:],
        "of the number of candidates gives no multiple",
    ),
    "large": (lambda s, d, e: s.layer(e) + 10_007, "10007 stands for numbers of rows"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_graphs_cannot_say_is_refused(what: str) -> None:
    forward, message = REFUSED[what]
    with pytest.raises(RewriteError, match=message):
        layer(forward)
