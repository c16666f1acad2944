"""`torchrun` for a pod of an Indexed Job: it ends with the exit code of its first failed worker.

torchrun itself ends with 1 whatever happened; `podFailurePolicy` has to tell a configuration error
(2) from a crash. And it guesses from DNS which pod hosts the rendezvous; the pod's index is sure.
"""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

# The pods of a job may be scheduled minutes apart; torchrun would give up after one.
WAIT_S = 600
# An exit code of a process that a signal ended, as shells give it.
SIGNALLED = 128


def launch() -> int:
    """Run torchrun with the command line and return the exit code for the pod."""
    index = os.environ.get("JOB_COMPLETION_INDEX")
    if index is not None:
        os.environ.setdefault("PET_RDZV_CONF", f"is_host={index == '0'},read_timeout={WAIT_S}")
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(error, file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else SIGNALLED - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(launch())
