"""The client for asyncio."""

import asyncio
import contextlib
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


class AsyncClient:
    """Ranking and lookup models in Triton, asked over gRPC (KServe v2). Of one event loop.

    An asynchronous context manager; its arguments are those of `Client`, and so are its calls. A
    task that is cancelled, as by `asyncio.wait_for`, waits no longer; its request goes on in the
    node, and its answer is dropped.

    Raises:
        ValueError: An endpoint or a setting is none.
    """

    def __init__(self, endpoints: str | Sequence[str], **settings: Any) -> None:
        """Name the endpoints; nothing is sent yet."""
        self._calling = Calling(endpoints, Settings(**settings))
        self._schemas: dict[str, Schema] = {}
        self._learning = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Take no more calls; connections end with the last call that is under way."""
        await asyncio.to_thread(self._calling.close)

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start (docs/client.md, Counters)."""
        return self._calling.counters()

    async def schema(self, model: str, *, timeout_s: float | None = None) -> Schema:
        """Return what a model takes; it is asked once, and again after `forget`.

        Raises:
            ClientError: It cannot be reached, or does not tell.
        """
        return await self._schema(Call(self._calling, model, timeout_s))

    def forget(self, model: str) -> None:
        """Ask the model for its schema again, before the next call."""
        self._schemas.pop(model, None)

    @overload
    async def rank(
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
    async def rank(
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

    async def rank(
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
        """Score samples, all by one version; arguments and errors are those of `Client.rank`."""
        with Call(self._calling, model, timeout_s, "rank", traceparent) as call:
            schema = await self._schema(call)
            check_kind(schema, ranking=True)
            asked = chosen(schema, heads)
            columns = read(schema, features, weights, dense, context, repeat=sources)
            work = Work(columns, sources, version, asked)
            answer: Ranked[Any] = await self._run(call, work)
            return answer

    @overload
    async def lookup(
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
    async def lookup(
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

    async def lookup(
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
            schema = await self._schema(call)
            check_kind(schema, ranking=False)
            work = Work(read(schema, features, weights), sources, version)
            answer: Looked[Any] = await self._run(call, work)
            return answer

    # --- sending ----------------------------------------------------------------------------------

    async def _schema(self, call: Call) -> Schema:
        known = self._schemas.get(call.model)
        if known is None:
            try:
                await asyncio.wait_for(self._learning.acquire(), max(0.0, call.left_s()))
            except TimeoutError:
                raise call.late() from None
            try:
                known = self._schemas.get(call.model)
                if known is None:
                    request = service_pb2.ModelConfigRequest(name=call.model)
                    said = await self._ask(call, "ModelConfig", request)
                    known = Schema.told(said, call.model, self._calling.settings.schemas)
                    self._schemas[call.model] = known
            finally:
                self._learning.release()
        call.known = True
        return known

    async def _run(self, call: Call, work: Work) -> Any:
        self._calling.count("calls")
        try:
            return await self._once(call, work)
        except VersionGoneError:
            if work.version is not None:
                raise
            # The version of the first request left the window, or another endpoint lacks it.
            self._calling.count("started_over")
            return await self._once(call, work)

    async def _once(self, call: Call, work: Work) -> Any:
        most_bytes = self._calling.settings.max_answer_bytes
        requests = work.requests(None, most_bytes)
        replies = [await self._send(call, work, requests[0])]
        if len(requests) > 1:
            requests = work.requests(replies[0].said.version, most_bytes)
            room = asyncio.Semaphore(self._calling.settings.concurrency)

            async def send(request: Request) -> Reply:
                async with room:
                    return await self._send(call, work, request)

            sending = [asyncio.ensure_future(send(each)) for each in requests[1:]]
            try:
                replies += await asyncio.gather(*sending)
            finally:
                for each in sending:
                    each.cancel()
        return work.result(requests, replies, call)

    async def _send(self, call: Call, work: Work, request: Request) -> Reply:
        everywhere = work.version is not None
        said = await self._ask(call, "ModelInfer", work.message(request), everywhere=everywhere)
        return work.reply(request, said)

    async def _ask(self, call: Call, rpc: str, message: Any, *, everywhere: bool = False) -> Any:
        """Return the answer to a message; whoever cancels this cancels no request."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(inbox.put_nowait, event)

        steps = Tries(call, rpc, message, deliver, everywhere=everywhere).steps()
        with contextlib.closing(steps):
            try:
                wait_s = next(steps)
                while True:
                    event = None
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, wait_s)):
                            event = await inbox.get()
                    if event is None and not inbox.empty():  # it came as the time was up
                        event = inbox.get_nowait()
                    wait_s = steps.send(event)
            except StopIteration as answered:
                return answered.value
