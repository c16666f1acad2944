"""Runs in a pod: asks the Service as two kinds of clients do, and prints what became of it.

    python asker.py REQUESTS_A_SECOND FEATURES DENSE_FEATURES

A kind keeps its connection, as a service does that asks all day, or makes a new one each time. A
line of JSON each second says how many answers each kind had; each failure, and each answer with
keys that nobody answered for, has a line of its own.
"""

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton

SERVICE = "embertide"
MODEL = "news"
KEYS = 20_000  # ids are below this
TIMEOUT_S = 2.0
Keys = npt.NDArray[np.int64]
Dense = npt.NDArray[np.float32]
_lock = threading.Lock()
_counts: dict[str, list[int]] = {}


def say(**fields: object) -> None:
    """Print a line."""
    with _lock:
        print(json.dumps({"at": round(time.time(), 3), **fields}), flush=True)


class Grpc:
    """KServe v2 over gRPC."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._client: Any = None

    def ask(self, keys: Keys, dense: Dense) -> tuple[float, int]:
        """Return the score, and how many keys nobody answered for."""
        if self._client is None or not self._keep:
            self._client = triton.InferenceServerClient(f"{SERVICE}:8001")
        inputs = [triton.InferInput("KEYS", keys.shape, "INT64")]
        inputs[0].set_data_from_numpy(keys)
        if dense.size:
            inputs.append(triton.InferInput("DENSE", dense.shape, "FP32"))
            inputs[1].set_data_from_numpy(dense)
        result = self._client.infer(MODEL, inputs, client_timeout=TIMEOUT_S)
        said = result.get_response().parameters
        score = float(result.as_numpy("SCORE")[0, 0])
        if not self._keep:
            self._client.close()
        return score, said["degraded_keys"].int64_param if "degraded_keys" in said else 0


KINDS: dict[str, Callable[[], Grpc]] = {
    "kept": lambda: Grpc(keep=True),
    "fresh": lambda: Grpc(keep=False),
}


def run(kind: str, every_s: float, features: int, dense: int) -> None:
    """Ask for ever."""
    client, seeded = KINDS[kind](), random.Random(kind)
    while True:
        began = time.monotonic()
        keys = np.array([[seeded.randrange(KEYS) for _ in range(features)]], dtype=np.int64)
        try:
            score, degraded = client.ask(keys, np.zeros((1, dense), dtype=np.float32))
            if not 0.0 <= score <= 1.0:
                raise RuntimeError(f"a score of {score}")
        except Exception as error:  # whatever it is, it is a request that failed
            client = KINDS[kind]()
            say(kind=kind, failed=f"{type(error).__name__}: {error}"[:300])
        else:
            if degraded:
                say(kind=kind, degraded=degraded)
            with _lock:
                _counts[kind][0] += 1
        time.sleep(max(0.0, began + every_s - time.monotonic()))


def main() -> None:
    every_s = 1.0 / float(sys.argv[1])
    features, dense = map(int, sys.argv[2:])
    for kind in KINDS:
        _counts[kind] = [0]
        threading.Thread(target=run, args=(kind, every_s, features, dense), daemon=True).start()
    while True:
        time.sleep(1)
        with _lock:
            counts = {kind: count[0] for kind, count in _counts.items()}
            for count in _counts.values():
                count[0] = 0
        say(answers=counts)


main()
