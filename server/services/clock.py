"""The clock of the services: wall time that never goes back."""

import time


class Clock:
    """Milliseconds since the Unix epoch, by the wall at the start and steady from there."""

    def __init__(self) -> None:
        """Look at the wall once."""
        self._wall_s = time.time() - time.monotonic()

    def now_ms(self) -> int:
        """Return the time."""
        return int((self._wall_s + time.monotonic()) * 1000)
