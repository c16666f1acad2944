"""Importing models: every source gives the same bytes, memory is bounded, errors say what to do."""

import dataclasses
import json
import shutil
import struct
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import typer
from numpy.typing import NDArray
from typer.testing import CliRunner

from embertide import _store
from embertide.trainer.commands import import_model as import_command
from embertide.trainer.config import FeatureConfig
from embertide.trainer.data.keys import buckets_of, hash_keys
from embertide.trainer.embedding.records import encode_rows, unstorable
from embertide.trainer.publish.importer import model
from embertide.trainer.publish.importer.model import ImportOptions, ImportReport, import_model
from embertide.trainer.publish.importer.sources import ModelImportError
from embertide.trainer.publish.importer.spec import ModelSpec, TableSpec, load_spec, parse_table
from embertide.trainer.publish.snapshot import read_manifest

DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")
Rows = dict[int, NDArray[np.float32]]
Usage = namedtuple("Usage", "total used free")


def some_keys(count: int, seed: int = 1) -> NDArray[np.int64]:
    """Distinct keys over the whole range, extremes included, in no order."""
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(-(2**63), 2**63, count, np.int64))
    keys[:3] = (-(2**63), 2**63 - 1, -1)
    return rng.permutation(keys)


def some_values(rows: int, dim: int, seed: int = 2) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)


def write_numpy(folder: Path, keys: NDArray[Any], values: NDArray[Any]) -> Path:
    folder.mkdir(parents=True)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "vectors.npy", values)
    return folder


def one_table(source: Path, **more: Any) -> ModelSpec:
    table = TableSpec(name="item", source=source, **more)
    return ModelSpec(
        name="m", tables=(table,), features=(FeatureConfig(name="item", table="item"),)
    )


def stored_table(entry: dict[str, Any]) -> _store.TableConfig:
    chunk_dim = entry["dim"] // entry["chunks"]
    layout = _store.RowLayout(dtype=entry["dtype"], chunks=entry["chunks"], chunk_dim=chunk_dim)
    return _store.TableConfig(
        name=entry["name"], id=entry["id"], layout=layout, bucket_bits=entry["bucket_bits"]
    )


def read_records(snapshot: Path, name: str = "item") -> tuple[dict[int, bytes], Any]:
    """Every record of a table by its signed key, through the store's own reader."""
    manifest: Any = read_manifest(snapshot)
    table = stored_table(next(each for each in manifest["tables"] if each["name"] == name))
    files = [each for each in manifest["buckets"] if each["table"] == name]
    assert [each["bucket"] for each in files] == list(range(1 << table.bucket_bits))
    found: dict[int, bytes] = {}
    for each in files:
        info = _store.BucketFileInfo(**each)
        data = _store.read_bucket_file(str(snapshot), table, info)
        size = len(data) // each["rows"] if each["rows"] else 1
        for at in range(0, len(data), size):
            found[struct.unpack_from("<q", data, at)[0]] = data[at : at + size]
    return found, table


def expect_rows(snapshot: Path, keys: NDArray[Any], values: NDArray[Any]) -> None:
    """The snapshot holds exactly these rows, as `_store` encodes them one by one."""
    found, table = read_records(snapshot)
    live = (1 << table.layout.chunks) - 1
    want = {
        int(key): _store.encode_record(
            int(key) % 2**64, live, 0, _store.encode_payload(table.layout, live, row)
        )
        for key, row in zip(keys.astype(np.int64), values.astype(np.float32), strict=True)
    }
    assert found == want


def test_keys_hash_as_in_the_store() -> None:
    keys = some_keys(2000)
    hashes = hash_keys(keys.view(np.uint64))
    assert hashes.tolist() == [_store.hash_key(int(key)) for key in keys]
    for bits in (0, 1, 9, 17):
        want = [_store.hash_key(int(key)) >> (64 - bits) if bits else 0 for key in keys]
        assert buckets_of(keys.view(np.uint64), bits).tolist() == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_encoded_as_the_store_does_bit_for_bit(dtype: str) -> None:
    layout = _store.RowLayout(dtype=dtype, chunks=3, chunk_dim=2)
    rng = np.random.default_rng(5)
    spread = np.float32(2) ** rng.integers(-149, 14, (3000, 6)).astype(np.float32)
    values = some_values(3000, 6) * spread
    values[0] = 0
    values[1] = -0.0
    values[2] = (1e-45, -1e-45, 0, 0, 3e-44, 0)  # below what a scale of int8 can say
    values[3] = (1, 1.00390625, 1.01171875, 0.5, 2049, 2051)  # halves: to even
    values[4] = (65519, -65519, 65504, 0, 1, 2)
    keys = np.arange(len(values), dtype=np.uint64)
    records = encode_rows(layout, keys, values)
    size = records.dtype.itemsize
    data = records.tobytes()
    for i, row in enumerate(values):
        payload = _store.encode_payload(layout, 7, row)
        assert data[i * size : (i + 1) * size] == _store.encode_record(i, 7, 0, payload), row


def test_values_that_a_dtype_cannot_hold_are_found() -> None:
    for dtype, largest in (
        *(("fp16", 65519.0), ("bf16", 3.396e38), ("fp32", 3.4e38), ("int4", 1.9e38)),
    ):
        layout = _store.RowLayout(dtype=dtype, chunk_dim=2)
        values = np.array([[0, 1], [largest, -largest]], np.float32)
        assert unstorable(layout, values) is None
        for bad in (np.inf, -np.inf, np.nan, *([65520.0] if dtype == "fp16" else [])):
            values[1, 1] = bad
            assert unstorable(layout, values) == (1, 1)


KEYS = some_keys(3000)
VALUES = some_values(len(KEYS), 6)


def numpy_folder(path: Path) -> TableSpec:
    return TableSpec(name="item", source=write_numpy(path / "item", KEYS, VALUES))


def numpy_pair(path: Path) -> TableSpec:
    folder = write_numpy(path / "item", KEYS.view(np.uint64), VALUES)
    return parse_table(f"item={folder / 'keys.npy'},{folder / 'vectors.npy'}")[0]


def safe_file(path: Path) -> TableSpec:
    tensors: dict[str, NDArray[Any]] = {"ids": KEYS, "other": np.zeros(3), "table": VALUES}
    safetensors.numpy.save_file(tensors, path / "item.safetensors")
    source = path / "item.safetensors"
    return TableSpec(name="item", source=source, keys="ids", vectors="table")


def hps_folder(path: Path) -> TableSpec:
    (path / "hps").mkdir()
    KEYS.tofile(path / "hps" / "key")
    VALUES.tofile(path / "hps" / "emb_vector")
    return TableSpec(name="item", source=path / "hps")


@pytest.mark.parametrize("make", [numpy_folder, numpy_pair, safe_file, hps_folder])
@pytest.mark.parametrize("bits", [None, 3])
def test_every_source_gives_the_rows_bit_for_bit(
    tmp_path: Path, make: Callable[[Path], TableSpec], bits: int | None
) -> None:
    spec = one_table(Path())
    spec = dataclasses.replace(
        spec, tables=(dataclasses.replace(make(tmp_path), bucket_bits=bits),)
    )
    report = import_model(spec, tmp_path / "out")
    expect_rows(tmp_path / "out", KEYS, VALUES)
    assert report.tables[0].rows == len(KEYS)
    assert report.tables[0].buckets == (1 if bits is None else 8)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_stored_as_asked(tmp_path: Path, dtype: str) -> None:
    source = write_numpy(tmp_path / "item", KEYS, VALUES.astype(np.float16))
    spec = one_table(source, dtype=dtype, chunks=3, bucket_bits=2, default_row=(0.5,) * 6)
    import_model(spec, tmp_path / "out", ImportOptions(version=7, watermark_ms=99))
    expect_rows(tmp_path / "out", KEYS, VALUES.astype(np.float16))
    manifest: Any = read_manifest(tmp_path / "out")
    assert (manifest["version"], manifest["lineage"], manifest["watermark_ms"]) == (7, 0, 99)
    assert manifest["tables"][0]["default_row"] == [0.5] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_state_dicts_row_index_is_the_key(tmp_path: Path, dtype: torch.dtype) -> None:
    net = torch.nn.ModuleDict(
        {"user": torch.nn.Embedding(50, 3), "item": torch.nn.EmbeddingBag(700, 5)}
    ).to(dtype)
    torch.save({"step": 3, "net": net.state_dict()}, tmp_path / "model.pt")
    spec, _ = parse_table("item=net.item.weight", state_dict=tmp_path / "model.pt")
    by_module, _ = parse_table("item=net.item", state_dict=tmp_path / "model.pt")
    for i, table in enumerate((spec, by_module)):
        features = (FeatureConfig(name="item", table="item"),)
        import_model(ModelSpec(name="m", tables=(table,), features=features), tmp_path / f"{i}")
        weight = net.state_dict()["item.weight"].float().numpy()
        expect_rows(tmp_path / f"{i}", np.arange(700), weight)


def test_bf16_tensors_of_safetensors_are_read(tmp_path: Path) -> None:
    values = torch.from_numpy(VALUES).bfloat16()
    file = tmp_path / "item.safetensors"
    safetensors.torch.save_file({"keys": torch.from_numpy(KEYS), "vectors": values}, file)
    import_model(one_table(file), tmp_path / "out")
    expect_rows(tmp_path / "out", KEYS, values.float().numpy())


def test_files_are_dealt_again_where_memory_is_short(tmp_path: Path) -> None:
    """2^12 buckets: 256 files of 16 buckets each, none of which fits the 16 MiB that there are."""
    keys = np.arange(1 << 20, dtype=np.int64)
    values = np.repeat(keys.astype(np.float32)[:, np.newaxis], 1, axis=1)
    source = write_numpy(tmp_path / "item", keys, values)
    options = ImportOptions(memory_bytes=16 << 20)
    import_model(one_table(source, bucket_bits=12), tmp_path / "out", options)
    found, _ = read_records(tmp_path / "out")
    assert len(found) == len(keys)
    assert all(struct.unpack_from("<f", found[key], 12)[0] == key for key in range(0, 1 << 20, 97))


def test_a_table_without_rows_is_a_table(tmp_path: Path) -> None:
    source = write_numpy(tmp_path / "item", KEYS[:0], VALUES[:0])
    assert import_model(one_table(source), tmp_path / "out").tables[0].rows == 0
    assert read_records(tmp_path / "out")[0] == {}


MEASURE = """
import json, sys
from pathlib import Path
from embertide.trainer.config import FeatureConfig
from embertide.trainer.publish.importer.spec import ModelSpec, TableSpec
from embertide.trainer.publish.importer.model import ImportOptions, import_model

def peak_bytes():
    # This counts the process's own memory; getrusage also remembers the one it was forked from.
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

table = TableSpec(name="item", source=Path(sys.argv[1]))
spec = ModelSpec(name="m", tables=(table,), features=(FeatureConfig(name="f", table="item"),))
before = peak_bytes()
report = import_model(spec, Path(sys.argv[2]), ImportOptions(memory_bytes=int(sys.argv[3])))
print(json.dumps([before, peak_bytes(), report.tables[0].rows]))
"""


def test_memory_stays_within_its_bound_whatever_the_size(tmp_path: Path) -> None:
    """400 MB of vectors within 128 MiB."""
    rows, dim, bound = 1_562_500, 64, 128 << 20
    rng = np.random.default_rng(4)
    block = rng.standard_normal((rows // 100, dim), np.float32)
    folder = tmp_path / "item"
    folder.mkdir()
    np.save(folder / "keys.npy", rng.permutation(rows))
    vectors: Any = np.lib.format.open_memmap
    out = vectors(folder / "vectors.npy", "w+", np.float32, (rows, dim))
    for start in range(0, rows, len(block)):
        out[start : start + len(block)] = block
    del out
    arguments = [str(folder), str(tmp_path / "out"), str(bound)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    before, peak, imported = json.loads(done.stdout)
    assert imported == rows
    assert 20 << 20 < peak - before < bound
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(folder)


def test_a_repeated_key_is_refused_naming_its_rows(tmp_path: Path) -> None:
    keys = KEYS.copy()
    keys[2000] = keys[17] = -5
    source = write_numpy(tmp_path / "item", keys, VALUES)
    with pytest.raises(ModelImportError, match=r"-5 as int64\).*rows 17, 2000;.*--duplicates last"):
        import_model(one_table(source, bucket_bits=3), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["item"]


def test_the_last_row_of_a_repeated_key_is_kept_and_the_others_counted(tmp_path: Path) -> None:
    keys = np.concatenate([KEYS, KEYS[:100], KEYS[:10]])
    values = some_values(len(keys), 6)
    source = write_numpy(tmp_path / "item", keys, values)
    options = ImportOptions(duplicates="last", memory_bytes=16 << 20)
    report = import_model(one_table(source, bucket_bits=9), tmp_path / "out", options)
    assert (report.tables[0].duplicates, report.tables[0].rows) == (110, len(KEYS))
    last = {int(key): i for i, key in enumerate(keys)}
    places = np.array(list(last.values()))
    expect_rows(tmp_path / "out", keys[places], values[places])


def break_values(at: tuple[int, int], value: float) -> NDArray[np.float32]:
    values = VALUES.copy()
    values[at] = value
    return values


def fill(folder: Path, **arrays: Any) -> Path:
    """A folder for NumPy whose arrays are good ones but for those given."""
    made = {"keys": KEYS, "vectors": VALUES, **arrays}
    folder.mkdir()
    for name, array in made.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return folder


def hps(folder: Path, key_bytes: int, vector_bytes: int) -> Path:
    folder.mkdir()
    (folder / "key").write_bytes(bytes(key_bytes))
    (folder / "emb_vector").write_bytes(bytes(vector_bytes))
    return folder


def cut(folder: Path, name: str, size: int) -> Path:
    path = folder / name
    path.write_bytes(path.read_bytes()[:size])
    return folder


def state_dict(path: Path) -> Path:
    torch.save({"a.weight": torch.zeros(3, 2), "b": torch.zeros(3), "n": torch.arange(4)}, path)
    return path


def text(path: Path) -> Path:
    path.write_text("not what it seems, at some length")
    return path


def safe(path: Path, **tensors: Any) -> Path:
    safetensors.numpy.save_file({"keys": KEYS, "vectors": VALUES, **tensors}, path)
    return path


def bad(make: Callable[[Path], Path], says: str, **table: Any) -> Any:
    return make, says, table


BAD: dict[str, tuple[Callable[[Path], Path], str, dict[str, Any]]] = {
    "nothing": bad(lambda p: p / "none", "none: is missing; give a folder with keys.npy"),
    "no_vectors": bad(lambda p: fill(p / "x", vectors=None), "x/vectors.npy: is missing"),
    "unknown_kind": bad(lambda p: text(p / "x.csv"), "x.csv: is of no known kind"),
    "count": bad(lambda p: fill(p / "x", keys=KEYS[1:]), "vectors, but .*keys.npy holds .* keys"),
    "key_dtype": bad(lambda p: fill(p / "x", keys=KEYS.astype(np.int32)), "keys are int32"),
    "key_axes": bad(lambda p: fill(p / "x", keys=KEYS[:, np.newaxis]), r"shape \[\d+, 1\]"),
    "vector_dtype": bad(lambda p: fill(p / "x", vectors=VALUES.astype("f8")), "are float64"),
    "vector_axes": bad(lambda p: fill(p / "x", vectors=VALUES[:, 0]), "give rows x dim"),
    "fortran": bad(lambda p: fill(p / "x", vectors=np.asfortranarray(VALUES)), "ascontiguousarray"),
    "no_npy": bad(lambda p: text(fill(p / "x") / "keys.npy").parent, "no whole .npy file"),
    "cut_npy": bad(lambda p: cut(fill(p / "x"), "vectors.npy", 999), "no whole .npy file"),
    "nan": bad(
        lambda p: fill(p / "x", vectors=break_values((2345, 4), np.nan)),
        rf"value nan in row 2345 \(key {int(KEYS[2345]) % 2**64}\), dimension 4.*as fp32",
    ),
    "too_large": bad(
        lambda p: fill(p / "x", vectors=break_values((3, 0), 1e6)),
        "value 1000000.0 in row 3 .*as fp16",
        dtype="fp16",
    ),
    "chunks": bad(lambda p: fill(p / "x"), "dim 6 is no multiple of 4 chunks", chunks=4),
    "no_chunks": bad(lambda p: fill(p / "x"), "multiple of 0 chunks", chunks=0),
    "too_wide": bad(
        lambda p: fill(p / "x", vectors=np.zeros((len(KEYS), 1100), "f4")), "exceeds 4064"
    ),
    "bucket_bits": bad(lambda p: fill(p / "x"), "bucket_bits = 18 exceeds 17", bucket_bits=18),
    "default_row": bad(lambda p: fill(p / "x"), "default_row has 2 values", default_row=(1.0, 2.0)),
    "hps_no_key": bad(lambda p: (hps(p / "x", 8, 8) / "key").rename(p / "x/k").parent, "x/key"),
    "hps_keys": bad(lambda p: hps(p / "x", 12, 12), "must hold int64 keys"),
    "hps_dim": bad(lambda p: hps(p / "x", 24, 32), "32 bytes are no whole number of float32"),
    "no_tensor": bad(lambda p: safe(p / "x.safetensors"), "it holds keys, vectors", keys="ids"),
    "tensor_dtype": bad(
        lambda p: safe(p / "x.safetensors", vectors=VALUES.astype("f8")), "'vectors' is F64"
    ),
    "no_safetensors": bad(lambda p: text(p / "x.safetensors"), "no safetensors file"),
    "cut_safetensors": bad(
        lambda p: cut(safe(p / "x.safetensors").parent, "x.safetensors", 9999) / "x.safetensors",
        "9999 bytes, its header says",
    ),
    "no_parameter": bad(
        lambda p: state_dict(p / "x.pt"), "no parameter 'c'; it holds a.weight, b, n", parameter="c"
    ),
    "no_table": bad(lambda p: state_dict(p / "x.pt"), r"'b' has shape \[3\]", parameter="b"),
    "no_state_dict": bad(lambda p: text(p / "x.pt"), "is no state_dict", parameter="b"),
    "no_pt": bad(lambda p: p / "none.pt", "none.pt: is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    make, says, table = BAD[name]
    source = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelImportError, match=says):
        import_model(one_table(source, **table), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_that_exists_is_never_touched(tmp_path: Path) -> None:
    source = fill(tmp_path / "item")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelImportError, match="out: exists"):
        import_model(one_table(source), tmp_path / "out")


def test_a_disk_too_small_is_found_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fill(tmp_path / "item")
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(9, 9, 1000))
    with pytest.raises(ModelImportError, match="0 MiB are free; free some"):
        import_model(one_table(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["item"]


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "write_snapshot", full)
    with pytest.raises(ModelImportError, match=r"cannot be written: .*No space left"):
        import_model(one_table(fill(tmp_path / "item")), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["item"]


def test_too_few_buckets_for_the_memory_are_refused(tmp_path: Path) -> None:
    source = fill(tmp_path / "item", keys=np.arange(30_000), vectors=np.zeros((30_000, 200), "f4"))
    options = ImportOptions(memory_bytes=16 << 20)
    with pytest.raises(ModelImportError, match="give bucket_bits above 0"):
        import_model(one_table(source, bucket_bits=0), tmp_path / "out", options)
    report = import_model(one_table(source), tmp_path / "out", options)
    assert report.tables[0].buckets > 1


TOML = """
model = "rank"
dense_features = 2
[[tables]]
name = "item"
source = "item"
dtype = "fp16"
bucket_bits = 2
[[tables]]
name = "user"
source = "."
keys = "item/keys.npy"
vectors = "item/vectors.npy"
default_row = [1, 2, 3, 4, 5, 6]
[[features]]
name = "cand"
table = "item"
pooling = "mean"
[[features]]
name = "user"
table = "user"
"""


def test_a_model_file_names_tables_and_features(tmp_path: Path) -> None:
    fill(tmp_path / "item")
    (tmp_path / "model.toml").write_text(TOML)
    spec = load_spec(tmp_path / "model.toml")
    import_model(spec, tmp_path / "out")
    manifest: Any = read_manifest(tmp_path / "out")
    assert manifest["model"] == "rank"
    assert manifest["dense_features"] == 2
    assert [each["id"] for each in manifest["tables"]] == [0, 1]
    assert manifest["features"][0] == {"name": "cand", "table": "item", "pooling": "mean"}
    as_json = {"tables": [{"name": "item", "source": "item"}]}
    (tmp_path / "m.json").write_text(json.dumps(as_json))
    assert load_spec(tmp_path / "m.json").features == (FeatureConfig(name="item", table="item"),)


FILES = {
    "syntax": ("tables = [", "does not parse"),
    "unknown": ("colour = 1", "unknown setting 'colour'; known are model, dense_features"),
    "unknown_of_table": ("[[tables]]\nname='a'\nsize=3", "table 1: unknown setting 'size'"),
    "type": ("[[tables]]\nname='a'\nsource='b'\nchunks='3'", "chunks is '3'"),
    "no_source": ("[[tables]]\nname='a'", "table 1: source is missing"),
    "no_table": ("model = 'a'", "has no table"),
    "dtype": ("[[tables]]\nname='a'\nsource='b'\ndtype='f'", "dtype 'f'; use one of fp32"),
    "format": ("[[tables]]\nname='a'\nsource='b'\nformat='f'", "format 'f'"),
    "twice": ("[[tables]]\nname='a'\nsource='b'\n" * 2, "table 'a' is named twice"),
    "feature": (
        "[[tables]]\nname='a'\nsource='b'\n[[features]]\nname='f'\ntable='c'",
        "feature 'f' names table 'c'; there are a",
    ),
    "pooling": (
        "[[tables]]\nname='a'\nsource='b'\n[[features]]\nname='f'\ntable='a'\npooling='max'",
        "pooling is 'max'; use one of 'sum', 'mean', 'none'",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_model_file_that_is_wrong_is_refused(tmp_path: Path, name: str) -> None:
    content, says = FILES[name]
    (tmp_path / "model.toml").write_text(content)
    with pytest.raises(ModelImportError, match=says):
        load_spec(tmp_path / "model.toml")


# --- the command ----------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command("import")(import_command.command)
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_imports_and_reports_json(tmp_path: Path) -> None:
    source = fill(tmp_path / "data")
    result = run(
        tmp_path / "out",
        *("--table", f"item={source}:cand:seen/mean", "--dtype", "int8", "--json"),
        *("--model", "shop", "--version", 3, "--memory-mib", 32),
    )
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert set(report) == {field.name for field in ImportReport.__dataclass_fields__.values()}
    assert (report["model"], report["version"], report["features"]) == ("shop", 3, ["cand", "seen"])
    assert report["tables"][0]["dtype"] == "int8"
    expect_rows(tmp_path / "out", KEYS, VALUES)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "out", "--table", f"item={tmp_path / 'none'}", "--json")
    assert result.exit_code == 2
    assert "none: is missing" in json.loads(result.stdout)["error"]
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for option in ("item", "item=", "=x", "item=x:"):
        assert "is not NAME=SOURCE" in run(tmp_path / "out", "--table", option).stderr
    both = run(tmp_path / "out", "--table", "a=b", "--model-file", "x.toml")
    assert "goes into x.toml" in both.stderr
    assert not list(tmp_path.iterdir())


def test_the_help_teaches_with_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "--table item=data/item:cand:seen/mean" in " ".join(result.output.split())
