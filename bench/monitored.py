"""A fleet of chaos with a Prometheus beside it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from bench.prometheus import Prometheus
from bench.servers import BenchError
from embertide.server.cli.chaos.options import ChaosOptions
from embertide.server.cli.chaos.rounds import Chaos
from embertide.server.cli.common_options import DEFAULT_BACKENDS, DEFAULT_CACHE


class Monitored:
    """A context manager that ends both. Used by one thread."""

    def __init__(self, folder: Path, backends: Path = DEFAULT_BACKENDS) -> None:
        """Start both, and wait until the fleet is well and Prometheus answers.

        Raises:
            ProcessError: A process does not start.
            BenchError: Prometheus does not answer.
        """
        options = ChaosOptions(directory=folder / "fleet", backends=backends, cache=DEFAULT_CACHE)
        options.empty()
        self.chaos = Chaos(options, print)
        try:
            self.prometheus = Prometheus(self.chaos.fleet.pages, folder / "prometheus")
            self.wait(self.prometheus.ready, 30)
        except BaseException:
            self.chaos.__exit__()
            raise

    def holds(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Keep the fleet going until a condition holds; return whether it came in time."""
        deadline, next_look_s = time.monotonic() + within_s, 0.0
        while time.monotonic() < deadline:
            self.chaos.tick()
            if time.monotonic() >= next_look_s:
                if condition():
                    return True
                next_look_s = time.monotonic() + 0.5
        return condition()

    def wait(self, condition: Callable[[], bool], within_s: float) -> None:
        """Keep the fleet going until a condition holds.

        Raises:
            BenchError: It does not come in time.
        """
        if not self.holds(condition, within_s):
            raise BenchError(f"not within {within_s:g} s")

    def __enter__(self) -> Self:
        """Return it, running."""
        return self

    def __exit__(self, *error: object) -> None:
        """End both."""
        self.prometheus.__exit__()
        self.chaos.__exit__()
