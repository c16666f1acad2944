"""An import's description: a model of tables and features, from a TOML or JSON file or options.

model = "rank"
dense_features = 2                # columns of DENSE; that of the dense package if left out

[[tables]]
name = "item"
source = "item"                   # a folder or file; relative to this file
format = "numpy"                  # numpy, safetensors, hps or state_dict; found out if left out
keys = "keys.npy"                 # file (numpy) or tensor (safetensors) of the keys
vectors = "vectors.npy"           # and of the vectors
parameter = "item.weight"         # of a state_dict
dtype = "fp16"                    # fp32, fp16, bf16, int8 or int4
chunks = 1
bucket_bits = 4                   # 2^bits buckets; about 10^5 rows each if left out
default_row = [0.0, 0.5]          # what unknown keys read as; zeros if left out

[[features]]                      # in the order of KEYS' columns; one a table if left out
name = "cand"
table = "item"
pooling = "mean"                  # sum, mean, or none: each key's row
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embertide.trainer.config import FeatureConfig
from embertide.trainer.publish.importer.sources import (
    FORMATS,
    Format,
    ModelImportError,
    RowSource,
    StateDictSource,
    open_hps,
    open_numpy,
    open_safetensors,
)

DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")
_SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".pt": "state_dict",
    ".pth": "state_dict",
    ".bin": "state_dict",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """One table: where its rows are and how they are stored."""

    name: str
    source: Path
    format: Format | None = None  # None: found out by `open`
    keys: str | None = None
    vectors: str | None = None
    parameter: str | None = None
    dtype: str = "fp32"
    chunks: int = 1
    bucket_bits: int | None = None  # None: from the rows
    default_row: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no source could mend."""
        where = f"table {self.name!r}"
        if self.dtype not in DTYPES:
            raise ModelImportError(where, f"dtype {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.format not in (None, *FORMATS):
            raise ModelImportError(where, f"format {self.format!r}; use one of {FORMATS}")

    def _guess(self) -> Format:
        if self.parameter is not None:
            return "state_dict"
        if self.keys is not None and self.keys.endswith(".npy"):
            return "numpy"
        if (guess := _SUFFIXES.get(self.source.suffix)) is not None:
            return guess
        if (self.source / "emb_vector").exists() or (self.source / "key").exists():
            return "hps"
        if self.source.is_dir():
            return "numpy"
        what = "is of no known kind" if self.source.exists() else "is missing"
        raise ModelImportError(
            self.source,
            f"{what}; give a folder with keys.npy and vectors.npy, a folder with key and "
            "emb_vector, or a .safetensors or .pt file",
        )

    def open(self) -> RowSource:
        """Return the rows.

        Raises:
            ModelImportError: They cannot be read; it names the file and the remedy.
        """
        kind = self.format or self._guess()
        if kind == "hps":
            return open_hps(self.source)
        if kind == "state_dict":
            return StateDictSource(self.source, self.parameter or self.name)
        named = {"keys": self.keys, "vectors": self.vectors}
        given = {what: name for what, name in named.items() if name is not None}
        return (open_numpy if kind == "numpy" else open_safetensors)(self.source, **given)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model: tables, ids in their order; features; columns of DENSE (None: as the net has)."""

    name: str
    tables: tuple[TableSpec, ...]
    features: tuple[FeatureConfig, ...]
    dense_features: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no model."""
        where = f"model {self.name!r}"
        names = [table.name for table in self.tables]
        if not names:
            raise ModelImportError(where, "has no table; give --table NAME=PATH or a model file")
        for what, all_names in (("table", names), ("feature", [f.name for f in self.features])):
            for name in all_names:
                if all_names.count(name) > 1:
                    raise ModelImportError(where, f"{what} {name!r} is named twice; rename one")
        for feature in self.features:
            if feature.table not in names:
                raise ModelImportError(
                    where,
                    f"feature {feature.name!r} names table {feature.table!r}; there are "
                    f"{', '.join(names)}",
                )


def _section(values: object, where: str, known: Mapping[str, type | tuple[type, ...]]) -> Any:
    """Return a section of the file whose names and types are known."""
    if not isinstance(values, dict):
        raise ModelImportError(where, f"is {values!r}; it must be a table of settings")
    for name, value in values.items():
        if name not in known:
            raise ModelImportError(where, f"unknown setting {name!r}; known are {', '.join(known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise ModelImportError(where, f"{name} is {value!r}, which is of a wrong type")
    return values


_NUMBER = (int, float)
_MODEL = {"model": str, "dense_features": int, "tables": list, "features": list}
_FEATURE = {"name": str, "table": str, "pooling": str}
_TABLE = {
    **dict.fromkeys(("name", "source", "format", "keys", "vectors", "parameter", "dtype"), str),
    "chunks": int,
    "bucket_bits": int,
    "default_row": list,
}


def _required(section: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if name not in section:
            raise ModelImportError(where, f"{name} is missing; add it")


def _table(values: object, path: Path, index: int) -> TableSpec:
    where = f"{path}, table {index + 1}"
    section = dict(_section(values, where, _TABLE))
    _required(section, ("name", "source"), where)
    row = section.pop("default_row", [])
    if not all(isinstance(value, _NUMBER) for value in row):
        raise ModelImportError(where, f"default_row is {row!r}; give a list of numbers")
    source = path.parent / section.pop("source")
    return TableSpec(**section, source=source, default_row=tuple(map(float, row)))


def _checked(where: str, said: Mapping[str, Any]) -> FeatureConfig:
    try:
        return FeatureConfig(**said)
    except ValueError as error:
        raise ModelImportError(where, str(error)) from error


def _feature(values: object, path: Path, index: int) -> FeatureConfig:
    where = f"{path}, feature {index + 1}"
    section = _section(values, where, _FEATURE)
    _required(section, ("name", "table"), where)
    return _checked(where, section)


def _one_each(tables: Sequence[TableSpec]) -> tuple[FeatureConfig, ...]:
    return tuple(FeatureConfig(name=table.name, table=table.name) for table in tables)


def load_spec(path: Path) -> ModelSpec:
    """Read a model from a .toml or .json file.

    Raises:
        ModelImportError: It is missing, does not parse, or describes no model.
    """
    if not path.is_file():
        raise ModelImportError(path, "is missing; give a .toml or .json file")
    text = path.read_text(encoding="utf-8")
    try:
        parsed = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ModelImportError(path, f"does not parse: {error}") from error
    section = _section(parsed, str(path), _MODEL)
    tables = tuple(_table(each, path, i) for i, each in enumerate(section.get("tables", ())))
    features = tuple(_feature(each, path, i) for i, each in enumerate(section.get("features", ())))
    return ModelSpec(
        name=section.get("model", path.stem),
        tables=tables,
        features=features or _one_each(tables),
        dense_features=section.get("dense_features"),
    )


def parse_table(
    text: str, *, state_dict: Path | None = None, dtype: str = "fp32"
) -> tuple[TableSpec, tuple[FeatureConfig, ...]]:
    """Read `NAME=SOURCE[:FEATURE[/POOLING]...]`; without a feature there is one of that name.

    SOURCE is a folder, a file, `KEYS.npy,VECTORS.npy`, or a parameter where `state_dict` is given.

    Raises:
        ModelImportError: The text is not of that form.
    """
    name, equals, rest = text.partition("=")
    source, *names = rest.split(":")
    if not (name and equals and source and all(names)):
        raise ModelImportError(
            f"--table {text}",
            "is not NAME=SOURCE[:FEATURE[/POOLING]...], as item=data/item:cand:seen/mean; "
            "a path that holds a colon goes into a model file",
        )
    table = TableSpec(name=name, source=Path(source), dtype=dtype)
    if state_dict is not None:
        table = dataclasses.replace(table, source=state_dict, parameter=source)
    elif source.count(",") == 1:
        keys, vectors = source.split(",")
        table = dataclasses.replace(
            table, source=Path(), format="numpy", keys=keys, vectors=vectors
        )
    features = []
    for each in names:
        feature, _, pooling = each.partition("/")
        said = {"name": feature, "table": name, "pooling": pooling or "sum"}
        features.append(_checked(f"--table {text}", said))
    return table, tuple(features) or _one_each([table])
