"""Folders and a `ps.json` as HugeCTR's HPS has them: a model of three tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIMS = {"wide": 1, "deep": 16, "ads": 32}
DEFAULTS = {"wide": 0.0, "deep": 0.5, "ads": -1.0}

Rows = dict[str, dict[int, NDArray[np.float32]]]


def model_entry() -> dict[str, Any]:
    """Some of what HPS's documentation lists of a model; some files have numbers as text."""
    return {
        "model": "hps_wdl",
        "sparse_files": [f"{table}_sparse.model" for table in DIMS],
        "embedding_table_names": list(DIMS),
        "embedding_vecsize_per_table": list(DIMS.values()),
        "maxnum_catfeature_query_per_table_per_sample": [2, 26, 1],
        "default_value_for_each_table": [str(each) for each in DEFAULTS.values()],
        "deployed_device_list": [0],
        "max_batch_size": 1024,
        "gpucache": True,
        "gpucacheper": 0.5,
    }


def write(folder: Path, rows: int = 2_000) -> Rows:
    """Write a `ps.json` and its folders; return each table's rows by key, some keys negative."""
    draw = np.random.default_rng(5)
    found: Rows = {}
    for table, dim in DIMS.items():
        place = folder / f"{table}_sparse.model"
        place.mkdir(parents=True)
        keys = draw.choice(4 * rows, rows, replace=False).astype(np.int64) - rows
        values = draw.standard_normal((rows, dim)).astype(np.float32)
        keys.tofile(place / "key")
        values.tofile(place / "emb_vector")
        found[table] = dict(zip(keys.tolist(), values, strict=True))
    said = {"supportlonglong": True, "volatile_db": {"type": "hash_map"}, "models": [model_entry()]}
    (folder / "ps.json").write_text(json.dumps(said))
    return found


def row_of(rows: Rows, table: str, key: int) -> NDArray[np.float32]:
    """What HPS gives for a key of a table."""
    return rows[table].get(key, np.full(DIMS[table], DEFAULTS[table], np.float32))
