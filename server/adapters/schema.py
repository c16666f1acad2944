"""The columns of a model's requests, as `config.pbtxt` tells clients: made from a manifest.

The backend proves that the features are those of the model that it loads.
"""

import json
from pathlib import Path
from typing import Any

from embertide import _store
from embertide._common.quoting import check_name


def schema_of(snapshot: Path) -> str:
    """Return the parameter `schema` of a model, JSON (docs/serving.md, Schema).

    Raises:
        OSError: The snapshot has no manifest, or lacks a file that it names.
        ValueError: They are none of ours.
    """
    manifest = json.loads((snapshot / "manifest.json").read_text(encoding="utf-8"))
    sequences = manifest.get("sequences", [])
    made = {column for each in sequences for column in each["columns"]}
    dims = {table["name"]: table["dim"] for table in manifest["tables"]}
    features: list[dict[str, Any]] = []
    for each in manifest["features"]:
        said = {"name": each["name"], "dim": dims[each["table"]], "pooling": each["pooling"]}
        said |= {"weighed": True} if each.get("weighed") else {}
        said |= {"made": True} if each.get("crossed") or each["name"] in made else {}
        features.append(said)
    made_dense = sum(2 + (len(e["columns"]) if e.get("times") else 0) for e in sequences)
    dense: dict[str, Any] = {"columns": int(manifest["dense_features"]) - made_dense}
    dense |= {"made": made_dense} if sequences else {}
    names = _dense_names(snapshot, manifest)
    if names is not None and len(names) >= dense["columns"]:
        dense["names"] = names[: dense["columns"]]
    heads = {"heads": manifest["heads"]} if manifest.get("heads") else {}
    made_by_clients = _config(snapshot, manifest)
    told = {each: made_by_clients[each] for each in ("bins", "texts") if made_by_clients.get(each)}
    return json.dumps({"features": features, "dense": dense, **heads, **told}, ensure_ascii=False)


def context_of(snapshot: Path) -> tuple[str, ...]:
    """Return the columns of a snapshot's model that are the user's; none: it names none.

    Raises:
        OSError: The snapshot has no manifest.
        ValueError: It is none of ours.
    """
    manifest = json.loads((snapshot / "manifest.json").read_text(encoding="utf-8"))
    return tuple(manifest.get("context", ()))


def model_of(snapshot: Path) -> str:
    """Return the name that a snapshot's model has.

    Raises:
        OSError: The snapshot has no manifest.
        ValueError: It says none, or one that is no name.
    """
    manifest = json.loads((snapshot / "manifest.json").read_text(encoding="utf-8"))
    return check_name("model", str(manifest.get("model", "")))


def _config(snapshot: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what a snapshot says of columns that clients make; nothing: it says none."""
    for part in manifest["dense"]:
        if part["role"] == "config":
            data = (snapshot / part["path"]).read_bytes()
            # No node reads this file, so nobody else proves it.
            if (len(data), _store.crc32c(data)) != (part["bytes"], part["crc32c"]):
                raise ValueError(f"{snapshot / part['path']} is not what manifest.json says of it")
            said: dict[str, Any] = json.loads(data)
            return said
    return {}


def _dense_names(snapshot: Path, manifest: dict[str, Any]) -> list[str] | None:
    """Return the names of DENSE's columns, if the snapshot has transforms, which name them."""
    for part in manifest["dense"]:
        if part["role"] == "transforms":
            text = (snapshot / part["path"]).read_text(encoding="utf-8")
            return [column["name"] for column in json.loads(text)["columns"]]
    return None
