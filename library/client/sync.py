"""The client for threads."""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from embertide.client.call import Call, Event, Tries
from embertide.client.calling import Calling
from embertide.client.errors import VersionGoneError
from embertide.client.requests import Request, read
from embertide.client.results import Looked, Ranked
from embertide.client.schema import Schema
from embertide.client.settings import Settings
from embertide.client.work import Reply, Work, check_kind, chosen


class Client:
    """Ranking and lookup models in Triton, asked over gRPC (KServe v2). Thread-safe.

    A context manager. Shapes: B samples, D columns of DENSE.

    Args:
        endpoints: host:port of the nodes' gRPC, asked in turn: the next one when one fails.
        settings: Fields of `Settings`: timeout_s, tries, concurrency, tls, token and more.

    Raises:
        ValueError: An endpoint or a setting is none.
    """

    def __init__(self, endpoints: str | Sequence[str], **settings: Any) -> None:
        """Name the endpoints; nothing is sent yet."""
        self._calling = Calling(endpoints, Settings(**settings))
        self._schemas: dict[str, Schema] = {}
        self._learning = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            self._calling.settings.concurrency, thread_name_prefix="embertide-client"
        )

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Take no more calls; connections end with the last call that is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._calling.close()

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start (docs/client.md, Counters)."""
        return self._calling.counters()

    def schema(self, model: str, *, timeout_s: float | None = None) -> Schema:
        """Return what a model takes; it is asked once, and again after `forget`.

        Raises:
            ClientError: It cannot be reached, or does not tell.
        """
        return self._schema(Call(self._calling, model, timeout_s))

    def forget(self, model: str) -> None:
        """Ask the model for its schema again, before the next call."""
        self._schemas.pop(model, None)

    @overload
    def rank(
        self,
        model: str,
        features: Mapping[str, Any],
        *,
        context: Mapping[str, Any] | None = None,
        weights: Mapping[str, Any] | None = None,
        dense: Any = None,
        heads: str | Sequence[str] | None = None,
        version: int | None = None,
        sources: bool = False,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> Ranked[NDArray[np.float32]]: ...

    @overload
    def rank(
        self,
        model: str,
        features: Any,
        *,
        context: Mapping[str, Any] | None = None,
        weights: Mapping[str, Any] | None = None,
        dense: Any = None,
        heads: str | Sequence[str] | None = None,
        version: int | None = None,
        sources: bool = False,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> Ranked[Any]: ...

    def rank(
        self,
        model: str,
        features: Any,
        *,
        context: Mapping[str, Any] | None = None,
        weights: Mapping[str, Any] | None = None,
        dense: Any = None,
        heads: str | Sequence[str] | None = None,
        version: int | None = None,
        sources: bool = False,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> Ranked[Any]:
        """Score samples, all by one version.

        Args:
            model: Its name in Triton.
            features: Columns by name, B long: keys, lists of keys, or amounts. A mapping, a pyarrow
                Table or RecordBatch, a pandas DataFrame. Bins are made of their amounts, so leave
                them out; columns that the node makes may be left out, all of them. Tables may have
                further columns, mappings may not.
            context: By name, what all samples have in common, as the user whose candidates are
                ranked: one key, list of keys or number each. `features` then lacks them.
            weights: Weights of keys in lists, by feature: as the keys, or the name of the column.
            dense: [B, D], or names of columns; None: columns of the names that the model tells.
            heads: Names of those whose scores are wanted; None: all of the model's.
            version: The one to answer by; None: the newest that the node answers at.
            sources: Ask where each key's row came from.
            timeout_s: Deadline of the whole call; None: the client's.
            traceparent: W3C traceparent that the call's requests carry; None: as the client's
                `trace` says.

        Raises:
            InputError: The input cannot be sent; nothing was sent.
            VersionGoneError: The node does not hold the version.
            DeadlineError: The time was up.
            DegradedError: Too many keys have no owner that answers.
            UnavailableError: No endpoint answered.
            RefusedError: The node refused a request.
        """
        with Call(self._calling, model, timeout_s, "rank", traceparent) as call:
            schema = self._schema(call)
            check_kind(schema, ranking=True)
            asked = chosen(schema, heads)
            columns = read(schema, features, weights, dense, context, repeat=sources)
            work = Work(columns, sources, version, asked)
            answer: Ranked[Any] = self._run(call, work)
            return answer

    @overload
    def lookup(
        self,
        model: str,
        features: Mapping[str, Any],
        *,
        weights: Mapping[str, Any] | None = None,
        version: int | None = None,
        sources: bool = False,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> Looked[dict[str, Any]]: ...

    @overload
    def lookup(
        self,
        model: str,
        features: Any,
        *,
        weights: Mapping[str, Any] | None = None,
        version: int | None = None,
        sources: bool = False,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> Looked[Any]: ...

    def lookup(
        self,
        model: str,
        features: Any,
        *,
        weights: Mapping[str, Any] | None = None,
        version: int | None = None,
        sources: bool = False,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> Looked[Any]:
        """Look vectors up, all of one version; arguments and errors are those of `rank`."""
        with Call(self._calling, model, timeout_s, "lookup", traceparent) as call:
            schema = self._schema(call)
            check_kind(schema, ranking=False)
            work = Work(read(schema, features, weights), sources, version)
            answer: Looked[Any] = self._run(call, work)
            return answer

    # --- sending ----------------------------------------------------------------------------------

    def _schema(self, call: Call) -> Schema:
        known = self._schemas.get(call.model)
        if known is None:
            if not self._learning.acquire(timeout=max(0.0, call.left_s())):
                raise call.late()
            try:
                known = self._schemas.get(call.model)
                if known is None:
                    request = service_pb2.ModelConfigRequest(name=call.model)
                    said = self._ask(call, "ModelConfig", request)
                    known = Schema.told(said, call.model, self._calling.settings.schemas)
                    self._schemas[call.model] = known
            finally:
                self._learning.release()
        call.known = True
        return known

    def _run(self, call: Call, work: Work) -> Any:
        self._calling.count("calls")
        try:
            return self._once(call, work)
        except VersionGoneError:
            if work.version is not None:
                raise
            # The version of the first request left the window, or another endpoint lacks it.
            self._calling.count("started_over")
            return self._once(call, work)

    def _once(self, call: Call, work: Work) -> Any:
        most_bytes = self._calling.settings.max_answer_bytes
        requests = work.requests(None, most_bytes)
        replies = [self._send(call, work, requests[0])]
        if len(requests) > 1:
            requests = work.requests(replies[0].said.version, most_bytes)
            sending = [self._pool.submit(self._send, call, work, each) for each in requests[1:]]
            try:
                replies += [each.result() for each in sending]
            finally:
                for each in sending:
                    each.cancel()
        return work.result(requests, replies, call)

    def _send(self, call: Call, work: Work, request: Request) -> Reply:
        everywhere = work.version is not None
        message = work.message(request)
        return work.reply(request, self._ask(call, "ModelInfer", message, everywhere=everywhere))

    def _ask(self, call: Call, rpc: str, message: Any, *, everywhere: bool = False) -> Any:
        """Return the answer to a message; wait for it here."""
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        steps = Tries(call, rpc, message, inbox.put, everywhere=everywhere).steps()
        with contextlib.closing(steps):
            try:
                wait_s = next(steps)
                while True:
                    event = None
                    with contextlib.suppress(queue.Empty):
                        event = inbox.get(timeout=max(0.0, wait_s))
                    wait_s = steps.send(event)
            except StopIteration as answered:
                return answered.value
