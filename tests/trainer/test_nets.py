"""Each net computes what its paper says; all of them learn, and export for serving.

Shapes: B samples, F features, L places of a sequence, vectors of width d.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from embertide import _store
from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    SequenceConfig,
    TableConfig,
)
from embertide.trainer.data.base import PADDING_KEY
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.model.build import build_net
from embertide.trainer.model.dcn import DcnV2
from embertide.trainer.model.deepfm import DeepFm
from embertide.trainer.model.dlrm import Probability
from embertide.trainer.model.foreign import DenseShape, export_folder, largest_difference
from embertide.trainer.model.history import Attention, HistoryNet
from embertide.trainer.model.hstu import Hstu, Layer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
DIM, LENGTH = 4, 3
PLAIN = ModelConfig(
    name="m",
    tables=(TableConfig(name="item", dim=DIM), TableConfig(name="user", dim=DIM)),
    features=(
        FeatureConfig(name="user", table="user"),
        FeatureConfig(name="shown", table="item"),
        FeatureConfig(name="before", table="item"),
    ),
    dense=(DenseConfig(name="price"), DenseConfig(name="age")),
    bottom_mlp=(5,),
    top_mlp=(6,),
)
LOOKING_BACK = dataclasses.replace(
    PLAIN,
    net="history",
    sequences=(SequenceConfig(name="liked", user="user", item="shown", length=LENGTH),),
)
HSTU = dataclasses.replace(
    LOOKING_BACK,
    net="hstu",
    sequences=(dataclasses.replace(LOOKING_BACK.sequences[0], times=True),),
)
# The article shown and that before; the user's default stays zeros.
LEARNED = (
    PLAIN.features[0],
    *(dataclasses.replace(each, learned_default=True) for each in PLAIN.features[1:]),
)
MODELS: dict[str, ModelConfig] = {
    "dlrm": PLAIN,
    "dlrm with learned defaults": dataclasses.replace(PLAIN, features=LEARNED),
    "history with learned defaults": dataclasses.replace(LOOKING_BACK, features=LEARNED),
    "dcn_v2": dataclasses.replace(PLAIN, net="dcn_v2"),
    "dcn_v2 of rank 2": dataclasses.replace(PLAIN, net="dcn_v2", cross_rank=2),
    "deepfm": dataclasses.replace(PLAIN, net="deepfm"),
    "history": LOOKING_BACK,
    "hstu": HSTU,
    "hstu without times": dataclasses.replace(
        LOOKING_BACK, net="hstu", sequence_layers=1, sequence_heads=1
    ),
}


def inputs(config: ModelConfig, batch: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random (dense_BD, embeddings_BE); sequences of every length."""
    generator = torch.Generator().manual_seed(seed)
    dense_BD = torch.randn(batch, config.dense_columns, generator=generator)
    if config.sequences:
        first = config.dense_features
        dense_BD[:, first] = torch.arange(batch) % (LENGTH + 1)
        # Seconds to days before the newest, the newest first.
        gaps = dense_BD[:, first + 2 :]
        gaps.copy_(torch.arange(gaps.shape[1]) * 600.0 ** torch.rand(gaps.shape))
    return dense_BD, torch.randn(batch, sum(config.feature_dims), generator=generator)


def by_hand(layers: nn.Module, x: Tensor) -> Tensor:
    """An MLP written out."""
    linear = [each for each in layers.modules() if isinstance(each, nn.Linear)]
    for i, layer in enumerate(linear):
        x = layer.weight @ x + layer.bias
        if i + 1 < len(linear):
            x = x.clamp(min=0)
    return x


@pytest.mark.parametrize("name", MODELS)
def test_a_net_gives_a_logit_a_sample_whatever_the_batch(name: str) -> None:
    config = MODELS[name]
    torch.manual_seed(1)
    net = build_net(config)
    dense_BD, embeddings_BE = inputs(config, 9)
    logits_B = net(dense_BD, embeddings_BE)
    assert logits_B.shape == (9,)
    assert len(torch.unique(logits_B)) == 9
    one_by_one = [net(dense_BD[b : b + 1], embeddings_BE[b : b + 1]) for b in range(9)]
    torch.testing.assert_close(logits_B, torch.cat(one_by_one))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_cross_layer_is_the_papers(rank: int) -> None:
    config = dataclasses.replace(PLAIN, net="dcn_v2", cross_rank=rank, dense=())
    torch.manual_seed(2)
    net = DcnV2(config)
    dense_BD, embeddings_BE = inputs(config, 1)
    x0_n = x_n = embeddings_BE[0]
    for matrix in net.cross:
        linear = [each for each in matrix.modules() if isinstance(each, nn.Linear)]
        assert linear[0].weight.shape == ((rank, len(x0_n)) if rank else (len(x0_n),) * 2)
        weight = linear[1].weight @ linear[0].weight if rank else linear[0].weight
        x_n = x0_n * (weight @ x_n + linear[-1].bias) + x_n
    torch.testing.assert_close(net(dense_BD, embeddings_BE), by_hand(net.top, x_n))


def test_deepfm_adds_pairs_of_factors_first_orders_and_the_deep_part() -> None:
    config = dataclasses.replace(PLAIN, net="deepfm", dense=())
    torch.manual_seed(3)
    net = DeepFm(config)
    nn.init.constant_(net.bias, 0.5)
    dense_BD, embeddings_BE = inputs(config, 1)
    vectors = list(embeddings_BE[0].reshape(-1, DIM))
    logit = net.bias + sum(vector[0] for vector in vectors)
    for one, other in itertools.combinations(vectors, 2):
        logit = logit + one[1:] @ other[1:]
    logit = logit + by_hand(net.deep, torch.cat([vector[1:] for vector in vectors]))
    torch.testing.assert_close(net(dense_BD, embeddings_BE), logit)


def test_attention_weighs_each_item_by_the_target_and_skips_places_not_taken() -> None:
    torch.manual_seed(4)
    attention = Attention(DIM, LENGTH, (5,))
    target_Bd, items_BLd = torch.randn(LENGTH + 1, DIM), torch.randn(LENGTH + 1, LENGTH, DIM)
    pooled_Bd = attention(
        target_Bd, items_BLd, torch.arange(LENGTH + 1).float(), torch.zeros(LENGTH + 1, 0)
    )
    for taken in range(LENGTH + 1):
        target, pooled = target_Bd[taken], torch.zeros(DIM)
        for item in items_BLd[taken, :taken]:
            weight = by_hand(
                attention.weigh, torch.cat([item, target, item * target, item - target])
            )
            pooled = pooled + weight * item
        torch.testing.assert_close(pooled_Bd[taken], pooled)


def _buckets(seconds: float) -> int:
    """Return the bucket of a time: two to each doubling."""
    return sum(seconds >= 2 ** (k / 2) - 1 for k in range(1, 49))


def _by_hand(hstu: Hstu, target_d: Tensor, items_Ld: Tensor, gap_L: Tensor) -> Tensor:
    """Return all that layers add to a candidate, token by token; items come newest first."""
    tokens: list[Tensor] = [target_d, *items_Ld]
    since = [0.0, *gap_L.tolist()]
    width = DIM // hstu.heads
    for n, layer in enumerate(hstu.layers):
        assert isinstance(layer, Layer)
        split = [nn.functional.silu(layer.project(token)).split(DIM) for token in tokens]
        after = []
        for i, (u, _, q, _) in enumerate(split):
            attended = []
            for h in range(hstu.heads):
                of_head = slice(h * width, (h + 1) * width)
                total, bias = torch.zeros(width), n * hstu.heads + h
                for j in range(i, len(tokens)):  # itself, and what is older
                    score = q[of_head] @ split[j][3][of_head] + hstu.position_NL[bias, j - i]
                    if hstu.times:
                        score = score + hstu.time_EN[_buckets(since[j] - since[i]), bias]
                    total = total + nn.functional.silu(score) * split[j][1][of_head]
                attended.append(total / len(tokens))
            after.append(tokens[i] + layer.merge(u * torch.cat(attended)))
        tokens = after
    return tokens[0] - target_d


def test_times_in_milliseconds_have_the_buckets_of_their_edges() -> None:
    hstu = Hstu(DIM, HSTU.sequences[0], 1, 1)
    hstu.time_EN.data = torch.arange(len(hstu.time_EN), dtype=torch.float32).unsqueeze(1)
    edges = torch.tensor([2 ** (k / 2) - 1 for k in range(1, 49)], dtype=torch.float64)
    at_edges = torch.cat([(edges * 1000).floor() + delta for delta in range(-2, 4)])
    ms = torch.cat([at_edges.clamp_min(0), torch.arange(100_000.0)]).double()
    gap_UT = (ms / 1000).float().reshape(1, -1)
    bias = hstu._of_time(gap_UT.unsqueeze(1), 1)
    wanted = torch.bucketize(gap_UT, edges.float(), right=True)
    assert int(wanted.max()) == 48
    torch.testing.assert_close(bias.reshape(1, -1), wanted.float(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["hstu", "hstu without times"])
def test_hstu_attends_from_each_token_to_itself_and_to_older_ones(name: str) -> None:
    config = MODELS[name]
    torch.manual_seed(4)
    hstu = Hstu(DIM, config.sequences[0], config.sequence_layers, config.sequence_heads)
    for bias in (hstu.position_NL, *([hstu.time_EN] if hstu.times else [])):
        nn.init.normal_(bias)
    target_Bd, items_BLd = torch.randn(LENGTH + 1, DIM), torch.randn(LENGTH + 1, LENGTH, DIM)
    gap_BT = torch.tensor([[0.0, 3.0, 5000.0]]).repeat(LENGTH + 1, 1)
    if not hstu.times:
        gap_BT = gap_BT[:, :0]
    pooled_Bd = hstu(target_Bd, items_BLd, torch.arange(LENGTH + 1).float(), gap_BT)
    for taken in range(LENGTH + 1):
        gap_L = gap_BT[taken, :taken] if hstu.times else torch.zeros(taken)
        wanted_d = _by_hand(hstu, target_Bd[taken], items_BLd[taken, :taken], gap_L)
        torch.testing.assert_close(pooled_Bd[taken], wanted_d)


def test_neighbours_of_one_sequence_learn_as_if_each_had_its_own() -> None:
    torch.manual_seed(6)
    config = HSTU
    net = build_net(config)
    dense_BD, embeddings_BE = (each.repeat_interleave(3, 0) for each in inputs(config, 4))
    embeddings_BE[:, DIM : 2 * DIM] = torch.randn(12, DIM)  # of each candidate
    gradients = []
    for is_training in (True, False):  # only a net in training looks for them
        net.train(is_training)
        net.zero_grad()
        given_BE = embeddings_BE.clone().requires_grad_()
        logits_B = net(dense_BD, given_BE)
        (logits_B * torch.arange(1.0, 13)).sum().backward()
        assert given_BE.grad is not None
        weights = [each.grad.clone() for each in net.parameters() if each.grad is not None]
        # A row's gradient is the sum over the samples of its key.
        of_rows = given_BE.grad.reshape(4, 3, -1).sum(1)
        gradients.append([logits_B.detach(), of_rows, *weights])
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["history", "hstu"])
def test_what_stands_in_a_place_not_taken_changes_nothing_and_learns_nothing(name: str) -> None:
    config = MODELS[name]
    torch.manual_seed(5)
    net = build_net(config)
    dense_BD, embeddings_BE = inputs(config, LENGTH + 1)
    other_BE = embeddings_BE.clone()
    first = len(PLAIN.features) * DIM
    for taken in range(LENGTH + 1):
        other_BE[taken, first + taken * DIM :] += 3
    embeddings_BE.requires_grad_()
    logits_B = net(dense_BD, embeddings_BE)
    torch.testing.assert_close(net(dense_BD, other_BE), logits_B, rtol=0, atol=0)
    logits_B.sum().backward()
    assert embeddings_BE.grad is not None
    for taken in range(LENGTH + 1):
        gradient = embeddings_BE.grad[taken, first:].reshape(LENGTH, DIM)
        assert not gradient[taken:].any()
        assert gradient[:taken].any(1).all()


def test_after_attention_a_sequence_is_one_feature_more_of_a_dlrm() -> None:
    torch.manual_seed(6)
    net = HistoryNet(LOOKING_BACK)
    dense_BD, embeddings_BE = inputs(LOOKING_BACK, 4)
    first = len(PLAIN.features) * DIM
    (attention,) = net.attention
    items_BLd = embeddings_BE[:, first:].reshape(4, LENGTH, DIM)
    target_Bd, none_BT = embeddings_BE[:, DIM : 2 * DIM], dense_BD[:, 4:]
    pooled_Bd = attention(target_Bd, items_BLd, dense_BD[:, 2], none_BT)
    scaled_BD = dense_BD.clone()
    scaled_BD[:, 2] /= LENGTH
    wanted_B = net.dlrm(scaled_BD, torch.cat([embeddings_BE[:, :first], pooled_Bd], 1))
    torch.testing.assert_close(net(dense_BD, embeddings_BE), wanted_B)


@pytest.mark.parametrize("name", MODELS)
def test_a_net_and_its_rows_learn_what_only_two_features_together_tell(name: str) -> None:
    config = dataclasses.replace(MODELS[name], dense=())
    torch.manual_seed(7)
    torch.set_num_threads(1)
    net = build_net(config)
    rows = EmbeddingStore(config, optimizer=OptimizerConfig(sparse_learning_rate=0.1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    rng = np.random.default_rng(7)
    losses = []
    for _ in range(200):
        keys_BF = rng.integers(0, 4, (32, len(config.columns)))
        label_B = torch.from_numpy(((keys_BF[:, 0] + keys_BF[:, 1]) % 2).astype(np.float32))
        dense_BD = torch.zeros(32, config.dense_columns)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(net(dense_BD, rows(keys_BF)), label_B)
        loss.backward()
        optimizer.step()
        rows.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 0.6
    assert np.mean(losses[-20:]) < 0.1


def test_a_place_not_taken_gets_no_row_and_items_share_theirs() -> None:
    net, rows = build_net(LOOKING_BACK), EmbeddingStore(LOOKING_BACK)
    none = PADDING_KEY
    keys_BF = np.array([[1, 10, 11, 12, none, none], [2, 10, 12, none, none, none]])
    dense_BD = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.float32)
    net(dense_BD, rows(keys_BF)).sum().backward()
    assert rows.step() == 5
    layout = rows.tables[0].layout
    items, users = (_store.record_keys(layout, rows.store.export_bucket(t, 0)) for t in (0, 1))
    assert sorted(items) == [10, 11, 12]
    assert sorted(users) == [1, 2]


def without(embeddings_BE: Tensor, sample: int, *features: int) -> None:
    """Make features of a sample read as those of keys without a row do."""
    for f in features:
        embeddings_BE[sample, f * DIM : (f + 1) * DIM] = 0


@pytest.mark.parametrize("name", ["dlrm", "history"])
def test_what_has_no_row_reads_as_its_features_learned_default(name: str) -> None:
    torch.manual_seed(9)
    plain = build_net(MODELS[name])
    net = build_net(MODELS[f"{name} with learned defaults"])
    net.load_state_dict(plain.state_dict(), strict=False)
    dense_BD, embeddings_BE = inputs(MODELS[name], 5)
    without(embeddings_BE, 0, 0)
    without(embeddings_BE, 1, 1)
    without(embeddings_BE, 2, 0, 1, 2)
    embeddings_BE[3, DIM] = 0  # a value of a row may be
    torch.testing.assert_close(net(dense_BD, embeddings_BE), plain(dense_BD, embeddings_BE))
    (default_E,) = (p for n, p in net.named_parameters() if n.endswith("default_E"))
    with torch.no_grad():
        default_E.copy_(torch.randn(default_E.shape))
    read_BE = embeddings_BE.clone()
    read_BE[1, DIM : 2 * DIM] = default_E.detach()[DIM : 2 * DIM]
    read_BE[2, DIM : 3 * DIM] = default_E.detach()[DIM : 3 * DIM]
    torch.testing.assert_close(net(dense_BD, embeddings_BE), plain(dense_BD, read_BE))


def test_a_key_without_a_row_earns_one_and_teaches_its_default() -> None:
    torch.manual_seed(10)
    net = build_net(MODELS["dlrm with learned defaults"])
    dense_BD, embeddings_BE = inputs(PLAIN, 3)
    without(embeddings_BE, 0, 0)
    without(embeddings_BE, 1, 1)
    embeddings_BE.requires_grad_()
    net(dense_BD, embeddings_BE).sum().backward()
    (default_E,) = (p for n, p in net.named_parameters() if n.endswith("default_E"))
    assert embeddings_BE.grad is not None
    assert default_E.grad is not None
    gradient_BFd = embeddings_BE.grad.reshape(3, 3, DIM)
    assert gradient_BFd.any(2).all()
    torch.testing.assert_close(default_E.grad.reshape(3, DIM)[1], gradient_BFd[1, 1])
    assert not default_E.grad.reshape(3, DIM)[[0, 2]].any()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "net": (
        {"net": "wide"},
        "there is no net 'wide'; use one of dlrm, dcn_v2, deepfm, history, hstu",
    ),
    "no sequence": ({"net": "history"}, "net 'history' with 0 sequences"),
    "not for it": ({"sequences": LOOKING_BACK.sequences}, "net 'dlrm' with 1 sequences"),
    "feature": (
        {"net": "history", "sequences": (SequenceConfig(name="s", user="who", item="shown"),)},
        "sequence 's' names feature 'who'; there are",
    ),
    "layers": ({"cross_layers": 0}, "cross_layers is 0"),
    "no sequence of hstu": ({"net": "hstu"}, "net 'hstu' with 0 sequences"),
    "layers of hstu": ({"sequence_layers": 0}, "sequence_layers is 0"),
    "heads of hstu": (
        {"net": "hstu", "sequences": LOOKING_BACK.sequences, "sequence_heads": 3},
        "sequence_heads is 3; give a divisor of the tables' dim, 4",
    ),
    "rank": ({"cross_rank": -1}, "cross_rank -1"),
    "dims": (
        {"tables": (TableConfig(name="item", dim=4), TableConfig(name="user", dim=8))},
        r"net 'dlrm' needs features of one dim, not \[4, 8\]",
    ),
    "no factors": (
        {"net": "deepfm", "tables": tuple(TableConfig(name=n, dim=1) for n in ("item", "user"))},
        "DeepFM needs a dim of 2 or more, not 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_net_that_cannot_be_built_says_why(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        build_net(dataclasses.replace(PLAIN, **changes))


@pytest.mark.parametrize(
    "name", ["dcn_v2 of rank 2", "deepfm", "history", "hstu", "dlrm with learned defaults"]
)
def test_the_compiled_net_gives_the_scores_of_the_trainers(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    torch.manual_seed(8)
    served = Probability(build_net(config))
    shape = DenseShape(dense_features=config.dense_columns, embedding_dim=sum(config.feature_dims))
    export_folder(served, tmp_path / "dense", shape, cache=CACHE)
    # Other weights, as a later version has: they are inputs of the program.
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.mul_(1.5)
    assert largest_difference(served, tmp_path / "dense" / "program.pt2", shape) < 1e-5
