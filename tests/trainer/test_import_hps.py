"""`import --hps`: the model that a `ps.json` of HPS describes, or why not."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.publish.importer.hps import load_hps
from embertide.trainer.publish.importer.sources import ModelImportError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hps.write(tmp_path)
    return tmp_path


def change(folder: Path, **changes: Any) -> Path:
    """Change the only model's entry; None leaves a setting out."""
    entry = {**hps.model_entry(), **changes}
    entry = {name: value for name, value in entry.items() if value is not None}
    (folder / "ps.json").write_text(json.dumps({"models": [entry]}))
    return folder / "ps.json"


def test_the_model_is_read_as_hps_reads_it(folder: Path) -> None:
    read = load_hps(folder / "ps.json")
    assert read.spec.name == "hps_wdl"
    assert [table.name for table in read.spec.tables] == list(hps.DIMS)
    assert [feature.pooling for feature in read.spec.features] == ["none"] * 3
    assert [table.default_row for table in read.spec.tables] == [(), (0.5,) * 16, (-1.0,) * 32]
    assert {"volatile_db", "gpucache", "max_batch_size"} <= set(read.unread)
    assert not read.dense
    assert not set(read.unread) & {"model", "sparse_files", "default_value_for_each_table"}


def test_tables_without_names_have_those_that_hps_gives(folder: Path) -> None:
    path = change(folder, embedding_table_names=None, default_value_for_each_table=None)
    assert [table.name for table in load_hps(path).spec.tables] == [
        "sparse_embedding1",
        "sparse_embedding2",
        "sparse_embedding3",
    ]


def test_folders_are_found_from_the_working_folder_then_beside_the_file(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    sources = [table.source for table in load_hps(folder / "ps.json").spec.tables]
    assert sources == [folder / f"{table}_sparse.model" for table in hps.DIMS]
    hps.write(elsewhere)
    sources = [table.source for table in load_hps(folder / "ps.json").spec.tables]
    assert sources == [Path(f"{table}_sparse.model") for table in hps.DIMS]


def test_one_of_several_models_is_chosen_by_name(folder: Path) -> None:
    two = [hps.model_entry(), {**hps.model_entry(), "model": 'it\'s "two"'}]
    (folder / "ps.json").write_text(json.dumps({"models": two}))
    assert load_hps(folder / "ps.json", 'it\'s "two"').spec.name == 'it\'s "two"'
    with pytest.raises(ModelImportError, match="choose one, --model hps_wdl"):
        load_hps(folder / "ps.json")
    with pytest.raises(ModelImportError, match="has no model 'three'; it has"):
        load_hps(folder / "ps.json", "three")


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda p: p / "none.json", "none.json: cannot be read: No such file"),
    "no_json": (lambda p: _text(p, "{model"), "is no JSON"),
    "no_models": (lambda p: _text(p, "{}"), 'has no "models"'),
    "nameless": (lambda p: _text(p, '{"models": [{}]}'), "a model without a name"),
    "no_files": (lambda p: change(p, sparse_files=None), "has no sparse_files"),
    "no_list": (lambda p: change(p, sparse_files="a"), "sparse_files is 'a'; it must be a list"),
    "names": (lambda p: change(p, embedding_table_names=["a"]), "has 1 names and sparse_files 3"),
    "twice": (lambda p: change(p, embedding_table_names=["a"] * 3), "'a' is named twice"),
    "dims": (
        lambda p: change(p, embedding_vecsize_per_table=[1, 8, 32]),
        r"rows of 16 values, and .*ps.json says 8 \(embedding_vecsize_per_table\)",
    ),
    "default": (
        lambda p: change(p, default_value_for_each_table=["nan"]),
        "default_value_for_each_table has 'nan'; give a number",
    ),
    "remote": (
        lambda p: change(p, sparse_files=["hdfs://h:9000/t", "b", "c"]),
        "its folder is hdfs://h:9000/t: copy it here",
    ),
    "gone": (
        lambda p: change(p, sparse_files=["gone", "b", "c"]),
        "table 'wide': no folder gone: there is no .*gone and .*gone. Correct sparse_files",
    ),
}


def _text(folder: Path, text: str) -> Path:
    (folder / "ps.json").write_text(text)
    return folder / "ps.json"


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(folder: Path, name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises(ModelImportError, match=says):
        load_hps(make(folder))


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(setting=st.sampled_from(sorted(hps.model_entry())), value=_JSON)
def test_any_value_of_a_setting_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, setting: str, value: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    if not folder.exists():
        hps.write(folder)
    path = change(folder, **{setting: value})
    with contextlib.suppress(ModelImportError):
        assert len(load_hps(path).spec.tables) == len(load_hps(path).spec.features) > 0


def test_the_command_says_what_it_did_not_read_and_what_is_next(folder: Path) -> None:
    told = CliRunner().invoke(
        app, ["import", "--hps", str(folder / "ps.json"), str(folder / "out put")]
    )
    assert told.exit_code == 0, told.output
    assert "not read, for nodes have flags of their own: " in told.output
    assert f"next: embertide serve '{folder}/out put' --kind lookup --hps-names" in told.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--table", "a=b"], "--table: does not go with --hps"),
        (["--dense", "net"], "--dense: does not go with --hps"),
        (["--dtype", "fp8"], "--dtype: is 'fp8'; use one of"),
        (["--", "--grpc-port", "1"], "--grpc-port: is for --serve"),
        (["--serve"], "out: exists: `embertide serve"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    folder: Path, options: list[str], says: str
) -> None:
    if serves := options == ["--serve"]:
        (folder / "out").mkdir()
    words = ["import", "--hps", str(folder / "ps.json"), str(folder / "out"), *options]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 2, told.output
    assert says in " ".join(told.output.split())
    assert (folder / "out").exists() == serves
