"""A model as HugeCTR's HPS is configured: one of `ps.json`, whose tables are folders of two files.

HPS gives the row of each key that it is asked for, and pools nothing; so does a model that is read
here: it has a feature a table, in the file's order, with pooling none.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embertide.trainer.config import FeatureConfig
from embertide.trainer.publish.importer.sources import ModelImportError, open_hps
from embertide.trainer.publish.importer.spec import DTYPES, ModelSpec, TableSpec

# Settings of a model that are about its rows; all others are about HPS's own tiers.
_TABLES = "embedding_table_names"
_DIMS = "embedding_vecsize_per_table"
_DEFAULTS = "default_value_for_each_table"
_READ = ("model", "sparse_files", _TABLES, _DIMS, _DEFAULTS)
_DENSE = ("dense_file", "network_file")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HpsModel:
    """A model of a file.

    Attributes:
        spec: Its tables, and a feature of each.
        unread: Names of settings that have no place here, as they stand in the file.
        dense: Whether the file names a dense net, which is not read.
    """

    spec: ModelSpec
    unread: tuple[str, ...]
    dense: bool


def load_hps(path: Path, model: str | None = None, dtype: str = "fp32") -> HpsModel:
    """Read a model of a `ps.json`: that of a name, or the only one.

    Folders that are not absolute are looked for in the working folder, as HPS does, then beside the
    file.

    Raises:
        ModelImportError: The file or a table is not what it should be; it says what to do.
    """
    if dtype not in DTYPES:
        raise ModelImportError("--dtype", f"is {dtype!r}; use one of {', '.join(DTYPES)}")
    said = _parsed(path)
    entry = _chosen(said, path, model)
    name = str(entry["model"])
    where = f"{path}, model {name!r}"
    files = _list(entry, "sparse_files", where)
    if not files:
        raise ModelImportError(where, "has no sparse_files: add the folder of each table")
    count = len(files)
    names = [str(each) for each in _list(entry, _TABLES, where)]
    names = names or [f"sparse_embedding{number}" for number in range(1, count + 1)]
    if len(names) != count:
        raise ModelImportError(
            where, f"{_TABLES} has {len(names)} names and sparse_files {count}: give one a table"
        )
    dims = [_number(each, where, _DIMS) for each in _list(entry, _DIMS, where)]
    defaults = [_number(each, where, _DEFAULTS) for each in _list(entry, _DEFAULTS, where)]
    tables = []
    for number, (table, file) in enumerate(zip(names, files, strict=True)):
        folder = _folder(str(file), path, f"{where}, table {table!r}")
        dim = open_hps(folder).dim
        # Some files have one entry a column of the data there, whatever number of tables there is.
        if len(dims) == count and dims[number] != dim:
            raise ModelImportError(
                folder,
                f"has rows of {dim} values, and {path} says {dims[number]:g} ({_DIMS}): correct "
                "the one that is wrong",
            )
        default = defaults[number] if number < len(defaults) else 0.0
        tables.append(
            TableSpec(
                name=table,
                source=folder,
                format="hps",
                dtype=dtype,
                default_row=(default,) * dim if default else (),
            )
        )
    features = tuple(FeatureConfig(name=table, table=table, pooling="none") for table in names)
    others = [each for each in said if each != "models"]
    return HpsModel(
        spec=ModelSpec(name=name, tables=tuple(tables), features=features),
        unread=tuple(sorted({*others, *entry} - {*_READ, *_DENSE})),
        dense=any(each in entry for each in _DENSE),
    )


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelImportError(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelImportError(path, f"is no JSON: {error}") from error
    models = said.get("models") if isinstance(said, dict) else None
    if not isinstance(models, list) or not models:
        raise ModelImportError(
            path, 'has no "models", a list: give the file that tritonserver got as ps='
        )
    for each in models:
        if not isinstance(each, dict) or not isinstance(each.get("model"), str):
            raise ModelImportError(path, f'has a model without a name ("model"): {each!r}')
    return dict(said)


def _chosen(said: Mapping[str, Any], path: Path, name: str | None) -> Mapping[str, Any]:
    models: list[Mapping[str, Any]] = said["models"]
    there = [each["model"] for each in models]
    if name is None and len(models) > 1:
        raise ModelImportError(path, f"has the models {there}: choose one, --model {there[0]}")
    found = [each for each in models if name in (None, each["model"])]
    if not found:
        raise ModelImportError(path, f"has no model {name!r}; it has {there}: give one of these")
    if len(found) > 1:
        raise ModelImportError(path, f"has two models {name!r}: rename one")
    return found[0]


def _list(entry: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = entry.get(name, [])
    if not isinstance(value, list):
        raise ModelImportError(where, f"{name} is {value!r}; it must be a list")
    return value


def _number(value: object, where: str, name: str) -> float:
    try:
        number = float(str(value))  # some files have numbers as text
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ModelImportError(where, f"{name} has {value!r}; give a number")
    return number


def _folder(text: str, path: Path, where: str) -> Path:
    if "://" in text:
        raise ModelImportError(where, f"its folder is {text}: copy it here, and write that path")
    given = Path(text)
    places = list(dict.fromkeys([given, path.parent / given]))  # of an absolute one, one place
    for place in places:
        if os.path.isdir(place):  # noqa: PTH112 — Path.is_dir raises for a name that is too long
            return place
    looked = " and ".join(str(place.absolute()) for place in places)
    raise ModelImportError(
        where, f"no folder {text}: there is no {looked}. Correct sparse_files, or copy it there"
    )
