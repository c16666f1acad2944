"""TorchRec's planner on a task, and its plan as a placement for the simulator.

`make build/.torchrec` puts TorchRec into `build/peers`, out of the way of the environment. It is
told the truth about the task: sizes, mean pooling, batch, memory and bandwidths.

It plans each task in four ways, of which none is best everywhere: for GPUs, where it offers
row-wise sharding, and for CPUs, where it does not, with the same bandwidths; with its estimator of
inference and with that of training, its default. No memory is reserved for anything but tables.
"""

import collections
import importlib
import logging
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from bench.drift.simulator import Machine, Shard
from bench.drift.tasks import Task
from bench.servers import BUILD, BenchError

FOLDER = BUILD / "peers"
_MS = 1000
Device = Literal["cuda", "cpu"]
Estimator = Literal["inference", "training"]
WAYS: tuple[tuple[Device, Estimator], ...] = (
    ("cuda", "inference"),
    ("cpu", "inference"),
    ("cuda", "training"),
    ("cpu", "training"),
)


class Planned(NamedTuple):
    """A placement, and what planning took of a core. No placement: the planner found none."""

    placement: list[list[Shard]] | None
    seconds: float
    kinds: Mapping[str, int]


def plan(task: Task, device: Device, estimator: Estimator) -> Planned:
    """Return the best plan of its proposers.

    Raises:
        BenchError: TorchRec is not installed; the message says how.
    """
    types = load("distributed.planner.types")
    modules = load("modules.embedding_modules")
    configs = [
        load("modules.embedding_configs").EmbeddingBagConfig(
            name=f"t{at}",
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[f"f{at}"],
        )
        for at, table in enumerate(task.tables)
    ]
    module = modules.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sharder = load("distributed.embeddingbag").EmbeddingBagCollectionSharder()
    planner = _planner(task, device, estimator)
    begin = time.process_time()
    try:
        [by_table] = planner.plan(module, [sharder]).plan.values()
    except types.PlannerError:
        return Planned(None, time.process_time() - begin, {})
    seconds = time.process_time() - begin
    shardings = [by_table[config.name] for config in configs]
    return Planned(
        [_shards(task, at, sharding) for at, sharding in enumerate(shardings)],
        seconds,
        collections.Counter(sharding.sharding_type for sharding in shardings),
    )


def _planner(task: Task, device: Device, estimator: Estimator) -> Any:
    package = "distributed.planner"
    types, estimators = load(f"{package}.types"), load(f"{package}.shard_estimators")
    constraints = {
        f"t{at}": types.ParameterConstraints(pooling_factors=[table.pooling])
        for at, table in enumerate(task.tables)
    }
    machine = Machine()
    topology = types.Topology(
        world_size=task.devices,
        compute_device=device,
        hbm_cap=task.capacity if device == "cuda" else 0,
        ddr_cap=task.capacity if device == "cpu" else 0,
        ssd_cap=0,
        local_world_size=1,
        hbm_mem_bw=machine.memory_bytes_per_s / _MS,
        ddr_mem_bw=machine.memory_bytes_per_s / _MS,
        inter_host_bw=machine.link_bytes_per_s / _MS,
    )
    perf = estimators.EmbeddingPerfEstimator(
        topology, constraints, is_inference=estimator == "inference"
    )
    storage = estimators.EmbeddingStorageEstimator(topology, constraints, is_inference=True)
    nothing = load(f"{package}.storage_reservations").FixedPercentageStorageReservation(0)
    return load(f"{package}.planners").EmbeddingShardingPlanner(
        topology=topology,
        batch_size=task.samples,
        enumerator=load(f"{package}.enumerators").EmbeddingEnumerator(
            topology, task.samples, constraints, [perf, storage]
        ),
        storage_reservation=nothing,
        constraints=constraints,
        debug=False,
    )


def _shards(task: Task, at: int, sharding: Any) -> list[Shard]:
    """Return the shards of a table."""
    table, spread = task.tables[at], task.spreads[at]
    if sharding.sharding_spec is None:
        everywhere = tuple(range(task.devices))
        return [Shard(key_share=1, row_share=1, devices=everywhere, columns=(0, table.dim))]
    made = []
    for shard, rank in zip(sharding.sharding_spec.shards, sharding.ranks, strict=True):
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        if rows:
            made.append(
                Shard(
                    key_share=spread.of_rows(row / table.rows, (row + rows) / table.rows),
                    row_share=rows / table.rows,
                    devices=(rank,),
                    columns=(column, column + columns),
                )
            )
    return made


def load(module: str) -> Any:
    """Import a module of TorchRec, whose start warns of much that does not matter here."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = importlib.import_module(f"torchrec.{module}")
    except ImportError as error:
        raise BenchError(
            f"TorchRec is not in {FOLDER} ({error}): run make build/.torchrec"
        ) from error
    logging.getLogger().setLevel(logging.ERROR)
    return imported
