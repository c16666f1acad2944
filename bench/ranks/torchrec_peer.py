"""TorchRec trains the Criteo DLRM over several ranks on CPUs: the peer of our trainer of ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m bench.ranks.torchrec_peer -- --samples 4096

It prints one JSON line: samples/s of each timed window, the mean loss over them, the plan. It needs
`make build/.torchrec`.

The model is that of bench.train.speed: 26 tables of 200,000 rows x 16, bottom MLP 13-512-256-64-16,
top MLP 512-256-1. TorchRec's planner shards the tables, which learn by FBGEMM's fused exact
row-wise Adagrad; the dense net is ours, replicated by DDP, and learns by fused Adam. Rates and the
range of new rows are those of bench.train.speed. Each rank draws the batches itself before the
clock starts (bench.ranks.batches), so the peer neither reads nor sends events.

All of it works on gloo unchanged: TorchRec's exchanges use all_to_all_single, which gloo has. The
all_to_all of lists, which gloo lacks (pytorch issue 88245), is not used. It is tuned as its users
would tune it. These variants took turns on a 2-core Xeon; ratios are medians of 5 turns of 12 (40)
steps, at batch 4,096 (1,024), where the first line learned 48,109 (38,741) samples/s:

    TrainPipelineSparseDist: the next batch's keys are exchanged ahead    1.00 (1.00)
    ... without huge pages for tables                                     0.98 (0.99)
    no pipeline                                                           0.97 (0.99)
    TrainPipelineSparseDistLite                                           0.98 (0.97)
    torchrec.models.dlrm.DLRM in place of our net                         0.93 (0.93)
    DDP buckets of 0.3 MB, so that backward overlaps with all-reduce      0.96 (0.89)
    Adam with foreach in place of fused                                   0.98 (0.98)

The planner chooses table-wise shards, 13 tables a rank; column-wise shards are whole tables at this
width. It offers no row-wise shards for CPUs ("No available sharding type and compute kernel
combination"). TrainPipelineFusedSparseDist cannot trace the model on CPUs ("unknown parameter
type").

Shapes: B samples of this rank, E all embedding values of a sample.
"""

import collections
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.drift.torchrec import load
from bench.ranks.batches import ROWS, TABLES, draw
from bench.ranks.launching import step_options
from bench.shapes import Shape
from bench.store.peers import fbgemm, use_huge_pages
from embertide.trainer.config import RunConfig
from embertide.trainer.model.build import build_net

_SHAPE = Shape(name="Criteo DLRM", rows=ROWS, tables=TABLES)
_RUN = RunConfig(model=_SHAPE.config())
_NAMES = [feature.name for feature in _RUN.model.features]
_CPU = torch.device("cpu")
_INIT = 0.01  # new rows are uniform within it, as in bench.store.peers


class _Training(nn.Module):
    """The embedding tables, the dense net and the loss, as TorchRec's pipelines take a model."""

    def __init__(self) -> None:
        super().__init__()
        configs = load("modules.embedding_configs")
        tables = [
            configs.EmbeddingBagConfig(
                name=name,
                embedding_dim=_SHAPE.dim,
                num_embeddings=ROWS,
                feature_names=[name],
                init_fn=lambda weights: nn.init.uniform_(weights, -_INIT, _INIT),
            )
            for name in _NAMES
        ]
        module = load("modules.embedding_modules").EmbeddingBagCollection
        self.tables = module(tables=tables, device=torch.device("meta"))
        self.net = build_net(_RUN.model)
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss, and with it what a pipeline gives its caller."""
        pooled_BE = self.tables(batch.sparse_features).values()
        logits_B = self.net(batch.dense_features, pooled_BE)
        loss = self.loss(logits_B, batch.labels)
        return loss, (loss.detach(), logits_B.detach(), batch.labels)


class _Peer:
    """The sharded model, its optimizers and the pipeline that trains it."""

    def __init__(self, samples: int, seed: int) -> None:
        """Shard the model for a global batch of so many samples."""
        torch.manual_seed(seed)
        model = _Training()
        sharders = [
            load("distributed.embeddingbag").EmbeddingBagCollectionSharder(
                fused_params={
                    "optimizer": fbgemm(
                        "split_embedding_configs"
                    ).EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                    "learning_rate": _RUN.optimizer.sparse_learning_rate,
                    "eps": _RUN.optimizer.epsilon,
                }
            )
        ]
        ranks = dist.get_world_size()
        planner = load("distributed.planner")
        topology = planner.Topology(
            world_size=ranks, local_world_size=ranks, compute_device=_CPU.type
        )
        plan = planner.EmbeddingShardingPlanner(
            topology=topology, batch_size=samples // ranks
        ).collective_plan(model, sharders, dist.group.WORLD)
        [shardings] = plan.plan.values()
        self.plan = collections.Counter(
            f"{each.sharding_type}, {each.compute_kernel}, ranks {each.ranks}"
            for each in shardings.values()
        )
        self._model = load("distributed.model_parallel").DistributedModelParallel(
            model, device=_CPU, plan=plan, sharders=sharders
        )
        _use_huge_pages(self._model)
        self._pipeline = load("distributed.train_pipeline").TrainPipelineSparseDist(
            self._model, self._optimizer(), _CPU
        )

    def learn(self, batches: Iterator[Any]) -> Tensor:
        """Take a step and return this rank's loss."""
        loss: Tensor = self._pipeline.progress(batches)[0]
        return loss

    def _optimizer(self) -> Any:
        keyed, optimizers = load("optim.keyed"), load("optim.optimizers")
        dense = keyed.KeyedOptimizerWrapper(
            dict(optimizers.in_backward_optimizer_filter(self._model.named_parameters())),
            lambda parameters: torch.optim.Adam(
                parameters, lr=_RUN.optimizer.dense_learning_rate, fused=True
            ),
        )
        return keyed.CombinedOptimizer([self._model.fused_optimizer, dense])


def _use_huge_pages(model: nn.Module) -> None:
    """Put FBGEMM's tables into huge pages, as the store's are."""
    for module in model.modules():
        for name in ("weights_host", "momentum1_host"):
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor) and tensor.numel():
                use_huge_pages(tensor.detach())


def _drawn(seed: int, samples: int, steps: int) -> list[Any]:
    """Return this rank's part of each batch, as TorchRec has it."""
    jagged = load("sparse.jagged_tensor").KeyedJaggedTensor
    batch = load("datasets.utils").Batch
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = torch.ones(TABLES * samples // ranks, dtype=torch.int32)
    made = []
    for step in range(steps):
        part = draw(seed, step, samples).part(rank, ranks)
        keys = torch.from_numpy(part.keys_BF).T.reshape(-1)
        made.append(
            batch(
                dense_features=torch.from_numpy(part.dense_BD),
                sparse_features=jagged(keys=_NAMES, values=keys, lengths=lengths),
                labels=torch.from_numpy(part.label_B),
            )
        )
    return made


def _mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def measure(samples: int, *, warmup: int, steps: int, windows: int, seed: int) -> dict[str, object]:
    """Train, and return what the program prints; the same on every rank.

    Args:
        samples: Samples of a batch, all ranks together.
        warmup: Steps before the clock starts.
        steps: Steps of a timed window.
        windows: The number of windows that follow one another.
        seed: Seed of the batches and of the net.
    """
    peer = _Peer(samples, seed)
    batches = iter(_drawn(seed, samples, warmup + steps * windows))
    # The pipeline stays filled from window to window: it reads two batches ahead.
    for _ in range(warmup):
        peer.learn(batches)
    rates, losses = [], []
    for _ in range(windows):
        dist.barrier()
        began = time.perf_counter()
        losses += [peer.learn(batches) for _ in itertools.repeat(None, steps)]
        dist.barrier()
        rates.append(samples * steps / (time.perf_counter() - began))
    return {
        "program": "torchrec",
        "ranks": dist.get_world_size(),
        "samples": samples,
        "samples_per_s": [round(rate, 1) for rate in rates],
        "loss": round(_mean_over_ranks(torch.stack(losses).mean()), 6),
        "steps": [warmup, warmup + steps * windows],
        "seed": seed,
        "plan": dict(peer.plan),
    }


def main() -> None:
    """Run as a rank that torchrun started."""
    arguments = step_options("bench.ranks.torchrec_peer", __doc__).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        printed = measure(**vars(arguments))
        if dist.get_rank() == 0:
            print(json.dumps(printed), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
