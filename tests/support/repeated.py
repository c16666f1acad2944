"""A thread that does one thing again and again until it is stopped."""

import threading


class Repeated(threading.Thread):
    """Does something again and again until it is stopped. Any thread may read `error`."""

    def __init__(self, every_s: float) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._every_s = every_s
        self._ending = threading.Event()

    def run(self) -> None:
        try:
            while not self._ending.wait(self._every_s):
                self.act()
        except BaseException as error:
            self.error = error

    def act(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._ending.set()
        self.join()
