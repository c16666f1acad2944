"""A steady load on one Triton model, from a process of its own, with a log line per request.

Requests are encoded once and sent as bytes, so that a request costs its client little. At a rate,
requests fall due evenly and latency counts from when a request was due, sent or not; in closed
loop, each of a few threads sends its next request when it has the answer to the one before.
"""

import collections
import contextlib
import dataclasses
import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from bench import perf
from bench.servers import BenchError
from embertide._common import kserve

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_FAILED = -1
_ANSWER_S = 30.0

Log = NDArray[np.void]
# Wall clock in s since the Unix epoch; `version` is that of the answer, below 0 if there is none.
_ENTRY = np.dtype([("due", "f8"), ("sent", "f8"), ("ended", "f8"), ("version", "i8")])


def encode(model: str, keys_BF: NDArray[np.int64]) -> bytes:
    """Return a request of a lookup model for EMBEDDING and VERSION, as gRPC sends it."""
    request = kserve.infer_request(model, {"KEYS": keys_BF}, ("EMBEDDING", "VERSION"))
    encoded: bytes = request.SerializeToString()
    return encoded


def _version(answer: Any) -> int:
    names = [output.name for output in answer.outputs]
    return int.from_bytes(answer.raw_output_contents[names.index("VERSION")][:8], "little")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How a client waits.

    Attributes:
        at_once: Requests on their way, at most: enough that one is free when a request falls due,
            while the server keeps the others waiting.
        timeout_s: Deadline of a request, which says so; the client waits as long, and cancels
            nothing.
    """

    at_once: int = 16
    timeout_s: float = 10.0


class _Clock:
    """Says when requests are due. Safe from many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rate: float | None = 0.0
        self._begun, self._sent, self._on_their_way, self._stopped = 0.0, 0, 0, False

    def begin(self, rate: float | None) -> None:
        """Let requests fall due so many times a second from now on; 0: never, None: closed loop."""
        with self._changed:
            self._rate, self._begun, self._sent = rate, time.time(), 0
            self._changed.notify_all()

    def stop(self) -> None:
        """Let no request fall due any more and every thread end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def pause(self) -> None:
        """Let no request fall due, and wait until those on their way have ended."""
        self.begin(0.0)
        with self._changed:
            self._changed.wait_for(lambda: not self._on_their_way)

    def done(self) -> None:
        """Say that a request has ended."""
        with self._changed:
            self._on_their_way -= 1
            if not self._on_their_way:
                self._changed.notify_all()

    def next(self, thread: int) -> float | None:
        """Wait until it is the thread's turn and return when its request is due; None: stop."""
        with self._changed:
            while not self._stopped:
                if self._rate or (self._rate is None and thread < perf.CONCURRENCY):
                    self._sent += 1
                    self._on_their_way += 1
                    return self._begun + self._sent / self._rate if self._rate else time.time()
                self._changed.wait()
        return None


class _Sender:
    """The threads of a client process and what they logged."""

    def __init__(self, address: str, requests: Sequence[bytes], patience: Patience) -> None:
        self.clock = _Clock()
        self._timeout_s = patience.timeout_s
        self._failures: collections.Counter[str] = collections.Counter()
        late = service_pb2.ModelInferRequest()
        kserve.set_timeout(late, patience.timeout_s)
        # Messages that are put together are one.
        self._requests = [each + late.SerializeToString() for each in requests]
        self._unheard: set[Any] = set()  # answers that came too late: gRPC cancels what nobody has
        self._lock = threading.Lock()
        self._log: list[tuple[float, float, float, int]] = []
        self._channel = grpc.insecure_channel(address, kserve.OPTIONS)
        self._infer: Any = self._channel.unary_unary(
            _METHOD,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        self._threads = [
            threading.Thread(target=self._run, args=(n,)) for n in range(patience.at_once)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, thread: int) -> None:
        rng = np.random.default_rng(thread)
        while (due := self.clock.next(thread)) is not None:
            if (early := due - time.time()) > 0:
                time.sleep(early)
            request = self._requests[rng.integers(len(self._requests))]
            sent = time.time()
            version, failure = _FAILED, ""
            try:
                version = _version(self._ask(request))
            except grpc.FutureTimeoutError:
                failure = f"DEADLINE_EXCEEDED: no answer in {self._timeout_s} s"
            except grpc.RpcError as error:
                failure = f"{error.code().name}: {error.details()}"
            with self._lock:
                self._log.append((due, sent, time.time(), version))
                if failure:
                    self._failures[failure] += 1
            self.clock.done()

    def _ask(self, request: bytes) -> Any:
        answer = self._infer.future(request)
        try:
            return answer.result(timeout=self._timeout_s)
        except grpc.FutureTimeoutError:
            with self._lock:
                self._unheard = {each for each in self._unheard if not each.done()} | {answer}
            raise

    def take(self) -> tuple[Log, collections.Counter[str]]:
        """Wait for the answers on their way; return the log and why requests failed.

        Both since the last call.
        """
        self.clock.pause()
        with self._lock:
            log, self._log = self._log, []
            failures, self._failures = self._failures, collections.Counter()
        return np.array(log, _ENTRY), failures

    def stop(self) -> None:
        self.clock.stop()
        for thread in self._threads:
            thread.join()
        for answer in self._unheard:
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError):
                answer.result(timeout=self._timeout_s)
        self._channel.close()


def _serve(
    commands: Connection, address: str, requests: Sequence[bytes], patience: Patience
) -> None:
    """Do what the parent says until it says stop, or is gone."""
    sender = _Sender(address, requests, patience)
    try:
        while (command := commands.recv())[0] != "stop":
            if command[0] == "begin":
                sender.clock.begin(command[1])
            else:
                commands.send((*sender.take(), time.process_time()))
    except EOFError:
        pass
    finally:
        sender.stop()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The clients' log from one time of the wall clock to another."""

    log: Log
    begin: float
    end: float
    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    cpu_share: float = 0.0  # of one core, of the busiest client process

    def between(self, begin: float, end: float, *, wholly: bool = False) -> "Seen":
        """Return the requests that overlap a span, or lie in it wholly."""
        due, ended = self.log["due"], self.log["ended"]
        inside = (due >= begin) & (ended <= end) if wholly else (due < end) & (ended > begin)
        return dataclasses.replace(self, log=self.log[inside], begin=begin, end=end)

    @property
    def failed(self) -> int:
        """Requests without an answer."""
        return int(np.sum(self.log["version"] == _FAILED))

    @property
    def versions(self) -> int:
        """The number of versions that the answers were of."""
        return len(set(self.log["version"].tolist()) - {_FAILED})

    @property
    def requests_per_s(self) -> float:
        """Answers a second, counted when they came."""
        ended = self.log["ended"][self.log["version"] != _FAILED]
        came = np.sum((ended >= self.begin) & (ended <= self.end))
        return float(came) / (self.end - self.begin)

    @property
    def latency_us_p99(self) -> float:
        """The p99 of all latencies, in us; 0 if there are none."""
        return _p99_us(self.log["ended"] - self.log["due"])

    @property
    def late_us_p99(self) -> float:
        """The p99 of how much later than due requests were sent, in us: the clients' own doing."""
        return _p99_us(self.log["sent"] - self.log["due"])


def _p99_us(seconds: NDArray[np.float64]) -> float:
    return float(np.percentile(seconds, 99)) * 1e6 if len(seconds) else 0.0


class Clients:
    """One client process a server. Used by one thread; a context manager that ends them."""

    def __init__(
        self,
        addresses: Sequence[str],
        requests: Sequence[bytes],
        patience: Patience | None = None,
    ) -> None:
        """Start the processes; they send nothing yet."""
        spawn = multiprocessing.get_context("spawn")  # a fork would take gRPC's threads for its own
        self._clients, patience = [], patience or Patience()
        for address in addresses:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(theirs, address, requests, patience), daemon=True
            )
            process.start()
            theirs.close()
            self._clients.append((process, ours))
        self._cpu_s = [0.0] * len(self._clients)
        self._begun = time.time()
        self.stop()  # they have started

    def start(self, rate: float | None) -> None:
        """Send so many requests a second over all servers from now on; None: closed loop."""
        self._begun = time.time()
        for _, pipe in self._clients:
            pipe.send(("begin", rate and rate / len(self._clients)))

    def stop(self) -> Seen:
        """Send no more, wait for all answers, and return what was logged since the last call.

        Raises:
            BenchError: A client process ended, or does not answer.
        """
        for _, pipe in self._clients:
            pipe.send(("take",))
        answers = []
        for process, pipe in self._clients:
            if not pipe.poll(_ANSWER_S):
                raise BenchError(f"client process {process.pid} does not answer")
            answers.append(pipe.recv())
        end = time.time()
        shares = [
            (cpu_s - before) / (end - self._begun)
            for (_, _, cpu_s), before in zip(answers, self._cpu_s, strict=True)
        ]
        self._cpu_s = [cpu_s for _, _, cpu_s in answers]
        return Seen(
            log=np.concatenate([log for log, _, _ in answers]),
            begin=self._begun,
            end=end,
            failures=sum((failures for _, failures, _ in answers), collections.Counter()),
            cpu_share=max(shares),
        )

    def __enter__(self) -> Self:
        """Return the running clients."""
        return self

    def __exit__(self, *error: object) -> None:
        """End them."""
        for process, pipe in self._clients:
            pipe.send(("stop",))
            process.join()
            pipe.close()
