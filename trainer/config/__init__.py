"""The configuration of a training run: model, optimisation, publishing. Configuration as code.

Every class is frozen and checked when it is made; a run is a `RunConfig`; those of the inputs that
we know stand in presets.py. `embertide train --print-config` shows the "Attributes" below as they
stand, so each says in plain words what its setting does and why the default is what it is.

Runs outlive builds: a checkpoint of an older build lacks the settings that are new. So a new
setting's default must mean what runs did before it existed. Where another default is better,
`field(default=..., metadata={BEFORE: ...})` gives the value that means the former behaviour. A run
of an older build then goes on with the same bytes (run/checkpoint/settings.py compares them). What
happens when a run goes on with another value is a property of the field, too (changes.py).
"""

from embertide.trainer.config.changes import BEFORE
from embertide.trainer.config.evaluation import HOUR_OF_DAY, EvalConfig
from embertide.trainer.config.labels import LabelJoin
from embertide.trainer.config.learning import (
    CorrectionConfig,
    Optimizer,
    OptimizerConfig,
    PruneConfig,
    ScheduleConfig,
    Utility,
)
from embertide.trainer.config.model import NETS, HeadConfig, ModelConfig
from embertide.trainer.config.run import (
    Codec,
    Codecs,
    NetDevice,
    NetDtype,
    PublishBudget,
    RunConfig,
)
from embertide.trainer.config.served import ReducedConfig, ReducedType
from embertide.trainer.config.sync import (
    DCT,
    AllReduce,
    AsynchronousSync,
    Hop,
    LocalSGD,
    PartialAllReduce,
    Sync,
)
from embertide.trainer.config.tables import (
    MAX_PUBLISHED,
    MAX_PUBLISHED_TIMED,
    NO_TIME,
    CountersConfig,
    DenseConfig,
    DenseStep,
    FeatureConfig,
    FeatureKeys,
    Pooling,
    RowDtype,
    SequenceConfig,
    ServedDtype,
    TableConfig,
)

__all__ = [
    "BEFORE",
    "DCT",
    "HOUR_OF_DAY",
    "MAX_PUBLISHED",
    "MAX_PUBLISHED_TIMED",
    "NETS",
    "NO_TIME",
    "AllReduce",
    "AsynchronousSync",
    "Codec",
    "Codecs",
    "CorrectionConfig",
    "CountersConfig",
    "DenseConfig",
    "DenseStep",
    "EvalConfig",
    "FeatureConfig",
    "FeatureKeys",
    "HeadConfig",
    "Hop",
    "LabelJoin",
    "LocalSGD",
    "ModelConfig",
    "NetDevice",
    "NetDtype",
    "Optimizer",
    "OptimizerConfig",
    "PartialAllReduce",
    "Pooling",
    "PruneConfig",
    "PublishBudget",
    "ReducedConfig",
    "ReducedType",
    "RowDtype",
    "RunConfig",
    "ScheduleConfig",
    "SequenceConfig",
    "ServedDtype",
    "Sync",
    "TableConfig",
    "Utility",
]
