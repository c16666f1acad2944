"""Every net beside DLRM in a real tritonserver: a request of columns alone gives the same scores.

Those of histories have counts, too, which are in rows and version and not in the request, and
crosses, which are in the request. DeepFM's has learned what keys without a row read as: it is in
the version.
The rectangular request carries a sequence as it carries features: its keys behind theirs in KEYS,
its length and whether the item is in it in DENSE.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from serving import Client, Fronts, beside, metric, parameters
from shopping import HEADS, NEWS_CONFIG, Shopping
from tritonclient.utils import InferenceServerException

import embertide
from embertide import _store
from embertide.client.errors import InputError
from embertide.server.adapters import triton
from embertide.server.adapters.schema import schema_of
from embertide.trainer.config import FeatureConfig, ModelConfig, ReducedConfig, RunConfig
from embertide.trainer.data.base import PADDING_KEY, Batch
from embertide.trainer.data.crosses import cross_keys
from embertide.trainer.data.generator import NewsSource
from embertide.trainer.data.history import extend, with_columns
from embertide.trainer.presets import news_crossed, news_hstu, news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot_rows import read_buckets
from embertide.trainer.run.loop import Trainer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
NEWS = NewsSource(NEWS_CONFIG)
DEFAULTS = tuple(dataclasses.replace(each, learned_default=True) for each in news_model().features)
CROSSES = tuple(
    FeatureConfig(name=f"{other}_cand", table="cand", crossed=(other, "cand"))
    for other in ("prev", "referrer")
)
MODELS: dict[str, ModelConfig] = {
    "crossed": dataclasses.replace(news_model(), features=(*news_model().features, *CROSSES)),
    "dcn_v2": dataclasses.replace(news_model(), net="dcn_v2", cross_rank=16),
    "deepfm": dataclasses.replace(news_model(), net="deepfm", features=DEFAULTS),
    "history": news_crossed(),
    "hstu": news_hstu(),
    "own": dataclasses.replace(news_model(), net="own_net:Tower"),
    "tasks": dataclasses.replace(news_model(), heads=HEADS),
    "own_tasks": dataclasses.replace(news_model(), net="own_net:Tasks", heads=HEADS),
}
# A layer of so many weights gains by it. Few events are measured, and a bound holds or cannot.
WIDE = dataclasses.replace(news_model(), top_mlp=(128, 64))
REDUCED = {
    "bf16": ReducedConfig(min_events=20, max_auc_loss=0.5, max_error=0.5),
    "int8": ReducedConfig(type="int8", min_events=20, max_auc_loss=0.5, max_error=0.5),
    "int8_refused": ReducedConfig(type="int8", min_events=20, max_auc_loss=0.5, max_error=1e-9),
}
# Rows that are trained in fp32 and served in fewer bits, of each type.
FEWER_BITS = dataclasses.replace(
    news_model(),
    tables=tuple(
        dataclasses.replace(table, served_dtype=("int4", "int8")[t % 2])
        for t, table in enumerate(news_model().tables)
    ),
)
_FLAGS = frozenset(Path("/proc/cpuinfo").read_text().split())
HAS = {"bf16": "avx512_bf16" in _FLAGS, "int8": bool({"avx512_vnni", "avx_vnni"} & _FLAGS)}


@dataclasses.dataclass
class Served:
    """A trainer that is done, and a server of its last version."""

    trainers: dict[str, Trainer]
    server: triton.TritonServer
    fronts: Fronts


@pytest.fixture(scope="module")
def served(server_options: triton.ServerOptions, tmp_path_factory: Any) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("nets")
    runs = {name: RunConfig(model=model, batch_size=64) for name, model in MODELS.items()}
    for name, bounds in REDUCED.items():
        runs[name] = RunConfig(model=WIDE, batch_size=64, serve_reduced=bounds)
    runs["fewer_bits"] = RunConfig(model=FEWER_BITS, batch_size=64)
    names = (*runs, "fewer_bits_rows")
    options = beside(server_options, directory / "models", directory / "log", names)
    trainers = {}
    for name, run in runs.items():
        model, publication = run.model, Publication(directory / name)
        trainers[name] = Trainer(run, publication, program_cache=CACHE)
        trainers[name].fit(Shopping() if model.heads else NEWS)
        snapshot = publication.snapshot_path(publication.snapshots()[-1])
        of_kind = functools.partial(
            triton.ModelOptions, snapshot=snapshot, max_batch_size=64, schema=schema_of(snapshot)
        )
        triton.write_model(options.repository, name, of_kind(kind="ranking"))
        if name == "fewer_bits":
            triton.write_model(options.repository, f"{name}_rows", of_kind(kind="lookup"))
    with Fronts(options) as fronts:
        yield Served(trainers, fronts.own, fronts)


def some_events(model: ModelConfig) -> Batch:
    """Events of the second hour, one of them about nobody and nothing that is known."""
    batch = next(with_columns(NEWS, model).batches(batch_size=60, start=NEWS.first_event(1)))
    batch.keys_BF[0, : len(model.features)] = 987_654_321
    return batch


@pytest.mark.parametrize("name", MODELS)
def test_served_scores_are_those_of_the_trainers_net(served: Served, name: str) -> None:
    trainer, batch = served.trainers[name], some_events(MODELS[name])
    client = Client("grpc", served.server)
    arrays: dict[str, NDArray[Any]] = {"KEYS": batch.keys_BF}
    if MODELS[name].dense_columns:
        arrays["DENSE"] = batch.dense_BD
    result = client.send(arrays, model=name)
    expected = trainer.learner.score(batch)
    assert len(np.unique(expected)) > 40
    np.testing.assert_allclose(result.as_numpy("SCORE")[:, 0], expected, atol=1e-6)
    assert int(parameters(result)["version"]) == trainer.state.number
    client.raw.close()


def test_rows_of_fewer_bits_are_served_as_they_were_published(served: Served) -> None:
    trainer, batch = served.trainers["fewer_bits"], some_events(FEWER_BITS)
    newest = trainer.publication.snapshot_path(trainer.publication.snapshots()[-1])
    published: dict[str, dict[int, NDArray[np.float32]]] = {}
    for _, config, _, records in read_buckets(trainer.state.rows, newest):
        assert config.layout.dtype in ("int4", "int8")
        key_N, _, _, values_ND = _store.decode_records(config.layout, records)
        published.setdefault(config.name, {}).update(zip(key_N.tolist(), values_ND, strict=True))
    client = Client("grpc", served.server)
    result = client.send({"KEYS": batch.keys_BF}, model="fewer_bits_rows", outputs=["EMBEDDING"])
    score_B1 = client.send({"KEYS": batch.keys_BF}, model="fewer_bits").as_numpy("SCORE")
    found_BD, begin, of_int4 = result.as_numpy("EMBEDDING"), 0, 0
    for f, feature in enumerate(FEWER_BITS.features):
        table = next(each for each in FEWER_BITS.tables if each.name == feature.table)
        for b, key in enumerate(batch.keys_BF[:, f].view(np.uint64).tolist()):
            if key in published[table.name]:
                found_d = found_BD[b, begin : begin + table.dim]
                np.testing.assert_array_equal(found_d, published[table.name][key])
                of_int4 += table.served_dtype == "int4"
        begin += table.dim
    assert found_BD.shape[1] == begin
    assert of_int4 > 100
    # Near the scores of the trained rows, and not the same.
    differ_B = np.abs(score_B1[:, 0] - trainer.learner.score(batch))
    assert 1e-6 < differ_B.max() < 0.05
    client.raw.close()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("name", ["tasks", "own_tasks"])
def test_each_head_is_served_as_it_was_learned(served: Served, name: str, protocol: str) -> None:
    batch, client = some_events(MODELS[name]), Client(protocol, served.fronts.of(protocol))
    wanted_BH = served.trainers[name].learner.score_heads(batch)
    assert np.abs(wanted_BH[:, 0] - wanted_BH[:, 1]).max() > 1e-3
    jagged: dict[str, NDArray[Any]] = {
        "KEYS": batch.keys_BF.reshape(1, -1),
        "LENGTHS": np.ones((1, batch.keys_BF.size), np.int32),
    }
    outputs = ["SCORE", "SCORE_buy"]
    for arrays in ({"KEYS": batch.keys_BF}, jagged):
        both = client.send(arrays, model=name, outputs=outputs)
        for h, output in enumerate(outputs):
            scores = both.as_numpy(output)
            assert scores.shape == ((1, 60) if "LENGTHS" in arrays else (60, 1))
            np.testing.assert_allclose(scores.ravel(), wanted_BH[:, h], atol=1e-6)
            # Outputs that are not asked for are not sent.
            alone = client.send(arrays, model=name, outputs=[output])
            np.testing.assert_array_equal(alone.as_numpy(output), scores)
            (other,) = set(outputs) - {output}
            assert alone.as_numpy(other) is None
    client.raw.close()


def test_a_client_gives_the_scores_of_heads_by_name(served: Served) -> None:
    batch = some_events(MODELS["tasks"])
    columns = {
        feature.name: batch.keys_BF[:, f] for f, feature in enumerate(MODELS["tasks"].features)
    }
    wanted_BH = served.trainers["tasks"].learner.score_heads(batch)
    with embertide.Client(served.server.grpc, timeout_s=20) as client:
        answer = client.rank("tasks", columns)
        assert list(answer.heads) == ["click", "buy"]
        assert answer.scores is answer.heads["click"]
        for h, scores in enumerate(answer.heads.values()):
            np.testing.assert_allclose(scores, wanted_BH[:, h], atol=1e-6)
        alone = client.rank("tasks", columns, heads="buy")
        assert list(alone.heads) == ["buy"]
        np.testing.assert_array_equal(alone.scores, answer.heads["buy"])
        for heads in ("sell", ("buy", "sell")):
            with pytest.raises(InputError, match="model 'tasks' has click, buy"):
                client.rank("tasks", columns, heads=heads)
        one = client.rank("own", columns)
        assert list(one.heads) == ["score"]
        assert one.scores is one.heads["score"]


def test_an_output_of_no_head_is_refused_at_load(served: Served, tmp_path: Path) -> None:
    options = served.server.options
    for name, why in (
        ("own", "output SCORE_sell: the model has one head, whose score is SCORE"),
        ("tasks", "output SCORE_sell: the model has the heads click, whose score is SCORE, buy"),
    ):
        made = (options.repository / name / "config.pbtxt").read_text()
        folder = tmp_path / name / "wrong"
        (folder / "1").mkdir(parents=True)
        output = 'output [ { name: "SCORE_sell" data_type: TYPE_FP32 dims: [ -1 ] } ]'
        text = made.replace(f'name: "{name}"', 'name: "wrong"', 1)
        (folder / "config.pbtxt").write_text(f"{text}\n{output}\n")
        wrong = beside(options, tmp_path / name, tmp_path / f"{name}.log", ("wrong",))
        with pytest.raises(triton.TritonError), triton.TritonServer(wrong):
            pass
        assert why in wrong.log.read_text()


def test_a_request_without_its_crosses_is_answered_as_one_with_them(served: Served) -> None:
    batch, client = some_events(MODELS["crossed"]), Client("grpc", served.server)
    own = len(MODELS["crossed"].event_features)
    assert batch.keys_BF.shape[1] == own + 2
    all_columns, own_columns = (
        client.send({"KEYS": keys_BF}, model="crossed", outputs=["SCORE", "SOURCE"])
        for keys_BF in (batch.keys_BF, np.ascontiguousarray(batch.keys_BF[:, :own]))
    )
    for output in ("SCORE", "SOURCE"):
        np.testing.assert_array_equal(
            own_columns.as_numpy(output).ravel(), all_columns.as_numpy(output).ravel()
        )
    assert len(np.unique(own_columns.as_numpy("SCORE"))) > 40
    jagged: dict[str, NDArray[Any]] = {
        "KEYS": batch.keys_BF[:, :own].reshape(1, -1),
        "LENGTHS": np.ones((1, own * len(batch)), np.int32),
    }
    by_bags = client.send(jagged, model="crossed", parameters={"columns": own})
    np.testing.assert_array_equal(
        by_bags.as_numpy("SCORE").ravel(), all_columns.as_numpy("SCORE").ravel()
    )
    client.raw.close()


def test_a_request_of_another_number_of_columns_is_refused(served: Served) -> None:
    client = Client("grpc", served.server)
    with pytest.raises(
        InferenceServerException,
        match=r"it must be \[batch,12\], one key for each feature, or \[batch,10\] without those",
    ):
        client.rectangular([[1] * 11], model="crossed")
    arrays: dict[str, NDArray[Any]] = {
        "KEYS": np.ones((1, 12), np.int64),
        "LENGTHS": np.ones((1, 12), np.int32),
    }
    for columns, why in ((11, "columns is 11; KEYS has 12 columns, or 10"), (-1, "positive")):
        with pytest.raises(InferenceServerException, match=why):
            client.send(arrays, model="crossed", parameters={"columns": columns})
    arrays["LENGTHS"] = np.array([[1, 3, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    with pytest.raises(InferenceServerException, match="feature prev of sample 0 has 3 keys"):
        client.send(arrays, model="crossed", parameters={"columns": 10})
    client.raw.close()


@pytest.mark.parametrize("name", ["history", "hstu"])
def test_a_node_alone_reads_the_histories_of_its_version(served: Served, name: str) -> None:
    model, trainer = MODELS[name], served.trainers[name]
    batch = some_events(model)
    own, features = len(model.event_features), len(model.features)
    # All columns, as a client makes them that has the trainer's histories.
    plain = dataclasses.replace(
        batch,
        keys_BF=batch.keys_BF[:, :features],
        dense_BD=batch.dense_BD[:, :0],
        label_B=np.zeros(len(batch), np.float32),
    )
    crossed_BC = np.column_stack(
        [
            cross_keys(plain.keys_BF[:, [model.feature_index(name) for name in each.crossed]])
            for each in model.features
            if each.crossed
        ]
    )
    plain.keys_BF[:, own:] = crossed_BC
    whole = extend(trainer.state.histories, plain)
    client = Client("grpc", served.server)
    all_columns = client.send({"KEYS": whole.keys_BF, "DENSE": whole.dense_BD}, model=name)
    own_columns = client.send({"KEYS": np.ascontiguousarray(batch.keys_BF[:, :own])}, name)
    scores = own_columns.as_numpy("SCORE")
    np.testing.assert_array_equal(scores, all_columns.as_numpy("SCORE"))
    np.testing.assert_allclose(scores[:, 0], trainer.learner.score(whole), atol=1e-6)
    length, repeat, *gaps = whole.dense_BD.any(axis=0)
    assert length
    assert repeat
    assert any(gaps[1:]) == model.sequences[0].times  # the newest is 0 s before itself
    client.raw.close()


def test_padding_is_served_as_a_row_that_nobody_has(served: Served) -> None:
    batch = some_events(MODELS["history"])
    padded_BF = batch.keys_BF == PADDING_KEY
    assert padded_BF.any(1).sum() > 10
    assert (~padded_BF[:, len(MODELS["history"].features) :]).any(1).sum() > 10
    client = Client("grpc", served.server)

    def source(keys_BF: Any) -> Any:
        arrays = {"KEYS": keys_BF, "DENSE": batch.dense_BD}
        result = client.send(arrays, model="history", outputs=["SCORE", "SOURCE"])
        return result.as_numpy("SCORE"), result.as_numpy("SOURCE").reshape(keys_BF.shape)

    scores, sources = source(batch.keys_BF)
    missing = sources.max()
    assert (sources[padded_BF] == missing).all()
    assert (sources[~padded_BF] != missing).mean() > 0.9
    # Whatever stands in a place not taken, the score is the same.
    other_BF = np.where(padded_BF, batch.keys_BF[:, 2:3], batch.keys_BF)
    np.testing.assert_array_equal(source(other_BF)[0], scores)
    client.raw.close()


@pytest.mark.parametrize("name", REDUCED)
def test_a_net_multiplies_in_a_type_only_while_its_run_found_that_cheap(
    served: Served, name: str
) -> None:
    batch, client = some_events(WIDE), Client("grpc", served.server)
    result = client.send({"KEYS": batch.keys_BF}, model=name)
    client.raw.close()
    error_B = np.abs(result.as_numpy("SCORE")[:, 0] - served.trainers[name].learner.score(batch))
    kind = REDUCED[name].type
    able = "refused" if name == "int8_refused" else "taken"
    outcome = able if HAS[kind] else "no_cpu"
    if outcome == "taken":
        assert 1e-5 < error_B.max() < 0.05  # what is rounded
    else:
        assert error_B.max() <= 1e-6
    page = served.server.metrics()
    assert metric(page, "embertide_dense_reduced", model=name, type=kind) == float(
        outcome == "taken"
    )
    counted = {
        each: metric(
            page, "embertide_dense_reduced_versions_total", model=name, type=kind, result=each
        )
        for each in ("taken", "refused", "no_cpu", "unknown")
    }
    assert counted == {each: float(each == outcome) for each in counted}
