"""An inference without keys, which asks a server whether it answers and costs it next to nothing.

That it is live or ready, a server may go on to say while its inferences wait for ever.
"""

import json
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from embertide._common import kserve


def request_of(config: Any) -> Any:
    """Return a request of one sample, all of whose bags are empty.

    Args:
        config: Triton's configuration of a model of ours.

    Raises:
        ValueError: It does not tell the model's columns.
    """
    try:
        told = json.loads(config.parameters["schema"].string_value)
        features, dense = len(told["features"]), told.get("dense", {})
        columns = int(dense.get("columns", 0)) + int(dense.get("made", 0))
        weighed = any(each.get("weighed") for each in told["features"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model {config.name} tells no columns") from error
    lengths = next((each.name for each in config.input if each.name == "NUMKEYS"), "LENGTHS")
    none = np.zeros((1, 0), np.int64)
    tensors: dict[str, NDArray[Any]] = {"KEYS": none, lengths: np.zeros((1, features), np.int32)}
    if weighed:
        tensors["WEIGHTS"] = none.astype(np.float32)
    if columns and any(each.name == "DENSE" for each in config.input):
        tensors["DENSE"] = np.zeros((1, columns), np.float32)
    return kserve.infer_request(config.name, tensors, ("VERSION",))


class TinyInference:
    """Such an inference, under way. Thread-safe; nothing here waits.

    Any answer counts, a refusal as well: who refuses is at work.
    """

    def __init__(self, line: kserve.Line, model: str) -> None:
        """Ask for a model's columns, which may have changed, and with these for an inference."""
        self._line = line
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._sent: list[kserve.Sent] = []
        self._start("ModelConfig", service_pb2.ModelConfigRequest(name=model), self._configured)

    @property
    def answered(self) -> bool:
        """Whether there is an answer."""
        return self._answered.is_set()

    def forget(self) -> None:
        """Wait for it no longer."""
        with self._lock:
            for each in self._sent:
                each.forget()

    def _start(self, rpc: str, request: Any, done: Any) -> None:
        try:
            sent = self._line.start(rpc, request, done, connects=True)
        except kserve.CallError:  # the line has too many unanswered calls, or is closed
            return
        with self._lock:
            self._sent.append(sent)

    def _configured(self, _: kserve.Sent, outcome: kserve.Outcome) -> None:
        try:
            request = request_of(outcome.reply.config) if outcome.error is None else None
        except ValueError:
            request = None
        if request is None:
            self._answered.set()
        else:
            self._start("ModelInfer", request, self._inferred)

    def _inferred(self, _: kserve.Sent, outcome: kserve.Outcome) -> None:
        self._answered.set()
