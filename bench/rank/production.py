"""A model of the size that is served in production: no data is needed for it.

Imports no compiled part of the project: the Python backend's stub has none.
"""

from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig


def production() -> ModelConfig:
    """Return a model of 60 features of the user and 10 of the candidate (issue F)."""
    names = [f"user{i}" for i in range(60)] + [f"candidate{i}" for i in range(10)]
    tables = tuple(TableConfig(name=name, dim=32) for name in names)
    features = tuple(FeatureConfig(name=name, table=name) for name in names)
    return ModelConfig(
        name="production", tables=tables, features=features, top_mlp=(1024, 512, 256)
    )
