"""Programs of several ranks, started by torchrun on this machine, one thread a rank.

A program prints one JSON line on standard output; torchrun's own words go to standard error.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.servers import ROOT, BenchError

_LAST_LINES = 15


def step_options(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the options of a program that takes steps in timed windows."""
    parser = argparse.ArgumentParser(prog=name, description=doc)
    parser.add_argument("--samples", type=int, default=4096, help="of a batch, all ranks together")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=20, help="of a timed window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the batches and of the net")
    return parser


def launch(
    module: str,
    ranks: int,
    arguments: Sequence[str],
    *,
    timeout_s: float = 600.0,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a module in so many ranks and return the JSON that it printed.

    Raises:
        BenchError: It failed, took too long or printed none; the message has its last lines.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(ranks)),
        *("-m", module, "--", *arguments),
    ]
    known = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=known,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{module} took longer than {timeout_s:.0f} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = "\n".join(done.stderr.splitlines()[-_LAST_LINES:])
        raise BenchError(f"{module} in {ranks} ranks ended with {done.returncode}:\n{last}")
    printed: dict[str, Any] = json.loads(lines[-1])
    return printed
