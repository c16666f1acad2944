"""The demo's reshard and its comparison with an unmoved copy: over real nodes, with versions that
come meanwhile; and with a row that is lost on purpose, which the comparison must find.
"""

import contextlib
import dataclasses
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
from checker import CheckerNet
from fleet import CONFIG, KEYS, Model
from pair import Pair, start_pair
from repeated import Repeated
from torch import Tensor

from embertide.server.adapters import triton
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.cli.demo.options import UNMOVED_MODEL, DemoOptions
from embertide.server.cli.demo.reshard import DemoReshard
from embertide.server.core.plan.layout import (
    Holders,
    Place,
    assignments_of,
    devices,
    layout_of,
)
from embertide.trainer.data.base import Batch, EventSchema, EventSource, FeatureColumn
from embertide.trainer.eval.compare import Copy
from embertide.trainer.eval.moves import MovedKeys, Reshard
from embertide.trainer.eval.records import Records
from embertide.trainer.eval.replay import Replay, ReplayConfig, ReplayProgress
from embertide.trainer.eval.served import ServedModel, ServedNodes
from embertide.v1 import control_pb2, plan_pb2

pytestmark = pytest.mark.alone

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
WAITS_AT = 2_000  # event, for the copy


class MeanNet(CheckerNet):
    """A score in (0, 1) that every row and the version move."""

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        return torch.sigmoid(embeddings_BE.mean(1) + self.w / 1000)


class Events(EventSource):
    """Keys at random, a millisecond apart; as many as there are, or until it is told to end."""

    def __init__(self, events: int | None = None) -> None:
        columns = tuple(FeatureColumn(name=each.name, column=each.name) for each in CONFIG.features)
        self.schema = EventSchema(features=columns, label="y")
        self.events = events
        self.ending = threading.Event()

    def total_events(self) -> int | None:
        return self.events

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        for first in itertools.count(start, batch_size):
            last = first + batch_size if self.events is None else self.events
            event_B = np.arange(first, min(first + batch_size, last))
            if self.ending.is_set() or len(event_B) == 0:
                return
            rng = np.random.default_rng(first)
            yield Batch(
                first=first,
                next_offset=int(event_B[-1]) + 1,
                event_B=event_B,
                ts_ms_B=event_B + 1_000_000,
                keys_BF=rng.integers(0, KEYS, (len(event_B), len(CONFIG.features))),
                dense_BD=np.zeros((len(event_B), 0), np.float32),
                label_B=np.zeros(len(event_B), np.float32),
            )


@dataclasses.dataclass
class Fleet:
    """The part of a fleet that DemoReshard asks for."""

    pair: Pair
    publication: Path
    url: str

    @property
    def control(self) -> str:
        return self.pair.control

    def load_unmoved(self, name: str) -> None:
        node = self.pair.nodes[0]
        options = triton.ModelOptions(
            publication=self.publication, bus=self.url, kind="ranking", instances=2
        )
        triton.write_model(node.options.repository, name, options)
        with tritonclient.grpc.InferenceServerClient(node.grpc) as client:
            client.load_model(name)

    def unload(self, name: str) -> None:
        with tritonclient.grpc.InferenceServerClient(self.pair.nodes[0].grpc) as client:
            client.unload_model(name)


def shifted(plan: plan_pb2.Plan) -> list[plan_pb2.Assignment]:
    """Return half of each device's buckets, owned by the next device of the ring."""
    ring = sorted(devices(plan.topology))
    held_by: dict[Place, int] = dict.fromkeys(ring, 0)
    moved = {}
    for bucket, holders in sorted(layout_of(plan.assignments).items()):
        [owner] = holders.owners
        held_by[owner] += 1
        if held_by[owner] % 2:
            moved[bucket] = Holders((ring[(ring.index(owner) + 1) % len(ring)],))
    return assignments_of(moved)


class OrderedReshard(DemoReshard):
    """The demo's reshard, but that it is told what to move and does not wait for a decision."""

    def _watch(self) -> None:
        plan = self._plan_before
        request = control_pb2.StartReshardRequest(
            operation_id="ordered",
            target=control_pb2.ReshardTarget(base_epoch=plan.epoch, assignments=shifted(plan)),
        )
        self._caller.call("StartReshard", request, 30.0)
        now_ms = time.time_ns() // 1_000_000
        self._decision = control_pb2.Decision(operation_id="ordered", at_ms=now_ms)
        self.phase = "moving"

    def _measure(self) -> None:
        self.phase = "done"


class Publishing(Repeated):
    """Publishes five versions a second until told to stop."""

    def __init__(self, model: Model) -> None:
        super().__init__(every_s=0.2)
        self._model = model

    def act(self) -> None:
        self._model.publish()

    def stop(self) -> None:
        super().stop()
        assert self.error is None, self.error


def _lose_rows(model: Model, publication: Path) -> None:
    """Leave some rows out of the snapshot that buckets are added from."""
    lost = {at for at in model.versions[1] if at[1] % 5 == 0}
    [snapshot] = (publication / "snapshots").iterdir()
    shutil.rmtree(snapshot)
    model.snapshot(1, into=snapshot, without=lost)


@pytest.mark.parametrize("lossy", [False, True], ids=["whole", "lossy"])
def test_a_reshard_changes_no_answer_and_a_lost_row_is_found(
    lossy: bool, tmp_path: Path, server_options: triton.ServerOptions
) -> None:
    with contextlib.ExitStack() as stack:
        options = RedisOptions(log=tmp_path / "redis.log")
        url = stack.enter_context(RedisServer(options)).url
        model = Model(tmp_path / "publication", url, CACHE, seed=11, net=MeanNet(1))
        true = model.publication.path
        second = shutil.copytree(true, tmp_path / "second") if lossy else true
        publications = (true, second)
        pair = start_pair(
            stack, tmp_path, server_options, url, model=CONFIG.name, publications=publications
        )
        if lossy:
            _lose_rows(model, second)
        else:
            publishing = Publishing(model)
            stack.callback(publishing.stop)
            publishing.start()
        fleet: Any = Fleet(pair, true, url)
        demo = DemoOptions(directory=tmp_path, backends=tmp_path, cache=CACHE)
        reshard = OrderedReshard(demo, fleet, {"events": 2 * WAITS_AT})
        progress: dict[str, Any] = {}

        def show(said: ReplayProgress) -> None:
            progress.update(dataclasses.asdict(said))

        nodes = [stack.enter_context(ServedModel(node.grpc, "rank")) for node in pair.nodes]
        copy = Copy(stack.enter_context(ServedModel(pair.nodes[0].grpc, UNMOVED_MODEL)))
        config = ReplayConfig(max_staleness_ms=None, compare_from=reshard.begins_at)
        replay = Replay(ServedNodes(nodes), Records(tmp_path), config, copy=copy)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        events = Events()
        stack.callback(events.ending.set)
        running = pool.submit(replay.run, events, progress=show, every_s=0.05)
        while reshard.phase != "done" and not running.done():
            reshard.step(dict(progress))
            time.sleep(0.02)
        events.ending.set()
        running.result(timeout=60)
        assert reshard.phase == "done"

    moved = MovedKeys(Reshard.read(demo.reshard), Records(tmp_path))
    for batch in Events(replay.stats.events).batches(batch_size=config.batch_size):
        moved.add(batch)
    figures = moved.figures()
    assert figures["buckets_moved"] >= 0.3 * figures["buckets"]
    assert figures["buckets_moved_to_other_nodes"] > 0
    assert figures["failed_requests"] == 0
    assert figures["compared"] == figures["answers"] > 20
    assert figures["touched"] >= 0.2
    if lossy:
        assert figures["answers_changed"] > 0
        assert figures["largest_difference"] > 1e-6
    else:
        assert figures["answers_changed"] == 0
        assert figures["versions"] > 1
    assert replay.stats.changed >= figures["answers_changed"]
