"""Transforms of dense features: fitted here, once; done by the store's library, here and in nodes.

The steps of a feature are fitted one after the other, each to what those before it make of the
sample. Shapes: N events of a sample, D columns of DENSE, V values that are not missing, P points.
"""

import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.config import DenseConfig, DenseStep, ModelConfig

log = logging.getLogger(__name__)

Doubles = NDArray[np.float64]
_FORMAT = 1


def fitted_columns(transforms: _store.Transforms) -> dict[str, dict[str, Any]]:
    """Return what was fitted, by the column's name, as `make_transforms` takes it."""
    return {column["name"]: column for column in json.loads(transforms.text)["columns"]}


def make_transforms(
    model: ModelConfig,
    sample_ND: NDArray[np.float32],
    fitted: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> _store.Transforms:
    """Return what a model does to DENSE, fitted to a sample of it.

    Columns of sequences pass as they are. A feature that is always missing in the sample is fitted
    as if it were always 0, one of a single value to that value; the log tells both.

    Args:
        model: With dense features.
        sample_ND: DENSE of some events; of its columns, the model's own are looked at. It may be
            empty where no feature is fitted.
        fitted: Columns that were fitted before, by name; they stay as they are.
    """
    columns = [
        fitted.get(feature.name) or _column(feature, sample_ND[:, d])
        for d, feature in enumerate(model.dense)
    ]
    columns += [
        {"name": name, "steps": [], "fill": 0.0, "missing": False}
        for name in model.raw_columns[len(model.dense) :]
    ]
    return _transforms(columns)


def _transforms(columns: list[dict[str, Any]]) -> _store.Transforms:
    return _store.Transforms(json.dumps({"format": _FORMAT, "columns": columns}))


def _column(feature: DenseConfig, value_N: NDArray[np.float32]) -> dict[str, Any]:
    value_V = value_N[~np.isnan(value_N)]
    if feature.fitted and (len(value_V) == 0 or value_V.min() == value_V.max()):
        what = f"always {value_V[0]}" if len(value_V) else "missing"
        log.warning(
            "dense feature %r is %s in the first %d events, and so tells nothing there",
            feature.name,
            what,
            len(value_N),
        )
    value_V = value_V if len(value_V) else np.zeros(1, np.float32)
    steps: list[dict[str, Any]] = []
    for kind in feature.steps:
        step = {"kind": kind, **_fit(kind, feature, value_V.astype(np.float64))}
        alone = {"name": feature.name, "steps": [step], "fill": 0.0, "missing": False}
        value_V = _transforms([alone]).apply(value_V[:, None])[0][:, 0]
        steps.append(step)
    return {
        "name": feature.name,
        "steps": steps,
        "fill": feature.fill,
        "missing": feature.missing,
    }


def _fit(kind: DenseStep, feature: DenseConfig, value_V: Doubles) -> dict[str, Any]:
    """Return the fields of a step."""
    least, most = float(value_V.min()), float(value_V.max())
    if kind == "clip":
        low, high = np.quantile(value_V, feature.clip).tolist()
        # Almost all values are one: all others would become it.
        return {"low": low, "high": high} if low < high else {"low": least, "high": most}
    if kind == "standardise":
        std = float(value_V.std()) if least < most else 1.0
        return {"mean": float(value_V.mean()), "std": max(std, float(np.finfo(np.float32).tiny))}
    if kind == "quantile":
        return _quantile(value_V, feature.points)
    if kind == "bucketise":
        share_P = np.arange(1, feature.points + 1) / (feature.points + 1)
        return {"edges": np.unique(np.quantile(value_V, share_P)).tolist()}
    return {}


def _quantile(value_V: Doubles, points: int) -> dict[str, Any]:
    """Return points of the distribution; a value that many have stands at the middle of theirs."""
    share_P = np.linspace(0, 1, points)
    values, first, count = np.unique(
        np.quantile(value_V, share_P), return_index=True, return_counts=True
    )
    shares = (share_P[first] + share_P[first + count - 1]) / 2
    return {"values": values.tolist(), "shares": shares.tolist()}
