"""The work of several threads in tests."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(ranks: int, does: Callable[[int], Any]) -> None:
    """Have a thread for each rank do something; all of them end without an error."""
    errors = list[BaseException]()

    def run(rank: int) -> None:
        try:
            does(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive()
    assert not errors
