"""Bad input of plans, profiles and windows: each is tried, and the product refuses it in words.

Commands run as a user's do, in this process. A row is 1 if the command ends with the exit code of a
configuration that is wrong, and says what is wrong and what the run has.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from typer.testing import CliRunner

from bench import report
from bench.search.profiles import tiny
from embertide.trainer.__main__ import app
from embertide.trainer.config import FeatureConfig, ModelConfig, RunConfig, TableConfig
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.run import plan_record
from embertide.trainer.run.plan_record import PlanRecord
from embertide.trainer.run.step_profile import machine
from embertide.trainer.sync import plan
from embertide.trainer.sync.placing import profile as profiles

_MODEL = ModelConfig(
    name="m",
    tables=(TableConfig(name="user", bucket_bits=2, chunks=4), TableConfig(name="item")),
    features=(FeatureConfig(name="user", table="user"), FeatureConfig(name="item", table="item")),
)
_RANKS = 2
_WRONG = 2  # exit code of a configuration that is wrong


def _plan(ranks: int, **tables: object) -> str:
    return json.dumps({"format": plan.FORMAT, "ranks": ranks, "tables": tables})


_PLANS = {
    "other tables": (_plan(_RANKS, user=[0, 1, 0, 1], shop=0), ("shop", "the model has")),
    "other ranks": (_plan(4, user=[0, 1, 2, 3], item=0), ("for 4 ranks", "make a plan for 2")),
    "other buckets": (_plan(_RANKS, user=[0, 1], item=0), ("'user'", "a list of 4 ranks")),
    "other chunks": (
        _plan(_RANKS, user={"columns": [0, 1]}, item=0),
        ("'user'", "with 4 ranks below 2, one a chunk"),
    ),
    "a rank that is not there": (_plan(_RANKS, user=[0, 1, 2, 1], item=0), ("rank below 2",)),
    "a hot set of no number": (
        _plan(_RANKS, user=0, item=0)[:-1] + ', "hot_rows": "many"}',
        ("hot_rows", "give 0"),
    ),
    "no JSON": ("{", ("cannot be read",)),
}


def _raises(work: Callable[[], object], words: tuple[str, ...]) -> float:
    try:
        work()
    except (ConfigurationError, ValueError) as error:
        return float(all(word in str(error) for word in words))
    return 0.0


def _of_plans(folder: Path) -> Iterator[tuple[str, float]]:
    """Have a run read a plan, and the command that explains one."""
    made = dataclasses.replace(tiny(1), machine=machine())
    names = ("user", "item")
    shares = ((0.25,) * 4, (1.0,))
    tables = tuple(
        dataclasses.replace(table, name=name, load_P=share, chunks=of.chunks)
        for table, name, share, of in zip(made.tables, names, shares, _MODEL.tables, strict=False)
    )
    of_model = folder / "profile.json"
    profiles.write(dataclasses.replace(made, tables=tables), of_model)
    for case, (text, words) in _PLANS.items():
        path = folder / "plan.json"
        path.write_text(text, encoding="utf-8")
        refused = _raises(partial(plan.read, path, _MODEL, _RANKS), words)
        code, said = _run("plan-search", str(of_model), str(_RANKS), "--plan", str(path))
        is_said = code == _WRONG and path.name in said
        yield f"a plan of {case}", min(refused, float(is_said))


def _run(*words: str) -> tuple[int, str]:
    said = CliRunner().invoke(app, words)
    return said.exit_code, said.output


def _of_profiles(folder: Path) -> Iterator[tuple[str, float]]:
    path = folder / "elsewhere.json"
    profiles.write(dataclasses.replace(tiny(1), machine="a machine elsewhere"), path)
    code, said = _run("plan-search", str(path), str(_RANKS))
    words = ("another machine", "a machine elsewhere", "--elsewhere")
    yield (
        "a profile of another machine",
        float(code == _WRONG and all(word in said for word in words)),
    )
    code, said = _run("plan-search", str(path), "4", "--elsewhere")
    yield (
        "a profile of other ranks is taken, and the prediction says so",
        float(code == 0 and "not measured: 4 ranks" in said),
    )
    found_plan = folder / "found.json"
    options = ("--elsewhere", "--output", str(found_plan), "--seconds", "0.2")
    code, _ = _run("plan-search", str(path), str(_RANKS), *options)
    yield (
        "a plan that was searched by a profile of other tables",
        min(
            float(code == 0),
            _raises(
                lambda: plan.read(found_plan, _MODEL, _RANKS), ("names the tables", "the model has")
            ),
        ),
    )
    PlanRecord(
        stage="kept",
        ranks=_RANKS,
        machine="a machine elsewhere",
        plan=_plan(_RANKS, user=0, item=1),
    ).write(folder)
    found, why = plan_record.read(folder, _MODEL, _RANKS, machine())
    yield (
        "a plan that `--plan auto` found on another machine",
        float(found.stage == "profile" and "another machine" in why),
    )


def _of_windows() -> Iterator[tuple[str, float]]:
    run = RunConfig(model=_MODEL, ssd_budget_bytes=1 << 30, ssd_directory="ssd", hold_bytes=1 << 20)
    half = run.ddr_budget_bytes // 2
    yield (
        "a window larger than the budget",
        _raises(
            lambda: dataclasses.replace(run, hold_bytes=half + 1),
            ("hold_bytes", "more than half of ddr_budget_bytes", f"at most {half}"),
        ),
    )


def run(_: object = None) -> Iterator[report.Row]:
    """Yield the rows of the report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for case, refused in (*_of_plans(path), *_of_profiles(path), *_of_windows()):
            yield report.measure(
                (case, "refused with a reason" if "taken" not in case else "says so", ""),
                [refused],
                better="higher",
                target=1,
                claim="E.8",
            )
