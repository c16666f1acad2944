"""The console of the demo: its pages show the fleet while it learns, moves and serves."""

import contextlib
import importlib.util
import sys

from embertide.server.adapters.process import Child
from embertide.server.cli.demo.options import DemoOptions

_PACKAGES = ("jinja2", "starlette", "uvicorn")
_MISSING = "not installed: pip install 'embertide[console]' shows this fleet to your browser"


class DemoConsole:
    """`embertide console` as a process. The demo goes on without it, and says why there is none."""

    def __init__(self, options: DemoOptions, control: str, processes: contextlib.ExitStack) -> None:
        """Start it for a control plane, if what it needs is installed; `processes` ends it.

        Raises:
            ProcessError: It cannot be started.
        """
        self._address = f"127.0.0.1:{options.console_port}"
        self._process: Child | None = None
        self._is_up = False
        if any(importlib.util.find_spec(name) is None for name in _PACKAGES):
            return
        words = ["console", "--control", control, "--listen", self._address]
        command = [sys.executable, "-m", "embertide.server.cli", *words]
        self._process = Child(command, log=options.log("console"))
        processes.callback(self._process.stop)

    def text(self) -> str:
        """Return where it is, or why it is not there."""
        if self._process is None:
            return _MISSING
        if not self._process.alive():
            return f"ended with code {self._process.code}: see {self._process.log}"
        self._is_up = self._is_up or "console of " in self._process.log_text()
        if not self._is_up:
            return "starting"
        return f"http://{self._address} (log in without a token)"
