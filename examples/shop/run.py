"""The next item of a session: two towers, whose dot product is the score of a candidate."""

import torch
from torch import nn

from embertide.config import (
    DenseConfig,
    EvalConfig,
    FeatureConfig,
    ModelConfig,
    RunConfig,
    TableConfig,
)
from embertide.data import EventSchema, FeatureColumn
from embertide.nn import Columns


class TwoTowers(nn.Module):
    """One tower for what is known of the session, one for the item; B samples, W values each."""

    SESSION, ITEM = ("visitor", "hour", "device", "seen"), ("item", "category")

    def __init__(self, model: ModelConfig, width: int = 32) -> None:
        """Make both towers as wide as their inputs ask for."""
        super().__init__()
        self.columns = Columns(model)
        at = self.columns.embedding
        widths = [
            sum(at[name].stop - at[name].start for name in names)
            for names in (self.SESSION, self.ITEM)
        ]
        widths[1] += self.columns.dense_width  # the price is of the item
        self.session, self.item = (
            nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, width))
            for inputs in widths
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the logits, [B]."""
        dense, embeddings = self.columns(dense, embeddings)
        session, item = (
            torch.cat([embeddings[:, self.columns.embedding[name]] for name in names], dim=1)
            for names in (self.SESSION, self.ITEM)
        )
        session_BW = self.session(session)
        item_BW = self.item(torch.cat([item, dense], dim=1))
        return (session_BW * item_BW).sum(1) + self.bias


schema = EventSchema(
    features=(
        *(FeatureColumn(name=name, column=name) for name in ("visitor", "hour", "device")),
        FeatureColumn(name="seen", column="seen", transform="keys"),
        *(FeatureColumn(name=name, column=name) for name in ("item", "category")),
    ),
    dense=("price",),
    label="clicked",
    ts="ts",
)
run = RunConfig(
    model=ModelConfig(
        name="shop",
        tables=(
            TableConfig(name="visitor", bucket_bits=3),
            TableConfig(name="item", dim=32, bucket_bits=3),
            *(TableConfig(name=name, dim=8) for name in ("hour", "device", "category")),
        ),
        # The seen keys are items, so the feature shares their table.
        features=(
            *(FeatureConfig(name=name, table=name) for name in ("visitor", "hour", "device")),
            FeatureConfig(name="seen", table="item", keys="list", pooling="mean"),
            *(FeatureConfig(name=name, table=name) for name in ("item", "category")),
        ),
        dense=(DenseConfig(name="price", steps=("log1p", "standardise")),),
        net=TwoTowers,
        net_arguments={"width": 32},
    ),
    # Nine of ten items shown are not clicked: a third of them is learned, each counting three.
    negative_rate=0.33,
    warmup_events=2000,
    publish_every_s=1800,
    snapshot_every=12,
    evaluation=EvalConfig(user="visitor", slices=("device",)),
)
