"""Names and values of files are data: what stands in them never runs, wherever it is written.

EMBERTIDE_TABLES sets how many generated tables the long test takes through (500).
"""

import ast
import os
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawn_tables import PLANTED, Drawn, tables
from table_pipeline import outcome
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.commands.run_file import explained, load, read_plain
from embertide.trainer.config import FeatureConfig, ModelConfig, RunConfig, TableConfig

MANY = int(os.environ.get("EMBERTIDE_TABLES", "500"))
CODE = f"import sys;sys.{PLANTED}=1"
NAMES = [
    f"x\n{CODE}#",
    f'"""\n{CODE}\n"""',
    f"');{CODE};('",
    f"x\r{CODE}#",
    f"x\\\n{CODE}#",
    f"\x85{CODE}\u2028{CODE}",
    "\\",
    "'''",
]


def planted() -> bool:
    found = hasattr(sys, PLANTED)
    if found:
        delattr(sys, PLANTED)
    return found


def table(name: str) -> pa.Table:
    rows = range(60)
    return pa.table(
        {
            name: [i % 7 for i in rows],
            f"price {name}": [i / 8 for i in rows],
            f"gone {name}": ["same" for _ in rows],
            "label": [i % 2 for i in rows],
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_data_in_a_run_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name.replace("/", "_")
    folder.mkdir()
    path, out = folder / f"{name}.parquet", tmp_path / "run.py"
    pq.write_table(table(name), path)
    done = CliRunner().invoke(app, ["init", str(path), "-o", str(out)])
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert text.isascii()
    given = load(out)
    assert not planted()
    assert given.source is not None
    assert name in given.source.schema.columns
    assert [type(each) for each in ast.parse(text).body] == [
        *(ast.Expr, ast.ImportFrom, ast.ImportFrom, ast.Assign, ast.Assign)
    ]


def test_a_file_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "\udcff.csv"
    path.write_bytes(b"a,label\n1,0\n")
    done = CliRunner().invoke(app, ["init", str(path), "-o", str(tmp_path / "run.py")])
    assert done.exit_code == 2
    assert "its name is not UTF-8; rename it" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_print_config_writes_names_as_literals(name: str) -> None:
    run = RunConfig(
        model=ModelConfig(
            name=name,
            tables=(TableConfig(name=name),),
            features=(FeatureConfig(name=name, table=name),),
        )
    )
    text = explained(run)
    space: dict[str, Any] = {}
    exec(compile(text, "run.py", "exec"), space)
    assert space["run"] == run
    assert not planted()
    assert read_plain(text) == {"run": run}


def test_code_that_runs_would_be_noticed() -> None:
    exec(f"# A column: x\n{CODE}#", {})  # as a careless writer did
    assert planted()


@pytest.mark.parametrize(
    "text",
    [
        "import os\n",
        "from os import system\n",
        "run = open('x')\n",
        "run = RunConfig(**{'model': 1})\n",
        "run = (lambda: 1)()\n",
        "run.model = 1\n",
        "a = b = 1\n",
        "run = RunConfig(model=__import__('os'))\n",
    ],
)
def test_a_file_that_does_more_than_define_is_not_plain(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        read_plain(text)


def check(drawn: Drawn, folder: Path) -> None:
    found = outcome(drawn, folder)
    assert found.fault == "", (found, drawn)


SETTINGS = hypothesis.settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@hypothesis.settings(SETTINGS, max_examples=25)
@hypothesis.given(drawn=tables())
def test_generated_tables_work_or_are_refused_in_one_line(
    drawn: Drawn, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(drawn, tmp_path_factory.mktemp("t") / "x")


@pytest.mark.long
@hypothesis.settings(SETTINGS, max_examples=MANY, derandomize=False)
@hypothesis.given(drawn=tables())
def test_many_generated_tables_work_or_are_refused_in_one_line(
    drawn: Drawn, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(drawn, tmp_path_factory.mktemp("t") / "x")
