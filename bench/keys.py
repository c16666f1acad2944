"""Requests for perf_analyzer: Zipf keys and dense features, as its `--input-data` JSON.

`python -m bench.keys` writes `bench/data/zipf_keys.json`, the small file that `bench.perf_check`
sends; the benchmark makes larger ones under `build/bench`.

Shapes: N samples, F features, L keys a bag.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.shapes import SEED, Shape

SMALL = Path(__file__).parent / "data" / "zipf_keys.json"
SMALL_ROWS = 1000
SMALL_SAMPLES = 64
DENSE = 13
# Each feature has an exponent of its own, from nearly flat to steep, as real columns differ.
_EXPONENTS = (1.05, 1.2)
# Odd and prime: rank -> key is a bijection that scatters the frequent keys over the table.
_SCATTER = 2_654_435_761


@functools.lru_cache(maxsize=32)
def _cumulative_weights(rows: int, exponent: float) -> NDArray[np.float64]:
    return np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)


def zipf_keys(
    rng: np.random.Generator, rows: int, exponent: float, count: int
) -> NDArray[np.int64]:
    """Draw keys below `rows`, the i-th most frequent with weight i^-exponent."""
    cumulative = _cumulative_weights(rows, float(exponent))
    ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return np.asarray(ranks.astype(np.int64) * _SCATTER % rows)


def draw(shape: Shape, samples: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return keys_NFL and dense_ND."""
    rng = np.random.default_rng(SEED + 1)
    exponents = np.linspace(*_EXPONENTS, shape.tables)
    columns = [
        zipf_keys(rng, shape.rows, exponent, samples * shape.bag).reshape(samples, shape.bag)
        for exponent in exponents
    ]
    dense = rng.standard_normal((samples, DENSE)).astype(np.float32)
    return np.stack(columns, axis=1), dense


def _tensor(array: NDArray[Any]) -> dict[str, object]:
    values: list[Any] = array.reshape(-1).tolist()
    return {"content": [round(v, 4) for v in values] if array.dtype == np.float32 else values}


def _jagged(keys_NFL: NDArray[np.int64], dense_ND: NDArray[np.float32]) -> dict[str, object]:
    samples, features, bag = keys_NFL.shape
    lengths = np.full(samples * features, bag, np.int32)
    tensors: dict[str, NDArray[Any]] = {"KEYS": keys_NFL, "LENGTHS": lengths, "DENSE": dense_ND}
    return {name: _tensor(each) | {"shape": [each.size]} for name, each in tensors.items()}


def requests(shape: Shape, *, batch: int, count: int, dense: bool) -> dict[str, object]:
    """Return perf_analyzer's JSON of `count` requests.

    Rectangular samples stand one by one, perf_analyzer's `-b` puts them together; a jagged request
    is one entry.
    """
    keys_NFL, dense_ND = draw(shape, batch * count)
    entries: list[dict[str, object]] = []
    if shape.bag > 1:
        for i in range(0, len(keys_NFL), batch):
            entries.append(_jagged(keys_NFL[i : i + batch], dense_ND[i : i + batch]))
    else:
        for keys_FL, dense_D in zip(keys_NFL, dense_ND, strict=True):
            entry: dict[str, object] = {"KEYS": _tensor(keys_FL) | {"shape": [shape.tables]}}
            if dense:
                entry["DENSE"] = _tensor(dense_D) | {"shape": [DENSE]}
            entries.append(entry)
    return {"data": entries}


def small_shape() -> Shape:
    """Return the model that the committed keys are for."""
    return Shape(name="check", rows=SMALL_ROWS)


def main() -> None:
    """Write the committed file."""
    data = requests(small_shape(), batch=1, count=SMALL_SAMPLES, dense=True)
    SMALL.parent.mkdir(exist_ok=True)
    SMALL.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
