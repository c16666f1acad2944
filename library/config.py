"""The settings of a run, as frozen dataclasses, and the models of the synthetic news.

`RunConfig` holds all of them: the model (`ModelConfig`), how it learns, what it publishes and what
it measures. Every class checks its values when it is made; a ValueError names the value and the
remedy. `embertide train --print-config` explains each setting, and docs/training.md has examples.
Needs `embertide[train]`, and loads no torch.
"""

from embertide._common.extras import needed_by

with needed_by("config", "train"):
    from embertide.trainer.config import (
        DCT,
        AllReduce,
        Codecs,
        CorrectionConfig,
        CountersConfig,
        DenseConfig,
        EvalConfig,
        FeatureConfig,
        HeadConfig,
        Hop,
        LabelJoin,
        LocalSGD,
        ModelConfig,
        OptimizerConfig,
        PartialAllReduce,
        PruneConfig,
        PublishBudget,
        RunConfig,
        ScheduleConfig,
        SequenceConfig,
        TableConfig,
    )
    from embertide.trainer.presets import (
        news_counters,
        news_crossed,
        news_history,
        news_model,
        news_rates,
    )

__all__ = [
    "DCT",
    "AllReduce",
    "Codecs",
    "CorrectionConfig",
    "CountersConfig",
    "DenseConfig",
    "EvalConfig",
    "FeatureConfig",
    "HeadConfig",
    "Hop",
    "LabelJoin",
    "LocalSGD",
    "ModelConfig",
    "OptimizerConfig",
    "PartialAllReduce",
    "PruneConfig",
    "PublishBudget",
    "RunConfig",
    "ScheduleConfig",
    "SequenceConfig",
    "TableConfig",
    "news_counters",
    "news_crossed",
    "news_history",
    "news_model",
    "news_rates",
]
