"""The client for asyncio."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self, overload

import numpy as np
import tenacity
import tritonclient.grpc.aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from embertide.client.calling import (
    AgainError,
    Call,
    Calling,
    Reply,
    Settings,
    Work,
    check_kind,
    chosen,
)
from embertide.client.errors import VersionGoneError
from embertide.client.requests import Request, read
from embertide.client.results import Looked, Ranked
from embertide.client.schema import Schema


class AsyncClient:
    """Ranking and lookup models in Triton, asked over gRPC (KServe v2). Of one event loop.

    An asynchronous context manager; its arguments are those of `Client`, and so are its calls.

    Raises:
        ValueError: An endpoint or a setting is none.
    """

    def __init__(self, endpoints: str | Sequence[str], **settings: Any) -> None:
        """Name the endpoints; nothing is sent yet."""
        self._calling = Calling(endpoints, Settings(**settings))
        self._servers: list[tritonclient.grpc.aio.InferenceServerClient] = []
        self._schemas: dict[str, Schema] = {}
        self._learning = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls that are under way fail."""
        for server in self._servers:
            await server.close()

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
    ) -> Ranked[Any]:
        """Score samples, all by one version; arguments and errors are those of `Client.rank`."""
        call = Call(self._calling, model, timeout_s)
        schema = await self._schema(call)
        check_kind(schema, ranking=True)
        asked = chosen(schema, heads)
        work = Work(read(schema, features, weights, dense, context), sources, version, asked)
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
    ) -> Looked[Any]:
        """Look vectors up, all of one version; arguments and errors are those of `rank`."""
        call = Call(self._calling, model, timeout_s)
        schema = await self._schema(call)
        check_kind(schema, ranking=False)
        work = Work(read(schema, features, weights), sources, version)
        answer: Looked[Any] = await self._run(call, work)
        return answer

    def _server(self, at: int) -> tritonclient.grpc.aio.InferenceServerClient:
        # Channels belong to the loop that runs when they are made.
        if not self._servers:
            connection = self._calling.settings.connection()
            self._servers = [
                tritonclient.grpc.aio.InferenceServerClient(each, **connection)
                for each in self._calling.endpoints
            ]
        return self._servers[at]

    # --- sending ----------------------------------------------------------------------------------

    async def _schema(self, call: Call) -> Schema:
        known = self._schemas.get(call.model)
        if known is not None:
            return known
        async with self._learning:
            if call.model not in self._schemas:
                said = await self._try(call, "get_model_config", False, call.model, as_json=True)
                given = self._calling.settings.schemas.get(call.model)
                self._schemas[call.model] = Schema.of(said["config"], given)
        return self._schemas[call.model]

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
        requests = work.requests()
        replies = [await self._send(call, work, requests[0])]
        if len(requests) > 1:
            requests = work.requests(int(replies[0].parameters["version"]))
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
        outputs = [tritonclient.grpc.InferRequestedOutput(name) for name in work.outputs]
        pinned = "version" in request.parameters
        result = await self._try(
            call,
            "infer",
            pinned,
            call.model,
            work.tensors(request),
            outputs=outputs,
            parameters=dict(request.parameters),
        )
        return Reply.of(result, work.outputs)

    async def _try(self, call: Call, verb: str, pinned: bool, *words: Any, **named: Any) -> Any:
        """Call a method of tritonclient's until it answers."""
        tries, failure = 0, None
        try:
            async for attempt in tenacity.AsyncRetrying(**call.policy()):
                with attempt:
                    arguments = call.arguments(failure)
                    tries += 1
                    at = self._calling.at
                    try:
                        server = self._server(at)
                        return await getattr(server, verb)(*words, **named, **arguments)
                    except InferenceServerException as error:
                        failure = call.failed(error, at, pinned, failure)
                        raise failure from error
        except AgainError as error:
            raise call.gave_up(error, tries) from error
        raise AssertionError("tenacity ends with a value or an error")
