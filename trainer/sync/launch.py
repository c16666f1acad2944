"""Starts the ranks of a run by torchrun, which ends with the exit code of its first failed rank.

torchrun itself ends with 1 whatever happened; who started the run has to tell a configuration
error (2) from a crash. And in an Indexed Job it guesses from DNS which pod hosts the rendezvous;
the pod's index is sure. `python -m embertide.trainer.sync.launch` takes torchrun's command line,
and restarts failed ranks up to `--max-restarts=N` times ([supervisor.py](supervisor.py)).
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence

from embertide._common.terminal import say
from embertide.trainer.sync import verdict
from embertide.trainer.sync.supervisor import supervise

# The pods of a job may be scheduled minutes apart; torchrun would give up after one.
_WAIT_S = 600
_SIGNALLED = 128
"""Exit code of a process that a signal ended, as shells give it: this and the signal's number."""
_AGENT = "EMBERTIDE_AGENT_PID"
"""Names the process that starts the ranks, for `end_with_agent`."""
_PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "WORLD_SIZE" in os.environ


def end_with_agent() -> None:
    """Have the kernel kill this rank when the process that started it ends, however it ends.

    Ranks need torchrun's agent to meet and no more. If that alone is killed, they would go on to
    train and publish, and the command that is started in its place would find them at it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # It may have ended before.
    if os.environ.get(_AGENT, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)


def launch(ranks: int, restarts: int, arguments: Sequence[str]) -> int:
    """Start ranks of this command on this machine; return the exit code when they have ended.

    Args:
        ranks: The number of ranks.
        restarts: Times that all start again when one is lost; they go on from their checkpoint.
        arguments: Arguments of `embertide.trainer`.
    """
    return supervise(
        [
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--monitor-interval=0.1",
            "-m",
            "embertide.trainer",
            "--",
            *arguments,
        ],
        restarts=restarts,
    )


def run(arguments: Sequence[str]) -> int:
    """Run torchrun's agent with a command line; return the exit code of its first failed rank."""
    # Imported here: torch takes seconds, and --help should not.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    # Whom it ends and why, in torch's words: `say` below has the same, where it is news.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    os.environ[_AGENT] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun warns of it at length
    index = os.environ.get("JOB_COMPLETION_INDEX")
    if index is not None:
        os.environ.setdefault("PET_RDZV_CONF", f"is_host={index == '0'},read_timeout={_WAIT_S}")
    try:
        main(list(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        is_said = failure.exitcode in (2, verdict.AGAIN) or verdict.is_left(error)
        if not is_said:
            say(str(error), err=True)
        return failure.exitcode if failure.exitcode > 0 else _SIGNALLED - failure.exitcode
    except SignalException as error:
        return _SIGNALLED + int(error.sigval)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Start the ranks of a pod; `--max-restarts` is for the supervisor, the rest for torchrun."""
    words = list(arguments)
    end = words.index("-m") if "-m" in words else len(words)
    flag = "--max-restarts="
    given = [word for word in words[:end] if word.startswith(flag)]
    rest = [word for word in words[:end] if word not in given] + words[end:]
    return supervise(rest, restarts=int(given[-1].removeprefix(flag)) if given else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
