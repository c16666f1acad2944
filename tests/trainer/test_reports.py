"""A run's reports beside the terminal: /metrics, a log of JSON lines, TensorBoard."""

import contextlib
import dataclasses
import json
import logging
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from embertide._common import page_server
from embertide.server.adapters.process import free_ports
from embertide.trainer.__main__ import app
from embertide.trainer.commands import reports
from embertide.trainer.commands.reports import (
    json_log,
    metrics_page,
    scalars,
    state_of,
    tensorboard,
)
from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.presets import news_model
from embertide.trainer.run.progress import Progress

FOLDER = Path()  # of the run; nothing is written to it

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"


def progress(auc: float = 0.75) -> Progress:
    return Progress(
        events=1234,
        total_events=None,
        ts_ms=3_600_000,
        version=7,
        auc=auc,
        events_per_s=50.5,
        rows=99,
        resident_bytes={"ddr": 4096, "index": 64, "ssd": 0},
        checkpoints=3,
        checkpoint_s=1.5,
        published={"versions": 6, "rows": 500, "bytes": 9000, "bus_failures": 1},
        rejected={},
        source={},
        labels={"corrected": 4, "waiting": 17},
        dropped={"refused_rows": 2},
        missing=11,
        set_aside={"batches": 1, "events": 32},
    )


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
        if "background" not in sample.name  # of this process, whatever it does
    }


def test_a_scrape_gets_the_newest_progress_and_the_sources_counters(tmp_path: Path) -> None:
    source, (port,) = NewsSource(NewsConfig(hours=1)), free_ports(1)
    with metrics_page(port, source, tmp_path) as show:
        # Before the first batch: what was rejected is seen though nothing is learned from.
        drives = {f"embertide_drive_{what}bytes/{tmp_path}" for what in ("", "free_")}
        source.dead_letters.add([1, 2], "ts goes backwards", [0, 0])
        name = "embertide_trainer_rejected_events_total/ts goes backwards"
        refused = "embertide_metrics_connections_refused_total"
        page = scrape(port)
        assert all(page.pop(each) > 0 for each in drives)
        assert page == {name: 2, refused: 0}
        show(progress())
        source.dead_letters.add([3], "ts goes backwards", [0])
        page = scrape(port)
    assert all(page.pop(each) > 0 for each in drives)
    assert page.pop("embertide_trainer_watermark_lag_seconds") > 1e9
    assert page == {
        name: 3,
        refused: 0,
        "embertide_trainer_events_total": 1234,
        "embertide_trainer_events_per_second": 50.5,
        "embertide_trainer_auc": 0.75,
        "embertide_trainer_version": 7,
        "embertide_trainer_watermark_seconds": 3600,
        "embertide_trainer_labels_total/corrected": 4,
        "embertide_trainer_waiting": 17,
        "embertide_trainer_rows": 99,
        "embertide_trainer_bytes/ddr": 4096,
        "embertide_trainer_bytes/index": 64,
        "embertide_trainer_bytes/ssd": 0,
        "embertide_trainer_checkpoints_total": 3,
        "embertide_trainer_checkpoint_seconds_total": 1.5,
        "embertide_trainer_dropped_total/refused_rows": 2,
        "embertide_trainer_set_aside_total/batches": 1,
        "embertide_trainer_set_aside_total/events": 32,
        "embertide_trainer_dense_missing_total": 11,
        "embertide_trainer_published_total/versions": 6,
        "embertide_trainer_published_total/rows": 500,
        "embertide_trainer_published_total/bytes": 9000,
        "embertide_trainer_published_total/bus_failures": 1,
    }


def apart() -> Progress:
    """Return the progress of two ranks that are not at the same step."""
    rows: dict[str, float] = {"0": 5, "1": 2, "2": 1, "4": 0, "1024": 3}
    mine = dataclasses.replace(
        progress(),
        traffic={"gather": {"messages": 3, "bytes": 900, "waits_s": 0.5}},
        apart={
            "batches": {"0": 7, "1": 4},
            "groups": {"2": 6},
            "waits_s": {"row order": 0.25, "batch": 1.5},
            "sums": {"row_staleness": 4000},
            "row_staleness": rows,
        },
    )
    other = {
        "rows": 1,
        "resident_bytes": {},
        "dropped": {},
        "traffic": {"next": {"messages": 4, "bytes": 40, "waits_s": 2.0}},
        "apart": {
            "waits_s": {"row order": 0.5},
            "sums": {"row_staleness": 1},
            "row_staleness": rows,
        },
    }
    return mine.with_others([other])


def test_a_scrape_gets_what_ranks_sent_and_how_far_apart_they_are(tmp_path: Path) -> None:
    source, (port,) = NewsSource(NewsConfig(hours=1)), free_ports(1)
    with metrics_page(port, source, tmp_path) as show:
        show(apart())
        page = scrape(port)
    name = "embertide_trainer_"
    found = {each.removeprefix(name): value for each, value in page.items()}
    assert {e: v for e, v in found.items() if e.startswith(("ranks_", "apart_"))} == {
        "ranks_messages_total/gather": 3,
        "ranks_messages_total/next": 4,
        "ranks_bytes_total/gather": 900,
        "ranks_bytes_total/next": 40,
        "ranks_wait_seconds_total/gather": 0.5,
        "ranks_wait_seconds_total/next": 2,
        "apart_batches_total/0": 7,
        "apart_batches_total/1": 4,
        "apart_groups_total/2": 6,
        "apart_wait_seconds_total/row order": 0.75,
        "apart_wait_seconds_total/batch": 1.5,
        "apart_row_staleness_bucket/0.0": 10,
        "apart_row_staleness_bucket/1.0": 14,
        "apart_row_staleness_bucket/3.0": 16,
        "apart_row_staleness_bucket/7.0": 16,
        "apart_row_staleness_bucket/+Inf": 22,
        "apart_row_staleness_count": 22,
        "apart_row_staleness_sum": 4001,
    }


def test_what_pruning_costs_is_on_the_page_in_curves_and_in_words(tmp_path: Path) -> None:
    figures = {"loss": 0.0007, "error": 0.0002, "bound": 0.001, "ratio": 11.5, "factor": 9.96}
    found = dataclasses.replace(
        progress(), pruning={**figures, "unpruned_bytes": 4096, "exceeds": True}
    )
    early = dataclasses.replace(found, pruning={**found.pruning, "loss": None, "error": None})
    source, (port,) = NewsSource(NewsConfig(hours=1)), free_ports(1)
    name = "embertide_trainer_pruning_"
    with metrics_page(port, source, tmp_path) as show:
        show(early)
        assert f"{name}loss" not in scrape(port)
        show(found)
        page = scrape(port)
    assert {e.removeprefix(name): v for e, v in page.items() if e.startswith(name)} == {
        **figures,
        "unpruned_bytes": 4096,
        "exceeds": 1,
    }
    assert scalars(found)["pruning/loss"] == 0.0007
    assert "pruning/loss" not in scalars(early)
    assert state_of(found).endswith("pruned 10.0x for 0.0007")
    assert "pruned" not in state_of(early)


def measured() -> Progress:
    return dataclasses.replace(
        progress(),
        quality={
            "prequential": {"log_loss": 0.5, "normalised_entropy": 0.875, "gauc": 0.625},
            "hold_out": {"log_loss": 0.75},
        },
        slices={"device": {"3": {"events": 40, "auc": 0.5}, "rest": {"events": 2}}},
    )


def test_a_scrape_gets_the_figures_by_whose_they_are_and_by_slice(tmp_path: Path) -> None:
    source, (port,) = NewsSource(NewsConfig(hours=1)), free_ports(1)
    with metrics_page(port, source, tmp_path) as show:
        show(measured())
        page = scrape(port)
    name = "embertide_trainer_"
    assert {
        each: value for each, value in page.items() if "quality" in each or "slice" in each
    } == {
        f"{name}quality_log_loss/prequential": 0.5,
        f"{name}quality_log_loss/hold_out": 0.75,
        f"{name}quality_normalised_entropy/prequential": 0.875,
        f"{name}quality_gauc/prequential": 0.625,
        f"{name}slice_events/device/3": 40,
        f"{name}slice_events/device/rest": 2,
        f"{name}slice_auc/device/3": 0.5,
    }


def test_curves_have_every_figure_that_exists() -> None:
    assert scalars(measured()) == {
        "auc": 0.75,
        "events_per_s": 50.5,
        "rows": 99,
        "version": 7,
        "prequential/log_loss": 0.5,
        "prequential/normalised_entropy": 0.875,
        "prequential/gauc": 0.625,
        "hold_out/log_loss": 0.75,
        "slice/device/3/events": 40,
        "slice/device/3/auc": 0.5,
        "slice/device/rest/events": 2,
    }
    assert "auc" not in scalars(progress(auc=float("nan")))


def test_without_mlflow_the_option_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with (
        pytest.raises(ConfigurationError, match="pip install mlflow-skinny"),
        reports.mlflow(str(tmp_path), "news"),
    ):
        pass


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_has_the_settings_and_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not in requirements/ (pyproject.toml)")
    from mlflow.tracking import MlflowClient

    # Folders as stores are of an older MLflow, and need no server.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tmp_path.as_uri()
    settings = dataclasses.asdict(RunConfig(model=news_model()))
    with reports.mlflow(uri, "news") as tracked:
        tracked.begin(settings)
        tracked.progress.show(progress())
        tracked.progress.show(measured())  # too soon: written at the end
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("news")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.sparse_learning_rate"] == "0.1"
    assert run.data.params["model.tables/0.name"] == news_model().tables[0].name
    assert run.data.metrics["prequential/normalised_entropy"] == 0.875
    assert run.data.metrics["slice/device/3/auc"] == 0.5
    assert {each.step for each in client.get_metric_history(run.info.run_id, "auc")} == {1234}
    assert len(client.get_metric_history(run.info.run_id, "auc")) == 2
    with pytest.raises(ZeroDivisionError), reports.mlflow(uri, "news"):
        raise ZeroDivisionError  # before there was a run
    with contextlib.suppress(ZeroDivisionError), reports.mlflow(uri, "news") as tracked:
        tracked.begin({"seed": 1})
        raise ZeroDivisionError
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(each.info.status for each in runs) == ["FAILED", "FINISHED"]
    began = time.monotonic()
    away = f"http://me:hush@127.0.0.1:{free_ports(1)[0]}"
    for wrong in ("no-such-scheme://x", away):
        with (
            pytest.raises(ConfigurationError, match=r"--mlflow .* give another") as caught,
            reports.mlflow(wrong, "news"),
        ):
            pass
        assert "hush" not in str(caught.value)
    assert time.monotonic() - began < 30  # MLflow's own patience is four minutes


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    source, (port,) = NewsSource(NewsConfig(hours=1)), free_ports(1)
    with (
        metrics_page(port, source, FOLDER),
        pytest.raises(ConfigurationError, match=f"--metrics-port {port} on 127.0.0.1 cannot"),
        metrics_page(port, source, FOLDER),
    ):
        pass
    with metrics_page(port, source, FOLDER):
        pass  # the first one gave it back


def test_connections_to_the_page_are_bounded_and_the_silent_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_server, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(page_server, "_TOTAL_S", 1.0)
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(metrics_page(port, NewsSource(NewsConfig(hours=1)), FOLDER))
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(5)
        ]
        assert [each.recv(1) for each in silent] == [b""] * 5
        page = scrape(port)
    assert page["embertide_metrics_connections_refused_total"] == 2


def test_scrapers_that_drip_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(page_server, "_TOTAL_S", 1.0)
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(metrics_page(port, NewsSource(NewsConfig(hours=1)), FOLDER))
        dripping = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(3)
        ]
        scrape(port)  # the oldest makes room
        alive, began = dripping[1:], time.monotonic()
        while alive:
            assert time.monotonic() - began < 5
            for each in list(alive):
                try:
                    each.sendall(b"G")
                except OSError:
                    alive.remove(each)
            time.sleep(0.05)  # the pace of the drip
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_page_is_on_the_address_that_was_named(host: str, shown: str) -> None:
    (port,) = free_ports(1)
    with metrics_page(port, NewsSource(NewsConfig(hours=1)), FOLDER, host):
        with urllib.request.urlopen(f"http://{shown}:{port}/metrics", timeout=5) as page:
            assert page.status == 200
        if host == "127.0.0.1":
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.parametrize(("host", "port"), [("256.1.1.1", 0), ("127.0.0.1", 70000), ("a\x1b", 0)])
def test_an_address_that_is_none_is_refused(host: str, port: int) -> None:
    with (
        pytest.raises(ConfigurationError, match="--metrics-port") as caught,
        metrics_page(port, NewsSource(NewsConfig(hours=1)), FOLDER, host),
    ):
        pass
    assert "\x1b" not in str(caught.value)


def test_progress_is_a_line_now_and_then_where_no_bar_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    seldom = reports.Seldom(reports.line)
    seldom.show(progress(auc=float("nan")))
    now += 9.8
    seldom.show(progress())  # too soon
    now += 0.1
    seldom.show(dataclasses.replace(progress(), total_events=5000))
    seldom.idle()
    now += 0.1
    seldom.idle()  # nothing comes any more: what was kept is written now
    now += 100
    seldom.idle()  # and once
    said = [line.split(" training: ")[1] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "1,234 events · version 7 · AUC not known yet · 50 events/s",
        "1,234 of 5,000 events · version 7 · AUC 0.7500 · 50 events/s",
    ]


def test_the_log_has_progress_and_messages_as_json_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    with json_log(path) as log:
        log.progress.show(progress(auc=float("nan")))
        log.progress.show(progress())  # too soon
        logging.getLogger("embertide.trainer.run.loop").info("resumed at event %d", 5)
        logging.getLogger("embertide.trainer.run.loop").warning("the bus is away")
    logging.getLogger("embertide.trainer.run.loop").info("nobody listens")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("time").endswith("+00:00") for line in lines)
    assert lines[0]["progress"]["events"] == 1234
    assert lines[0]["progress"]["auc"] is None
    assert lines[1:] == [
        {"level": "info", "message": "resumed at event 5"},
        {"level": "warning", "message": "the bus is away"},
    ]
    with pytest.raises(ConfigurationError, match=r"--log .* cannot be written"), json_log(tmp_path):
        pass


def test_without_tensorboard_the_option_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigurationError, match="pip install tensorboard"), tensorboard(tmp_path):
        pass


def test_a_run_by_its_file_logs_and_resumes(tmp_path: Path) -> None:
    path, log = tmp_path / "run.py", tmp_path / "run.jsonl"
    path.write_text(
        "from embertide.trainer.config import RunConfig\n"
        "from embertide.trainer.presets import news_model\n"
        "from embertide.trainer.data.generator import NewsConfig, NewsSource\n"
        "run = RunConfig(model=news_model(), batch_size=64)\n"
        "source = NewsSource(NewsConfig(hours=1, views_per_hour=60, users=40))\n"
    )
    command = ["train", str(tmp_path / "pub"), "--config", str(path), "--cache", str(CACHE)]
    command += ["--log", str(log), "--metrics-port", str(free_ports(1)[0])]
    for resumed in (False, True):
        done = CliRunner().invoke(app, [*command, "--json"])
        assert done.exit_code == 0, done.output
        assert " training: " not in done.stderr
        result = json.loads(done.stdout.splitlines()[-1])["result"]
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert lines[-1]["result"] == result
        said = [line["message"] for line in lines if "message" in line]
        assert any("resumed at event" in message for message in said) == resumed
    assert result["events"] > 100
    command[1] = str(tmp_path / "another")
    assert " training: " in CliRunner().invoke(app, command).stderr
