"""Columns made by nodes, with users and items at either of two nodes, version by version.

A request of an event's own columns is answered, bit for bit, as one whose columns a client made
from the histories that the trainer had when the version ended.
"""

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import NDArray
from pair import Pair, start_pair
from serving import Client, metric, parameters
from tritonclient.utils import InferenceServerException
from waiting import wait_until

import embertide
from embertide._common.direct_http import open_url
from embertide.server.adapters import triton
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.schema import schema_of
from embertide.trainer.config import ModelConfig, RunConfig
from embertide.trainer.data.base import MISSING_KEY, PADDING_KEY, Batch, DerivedSource
from embertide.trainer.data.crosses import CrossedSource, crossed
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import History, HistoryState, extend
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.data.limit import FirstEvents, take
from embertide.trainer.eval.published import PublishedModel
from embertide.trainer.eval.served import ServedModel
from embertide.trainer.presets import news_crossed
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=120, users=60, new_items_per_hour=5))
STAGES = 3
EVERY_S = 1800
SHARE = 0.25  # of the keys of a request that may be unanswered


def model() -> ModelConfig:
    """The news model with crosses and HSTU, of small rows; more users than are remembered.

    Its histories have times. All but the candidate is the user's, for requests and for the dense
    program.
    """
    config = news_crossed()
    (sequence,) = config.sequences
    return dataclasses.replace(
        config,
        net="hstu",
        context=tuple(each.name for each in config.event_features if each.name != "cand"),
        tables=tuple(dataclasses.replace(each, bucket_bits=2) for each in config.tables),
        sequences=(dataclasses.replace(sequence, length=4, users=30, times=True),),
    )


MODEL = model()
NAMES = [feature.name for feature in MODEL.features]
OWN = len(MODEL.event_features)


def by_client(state: HistoryState, batch: Batch) -> Batch:
    """The events with all columns, as a client makes them that has these histories."""
    history = History(MODEL.sequences[0], NAMES)
    history.restore(state)
    # Nothing is liked, so that every event sees the same histories.
    unlabelled = dataclasses.replace(batch, label_B=np.zeros(len(batch), np.float32))
    return extend([history], unlabelled)


@dataclasses.dataclass
class Site:
    """Two nodes, and the histories of the versions that they hold."""

    pair: Pair
    histories: dict[int, HistoryState]
    publication: Path
    clients: list[Client]

    def score(self, node: int, arrays: dict[str, NDArray[Any]], **more: Any) -> Any:
        return self.clients[node].send(arrays, model="rank", outputs=["SCORE", "SOURCE"], **more)


@pytest.fixture(scope="module")
def site(server_options: triton.ServerOptions, tmp_path_factory: Any) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("made")
    publication = Publication(directory / "pub")
    run = RunConfig(model=MODEL, batch_size=64, publish_every_s=EVERY_S, keep_snapshots=9)
    histories: dict[int, HistoryState] = {}
    total = NEWS.total_events() or 0
    with contextlib.ExitStack() as stack:
        redis = RedisOptions(log=directory / "redis.log")
        url = stack.enter_context(RedisServer(redis)).url

        def train(stage: int) -> None:
            trainer = Trainer(run, publication, bus=url, program_cache=CACHE)
            trainer.fit(FirstEvents(NEWS, total * stage // STAGES))
            histories[trainer.state.number] = trainer.state.histories[0].state()

        train(1)
        pair = start_pair(
            stack,
            directory,
            server_options,
            url,
            model=MODEL.name,
            publications=(publication.path, publication.path),
            max_degraded_share=SHARE,
            context=MODEL.context,
            schema=schema_of(publication.snapshot_path(publication.snapshots()[-1])),
        )
        for stage in range(2, STAGES + 1):
            train(stage)
        clients = [Client("grpc", node) for node in pair.nodes]
        newest = max(histories)

        def hold_newest() -> bool:
            pages = [node.metrics() for node in pair.nodes]
            return all(metric(page, "embertide_version") >= newest for page in pages)

        wait_until(hold_newest)
        yield Site(pair, histories, publication.path, clients)
        for client in clients:
            client.raw.close()


def some_events() -> Batch:
    """Events of the last hour; of one nobody knows the user, of another the request neither."""
    source = crossed(NEWS, MODEL)
    batch = next(source.batches(batch_size=64, start=NEWS.first_event(2)))
    batch.keys_BF[0, NAMES.index("user")] = 987_654_321
    batch.keys_BF[1, NAMES.index("user")] = MISSING_KEY
    return batch


def output(result: Any, name: str) -> NDArray[Any]:
    """An output, flat; a copy of another node's row that is kept here counts as the row."""
    values = result.as_numpy(name).ravel()
    return np.where(values == 7, 3, values) if name == "SOURCE" else values


def own(batch: Batch) -> NDArray[np.int64]:
    return np.ascontiguousarray(batch.keys_BF[:, :OWN])


def test_a_version_evaluated_by_itself_gives_the_scores_of_a_node(site: Site) -> None:
    batch = some_events()
    events = dataclasses.replace(batch, keys_BF=own(batch))
    scores = []
    for version in site.histories:
        model = PublishedModel.open(site.publication, version)
        served = site.score(0, {"KEYS": own(batch)}, parameters={"version": version})
        np.testing.assert_allclose(model.score(events), output(served, "SCORE"), rtol=0, atol=1e-6)
        scores.append(model.score(events))
    assert (np.abs(scores[-1] - scores[0]) > 1e-3).any()


@pytest.mark.parametrize("node", [0, 1])
def test_every_version_answers_by_the_histories_of_its_end(site: Site, node: int) -> None:
    batch = some_events()
    answers = {}
    assert len(site.histories) == STAGES
    for version, state in site.histories.items():
        whole = by_client(state, batch)
        wanted = site.score(
            node,
            {"KEYS": whole.keys_BF, "DENSE": whole.dense_BD},
            parameters={"version": version},
        )
        made = site.score(node, {"KEYS": own(batch)}, parameters={"version": version})
        assert int(parameters(made)["version"]) == version
        assert int(parameters(made)["degraded_keys"]) == 0
        for name in ("SCORE", "SOURCE"):
            np.testing.assert_array_equal(output(made, name), output(wanted, name))
        answers[version] = made.as_numpy("SCORE")
        taken_BL = whole.keys_BF[:, len(NAMES) :] != PADDING_KEY
        assert taken_BL.all(axis=1).sum() > 5  # some users have a whole history
        assert not taken_BL[:2].any()
    first, *others = answers.values()
    assert all((first != other).any() for other in others)


def test_users_and_items_come_from_either_node(site: Site) -> None:
    batch = some_events()
    site.score(0, {"KEYS": own(batch)})
    table = MODEL.sequences[0].table

    def counted(source: str) -> float:
        page = site.pair.nodes[0].metrics()
        return metric(page, "embertide_lookup_keys_total", table=table, source=source)

    wait_until(lambda: all(counted(source) > 0 for source in ("ddr", "remote", "default")))
    sources = output(site.score(0, {"KEYS": own(batch)}), "SOURCE").reshape(len(batch), -1)
    assert {1, 3} <= set(sources[:, len(NAMES) :].ravel().tolist())


def test_a_jagged_request_is_answered_as_a_rectangular_one(site: Site) -> None:
    batch = some_events()
    jagged: dict[str, NDArray[Any]] = {
        "KEYS": own(batch).reshape(1, -1),
        "LENGTHS": np.ones((1, OWN * len(batch)), np.int32),
    }
    by_bags = site.score(1, jagged, parameters={"columns": OWN})
    rectangular = site.score(1, {"KEYS": own(batch)})
    for name in ("SCORE", "SOURCE"):
        np.testing.assert_array_equal(output(by_bags, name), output(rectangular, name))


def by_contexts(
    users_BF: NDArray[np.int64], candidates_BC: NDArray[np.int64]
) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """A request of users, with candidates each, and the own columns of all its samples."""
    cand, each = NAMES.index("cand"), candidates_BC.shape[1]
    samples_BF = np.repeat(users_BF, each, axis=0)
    samples_BF[:, cand] = candidates_BC.ravel()
    arrays: dict[str, NDArray[Any]] = {
        "CONTEXT_KEYS": np.delete(users_BF, cand, axis=1).reshape(1, -1),
        "CANDIDATES": np.full((1, len(users_BF)), each, np.int32),
        "KEYS": candidates_BC.reshape(1, -1),
    }
    return arrays, samples_BF


@pytest.mark.parametrize("node", [0, 1])
def test_what_is_made_of_a_user_is_made_once_for_all_candidates(site: Site, node: int) -> None:
    """Its crosses and history; those of user and candidate, and whether it was seen, for each."""
    batch = some_events()
    users_BF = own(batch)[:16]
    rng = np.random.default_rng(node)
    candidates_BC = rng.choice(own(batch)[:, NAMES.index("cand")], (16, 9))
    state = site.histories[max(site.histories)]
    seen = by_client(state, batch).keys_BF[:16, len(NAMES) :]
    candidates_BC[:, 0] = seen[:, 0]  # of the user's history, where there is one
    arrays, samples_BF = by_contexts(users_BF, candidates_BC)

    def counted(of: str) -> float:
        return metric(site.pair.nodes[node].metrics(), "embertide_contexts_total", of=of)

    of = ("keys_saved", "candidates_in_context_program")
    before = [counted(each) for each in of]
    wanted, got = site.score(node, {"KEYS": samples_BF}), site.score(node, arrays)
    np.testing.assert_allclose(output(got, "SCORE"), output(wanted, "SCORE"), rtol=0, atol=1e-6)
    assert int(parameters(got)["degraded_keys"]) == 0
    whole, once = output(wanted, "SOURCE"), output(got, "SOURCE")
    width = len(whole) // len(samples_BF)
    saved = len(whole) - len(once)
    assert {1, 3} <= set(once.tolist())
    assert len(np.unique(output(got, "SCORE"))) > 30
    # All but the candidate and its crosses with the user's columns.
    both = sum("cand" in feature.crossed for feature in MODEL.features)
    assert saved == 16 * 8 * (width - 1 - both)
    counts = [before[0] + saved, before[1] + len(samples_BF)]
    wait_until(lambda: [counted(each) for each in of] == counts)


@pytest.mark.parametrize("each", [1, 15, 40])
def test_users_of_few_and_of_many_candidates_get_the_same_scores(site: Site, each: int) -> None:
    """A user of many has a run of the dense net of its own."""
    batch = some_events()
    rng = np.random.default_rng(each)
    users_BF = own(batch)[2:8]
    candidates_BC = rng.choice(own(batch)[:, NAMES.index("cand")], (len(users_BF), each))
    arrays, _ = by_contexts(users_BF, candidates_BC)
    arrays["CANDIDATES"] = np.array([[1, *[each] * 4, 2 * each - 1]], np.int32)
    of_user = np.repeat(np.arange(len(users_BF)), arrays["CANDIDATES"][0])
    whole_BF = users_BF[of_user]
    whole_BF[:, NAMES.index("cand")] = candidates_BC.ravel()

    def counted() -> float:
        page = site.pair.nodes[0].metrics()
        return metric(page, "embertide_contexts_total", of="candidates_in_context_program")

    before = counted()
    wanted, got = site.score(0, {"KEYS": whole_BF}), site.score(0, arrays)
    np.testing.assert_allclose(output(got, "SCORE"), output(wanted, "SCORE"), rtol=0, atol=1e-6)
    assert len(np.unique(output(got, "SCORE"))) > each
    wait_until(lambda: counted() == before + len(whole_BF))


def test_events_are_asked_with_their_users_columns_once(site: Site) -> None:
    events = some_events()
    batch = dataclasses.replace(events, keys_BF=own(events))
    node = site.pair.nodes[0]

    def asked(of: str) -> float:
        return metric(node.metrics(), "embertide_contexts_total", of=of)

    before = asked("candidates")
    with ServedModel(node.grpc, "rank") as served:
        answer = served.score(batch)
    expected_B = output(site.score(0, {"KEYS": batch.keys_BF}), "SCORE")
    np.testing.assert_allclose(answer.score_B, expected_B, atol=1e-6)
    wait_until(lambda: asked("candidates") == before + len(batch))
    assert asked("contexts") < asked("candidates")


def test_requests_that_are_executed_together_get_their_own_histories(site: Site) -> None:
    batch = some_events()
    whole = by_client(site.histories[max(site.histories)], batch)
    wanted = site.score(0, {"KEYS": own(batch)}).as_numpy("SCORE")[:, 0]
    own_columns: dict[str, NDArray[Any]] = {"KEYS": own(batch)}
    all_columns: dict[str, NDArray[Any]] = {"KEYS": whole.keys_BF, "DENSE": whole.dense_BD}
    node = site.pair.nodes[0]

    def executions() -> float:
        return metric(node.metrics(), "nv_inference_exec_count", model="rank")

    def requests() -> float:
        return metric(node.metrics(), "nv_inference_request_success", model="rank")

    wait_until(lambda: requests() >= executions())
    before = requests(), executions()
    # While the instances are at work on these, the others come, and wait together.
    wide = [_request(own_columns, np.tile(np.arange(len(batch)), 16)) for _ in range(4)]
    small = [
        (row, _request(arrays, np.array([row])))
        for arrays in (own_columns, all_columns, own_columns)
        for row in range(len(batch))
    ]
    pending: list[tuple[int, list[Any]]] = []
    for row, inputs in [*((0, inputs) for inputs in wide), *small]:
        answer: list[Any] = []
        site.clients[0].raw.async_infer("rank", inputs, partial(_take, answer))
        pending.append((row, answer))
    wait_until(lambda: all(answer for _, answer in pending))
    for row, answer in pending:
        result, error = answer[0]
        assert error is None
        # In another batch the net's sums are rounded otherwise.
        np.testing.assert_allclose(result.as_numpy("SCORE")[0, 0], wanted[row], atol=1e-6)
    wait_until(lambda: requests() - before[0] == len(pending))
    assert executions() - before[1] < 0.8 * len(pending)


def _request(
    arrays: dict[str, NDArray[Any]], rows: NDArray[np.int64]
) -> list[tritonclient.grpc.InferInput]:
    inputs = []
    for name, array in arrays.items():
        dtype = "INT64" if name == "KEYS" else "FP32"
        inputs.append(tritonclient.grpc.InferInput(name, [len(rows), array.shape[1]], dtype))
        inputs[-1].set_data_from_numpy(np.ascontiguousarray(array[rows]))
    return inputs


def _take(answer: list[Any], result: Any, error: Any) -> None:
    answer.append((result, error))


def test_dense_of_a_request_of_own_columns_is_its_own(site: Site) -> None:
    batch = some_events()
    dense_BD = np.zeros((len(batch), 2), np.float32)
    with pytest.raises(InferenceServerException, match="of 0 dense features it must be"):
        site.score(0, {"KEYS": own(batch), "DENSE": dense_BD})
    whole = by_client(site.histories[max(site.histories)], batch)
    with pytest.raises(InferenceServerException, match="input DENSE is missing"):
        site.score(0, {"KEYS": whole.keys_BF})


def test_where_the_time_of_a_request_over_two_nodes_went(site: Site) -> None:
    node, stages = site.pair.nodes[0], ["parse", "queue", "peers", "lookup", "net", "send"]

    def spent(stage: str) -> float:
        return metric(node.metrics(), "embertide_front_stage_us_sum", stage=stage)

    def answered() -> float:
        return metric(node.metrics(), "embertide_front_stage_us_count", stage="net")

    before, count = {stage: spent(stage) for stage in stages}, answered()
    rng = np.random.default_rng(5)
    for _ in range(5):  # half of these keys are the other node's, and nobody has copies of them
        site.score(0, {"KEYS": rng.integers(1 << 41, 1 << 42, (16, OWN))})
    wait_until(lambda: answered() == count + 5)
    grown = {stage: spent(stage) - before[stage] for stage in stages}
    assert min(grown.values()) > 0, grown
    with open_url(f"http://{node.options.reached(node.options.metrics_port)}/slow", 10) as reply:
        slow = json.load(reply)
    # Slower ones than these may be in it: all go the same way.
    slowest = [call for call in slow["hour"] if call["model"] == "rank"]
    assert max(call["stages_us"]["peers"] for call in slowest) > 0
    for call in slowest:
        assert 1 <= call["version"] <= max(site.histories)
        assert min(call["stages_us"][stage] for stage in ("lookup", "net")) > 0
        assert sum(call["stages_us"].values()) <= call["us"] * (1 + 1e-9)


def test_the_slow_requests_of_a_fleet_are_told_by_stage_and_trace(site: Site) -> None:
    trace = secrets.token_hex(16)
    traceparent = f"00-{trace}-{secrets.token_hex(8)}-01"
    rng = np.random.default_rng(6)

    def asked() -> dict[str, list[dict[str, Any]]]:
        keys_FB = rng.integers(1 << 41, 1 << 42, (OWN, 32))
        columns = dict(zip(NAMES[:OWN], keys_FB, strict=True))
        assert client.rank("rank", columns, traceparent=traceparent).trace == trace
        found: dict[str, list[dict[str, Any]]] = site.pair.ask("slow", "--trace", trace)
        return found

    with embertide.Client(site.pair.nodes[0].grpc, timeout_s=60) as client:
        wait_until(lambda: all(asked().values()))  # with the next loads that are asked for
        told = asked()
    call, lookup = told["slow"][0], told["lookups"][0]
    first, second = sorted(each["node"] for each in site.pair.ask("status")["nodes"])
    # One id names the request at the node that was asked, and the look-ups that a peer made for it.
    assert (lookup["node"], lookup["asker"]) == (second, first)
    assert 1 <= lookup["keys"] <= call["keys"]
    assert lookup["whole_us"] > 0
    assert call["node"] == first
    assert (call["samples"], call["refusal"]) == (32, "")
    assert 1 <= call["version"] <= max(site.histories)
    assert call["keys"] >= 32 * OWN
    assert min(call["stages_us"].values()) > 0
    assert sum(call["stages_us"].values()) <= call["whole_us"]


def at_node(node: int, table: str, keys_N: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a node owns keys: of four buckets, each has two (start_pair)."""
    bits = MODEL.tables[MODEL.table_index(table)].bucket_bits
    is_there_N: NDArray[np.bool_] = buckets_of(keys_N.view(np.uint64), bits) // 2 == node
    return is_there_N


def sample(user_at: int) -> NDArray[np.int64]:
    """Own columns that nobody has asked for; all that is made of them, but a history, at node 0."""
    rng = np.random.default_rng(user_at)
    while True:
        keys_1F = rng.integers(1 << 40, 1 << 41, (1, OWN))
        batch = dataclasses.replace(take(some_events(), 0, 1), keys_BF=keys_1F)
        (whole,) = CrossedSource(_Only(batch), MODEL).batches(batch_size=1)
        nodes = [
            int(not at_node(0, each.table, whole.keys_BF[:, f])[0])
            for f, each in enumerate(MODEL.features)
        ]
        if nodes == [user_at, *[0] * (len(nodes) - 1)]:
            return keys_1F


class _Only(DerivedSource):
    """One batch."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(NEWS)
        self._batch = batch

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        yield self._batch


def test_places_of_a_history_that_no_owner_answers_count_as_unanswered_keys(site: Site) -> None:
    """Last: a node ends."""
    here, there = sample(0), sample(1)
    (length,) = (sequence.length for sequence in MODEL.sequences)
    site.score(0, {"KEYS": here})  # for that, all is at node 0
    site.pair.nodes[1].stop()
    made = site.score(0, {"KEYS": np.concatenate((here, there))})
    assert int(parameters(made)["degraded_keys"]) == 1 + length
    sources = output(made, "SOURCE").reshape(2, -1)
    lost = [0, *range(len(NAMES), len(NAMES) + length)]  # the user's row, and his history
    assert np.flatnonzero(sources[1] == 6).tolist() == lost
    assert not (sources[0] == 6).any()
    # Alone it lacks a larger share, though its own keys lack a small one.
    assert 1 / sources.shape[1] < SHARE < (1 + length) / sources.shape[1]
    with pytest.raises(
        InferenceServerException, match="no owner answers for the histories of 1 samples, and 5 of"
    ):
        site.score(0, {"KEYS": there})
