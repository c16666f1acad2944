"""Starts the ranks of a run by torchrun, which ends with the exit code of its first failed rank.

torchrun itself ends with 1 whatever happened; who started the run has to tell a configuration
error (2) from a crash. And in an Indexed Job it guesses from DNS which pod hosts the rendezvous;
the pod's index is sure. `python -m embertide.trainer.sync.launch` takes torchrun's command line.
"""

import os
import sys
from collections.abc import Sequence

# The pods of a job may be scheduled minutes apart; torchrun would give up after one.
_WAIT_S = 600
_SIGNALLED = 128
"""Exit code of a process that a signal ended, as shells give it: this and the signal's number."""


def is_launched() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "WORLD_SIZE" in os.environ


def launch(ranks: int, restarts: int, arguments: Sequence[str]) -> int:
    """Start ranks of this command on this machine; return the exit code when they have ended.

    Args:
        ranks: How many.
        restarts: Times that all start again when one is lost; they go on from their checkpoint.
        arguments: Of `embertide.trainer`.
    """
    return run(
        [
            "--standalone",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}",
            "--monitor-interval=0.1",
            "-m",
            "embertide.trainer",
            "--",
            *arguments,
        ]
    )


def run(arguments: Sequence[str]) -> int:
    """Run torchrun with a command line."""
    # Imported here: torch takes seconds, and --help should not.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun warns of it at length
    index = os.environ.get("JOB_COMPLETION_INDEX")
    if index is not None:
        os.environ.setdefault("PET_RDZV_CONF", f"is_host={index == '0'},read_timeout={_WAIT_S}")
    try:
        main(list(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode != 2:  # a configuration error has said what it is
            print(error, file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else _SIGNALLED - failure.exitcode
    except SignalException as error:
        return _SIGNALLED + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
