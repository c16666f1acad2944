"""Any bytes at listeners of processes: those who may are answered, memory is bounded.

`make fuzz-long` throws more; what nodes serve one another is fuzzed by frames_fuzz.cc.
"""

import os
from pathlib import Path

from bench.thrown import Thrower, listeners

_EACH = int(os.environ.get("EMBERTIDE_THROWN", "600"))


def test_listeners_outlive_what_strangers_send(tmp_path: Path) -> None:
    with listeners(tmp_path) as every:
        assert len(every) == 7
        for listener in every:
            thrower = Thrower(listener, seed=1)
            said = len(listener.process.log_text())
            thrower.throw(_EACH)
            thrower.close()
            # A line a handshake that fails would fill a disk.
            assert len(listener.process.log_text()) - said < 1000
            assert thrower.number == _EACH
            assert 0 < thrower.most_bytes < thrower.bound_bytes
