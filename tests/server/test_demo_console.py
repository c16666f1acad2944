"""The console that the demo starts: a page answers, and without its packages the demo says so."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
from visitor import Visitor
from waiting import wait_until

from embertide.server.adapters.process import free_ports
from embertide.server.cli.demo import console
from embertide.server.cli.demo.command import _Lines
from embertide.server.cli.demo.console import DemoConsole
from embertide.server.cli.demo.options import DemoOptions
from embertide.server.cli.demo.run import State


def options_in(folder: Path) -> DemoOptions:
    (port,) = free_ports(1)
    options = DemoOptions(directory=folder, backends=folder, cache=folder, console_port=port)
    options.log("console").parent.mkdir()
    return options


def test_the_demo_starts_a_console_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_in(tmp_path)
    (away,) = free_ports(1)
    with contextlib.ExitStack() as processes:
        started = DemoConsole(options, f"127.0.0.1:{away}", processes)
        wait_until(lambda: started.text() != "starting", timeout_s=60)
        address = f"127.0.0.1:{options.console_port}"
        assert started.text() == f"http://{address} (log in without a token)"
        lines, state = _Lines(), State(console=started.text())
        for _ in range(3):
            lines(state)
        assert capsys.readouterr().err.count(f"console: http://{address}") == 1
        visitor = Visitor(address)
        assert visitor.get("/").headers["location"] == "/login"
        assert f"no control plane answers at 127.0.0.1:{away}" in visitor.log_in().text
        assert started._process is not None
        started._process.stop()
        assert "ended with code" in started.text()


def test_a_demo_without_the_consoles_packages_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_PACKAGES", ("no_such_package",))
    with contextlib.ExitStack() as processes:
        options = dataclasses.replace(options_in(tmp_path))
        assert "pip install 'embertide[console]'" in DemoConsole(options, "x:1", processes).text()
