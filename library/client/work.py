"""The requests of a call, and its answer, checked: a server may be somebody else's, or broken."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide._common import kserve
from embertide.client.call import Call
from embertide.client.errors import ClientError, InputError, RefusedError
from embertide.client.requests import (
    Columns,
    Request,
    cut,
    embeddings_of,
    scores_of,
    sources_of,
)
from embertide.client.results import Looked, Ranked, Said, facts_of
from embertide.client.schema import Schema


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One response, proved to answer its request."""

    arrays: Mapping[str, NDArray[Any]]
    said: Said


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The requests of a call, whichever client sends them."""

    columns: Columns
    sources: bool
    version: int | None
    heads: Sequence[str] = ()  # of a ranking model

    @property
    def schema(self) -> Schema:
        """The model's."""
        return self.columns.schema

    @property
    def outputs(self) -> list[str]:
        """Tensors to ask for."""
        answers = [self.schema.output_of(head) for head in self.heads] or [self.schema.output]
        return [*answers, *(["SOURCE"] if self.sources else [])]

    def requests(self, version: int | None, max_answer_bytes: int) -> list[Request]:
        """Return the requests, at the version that is given or asked for.

        Raises:
            InputError: One row alone is beyond a bound.
        """
        asked = self.version if version is None else version
        return cut(self.columns, asked, max_answer_bytes)

    def message(self, request: Request) -> Any:
        """Return the message of a request."""
        model, parameters = self.schema.model, request.parameters
        return kserve.infer_request(model, request.arrays, self.outputs, parameters=parameters)

    def reply(self, request: Request, response: Any) -> Reply:
        """Read the response to a request.

        Raises:
            ClientError: It does not answer it.
        """
        try:
            arrays = kserve.arrays_of(response)
            said = Said.of(kserve.parameters_of(response), int(request.lengths_BF.sum()))
            asked = request.parameters.get("version")
            if asked is not None and said.version != asked:
                raise kserve.AnswerError(f"it is of version {said.version}, not of {asked}")
            for name in self.outputs:
                if name not in arrays:
                    raise kserve.AnswerError(f"tensor {name!r} is missing")
                wanted = np.dtype(np.uint8 if name == "SOURCE" else np.float32)
                if arrays[name].dtype != wanted:
                    raise kserve.AnswerError(f"tensor {name!r} is of {arrays[name].dtype}")
        except kserve.AnswerError as error:
            raise ClientError(
                f"model {self.schema.model!r} gave what is no answer: {error}; is the endpoint a "
                "node of Embertide's?"
            ) from None
        return Reply({name: arrays[name] for name in self.outputs}, said)

    def result(self, requests: Sequence[Request], replies: Sequence[Reply], call: Call) -> Any:
        """Return the answer in the kind that the features came in."""
        sources = None
        if self.sources:
            found = [reply.arrays["SOURCE"] for reply in replies]
            sources = sources_of(found, requests, self.schema)
        keys = sum(int(request.lengths_BF.sum()) for request in requests)
        said = [reply.said for reply in replies]
        facts = facts_of(said, keys=keys, sources=sources, tries=call.tries, trace=call.trace)
        if facts["degraded"] is not None:
            call.calling.count("degraded_answers")
            call.calling.count("degraded_keys", facts["degraded"].keys)
        if self.schema.ranking:
            scores = {head: self._scores(head, replies) for head in self.heads}
            return Ranked(scores=scores[self.heads[0]], heads=scores, **facts)
        parts = [reply.arrays[self.schema.output] for reply in replies]
        vectors = embeddings_of(parts, requests, self.schema)
        return Looked(embeddings=self.columns.table.embeddings(vectors), **facts)

    def _scores(self, head: str, replies: Sequence[Reply]) -> Any:
        parts = [reply.arrays[self.schema.output_of(head)] for reply in replies]
        name = "score" if head == self.schema.heads[0] else head
        return self.columns.table.scores(scores_of(parts, self.columns), name)


def chosen(schema: Schema, heads: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the heads that a call asks for.

    Raises:
        InputError: One is not the model's.
    """
    if heads is None:
        return schema.heads
    asked = (heads,) if isinstance(heads, str) else tuple(dict.fromkeys(heads))
    unknown = [head for head in asked if head not in schema.heads]
    if unknown or not asked:
        what = f"head {unknown[0]!r} is unknown" if unknown else "no head is named"
        raise InputError(f"{what}; model {schema.model!r} has {', '.join(schema.heads)}")
    return asked


def check_kind(schema: Schema, *, ranking: bool) -> None:
    """Refuse a call that the model is not for.

    Raises:
        RefusedError: It is of the other kind.
    """
    if schema.ranking != ranking:
        kind, verb = ("ranking", "rank") if schema.ranking else ("lookup", "lookup")
        raise RefusedError(f"model {schema.model!r} is of kind {kind}: call {verb}()")
