"""The commands of a page, run in a shell as they are printed; nodes go on beside them."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_BESIDE = re.compile("embertide (serve|control) ")
_READY = re.compile("is ready: |control plane of model ")
_LIMIT_S = 600


@contextlib.contextmanager
def shell(folder: Path, changes: Mapping[str, str]) -> Iterator[Callable[[str], str]]:
    """Run blocks of shell in a folder, with some words changed; gives what a block prints.

    A node or a control plane runs until the end, and the next block waits until it is ready.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    beside: list[subprocess.Popen[str]] = []
    words = re.compile("|".join(map(re.escape, changes)))

    def run(text: str) -> str:
        text = words.sub(lambda found: changes[found[0]], text)
        if not _BESIDE.match(text):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
            assert done.returncode == 0, f"{text}: {done.stdout}{done.stderr}"
            return done.stdout
        command = shlex.split(text.replace("\\\n", " "))
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE
        )
        beside.append(process)
        assert process.stdout is not None
        assert any(_READY.search(line) for line in process.stdout), text
        return ""

    try:
        yield run
    finally:
        for process in reversed(beside):
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=60)
            if process.stdout is not None:
                process.stdout.close()
            assert code in {0, 130}
