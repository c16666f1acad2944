"""A channel: what the ranks of a run say to one another, as one thread of each sees it.

`Channel` is that of a run of one rank: nothing is exchanged. `ranks.GlooChannel` does the same by
torch.distributed. All ranks make the same calls in the same order.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from embertide.trainer.errors import ConfigurationError, TrainerError

if TYPE_CHECKING:
    from torch import Tensor

_MAX_WORDS = 4000  # of an error that a rank tells the others


class RankError(TrainerError):
    """Another rank failed; the message names it and has its words."""


class RankLostError(RankError):
    """Another rank is gone, or does not answer; the message names it."""


@dataclasses.dataclass(slots=True)
class Traffic:
    """The traffic of a channel, of one kind.

    Attributes:
        messages: Sent to other ranks; what a rank keeps for itself is none.
        bytes: Bytes on the wire; protocol headers apart.
        waits_s: Time in which the caller stood still for it.
    """

    messages: int = 0
    bytes: int = 0
    waits_s: float = 0.0


class Pending:
    """An exchange that is under way; `wait` gives what came."""

    def __init__(self, wait: "Callable[[], Tensor]") -> None:
        """Give the result by `wait`, which is called once."""
        self._wait = wait

    def wait(self) -> "Tensor":
        """Return what came.

        Raises:
            RankLostError: A rank is gone.
        """
        return self._wait()


class Channel:
    """The channel of one rank. Every method of others may raise RankLostError.

    Attributes:
        rank: This rank's number.
        size: The number of ranks.
        traffic: By kind of exchange, as callers name it.
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        """Begin with no traffic."""
        self.traffic: dict[str, Traffic] = {}

    @property
    def first(self) -> bool:
        """Whether this is the rank that does what one alone may do."""
        return self.rank == 0

    def sum(self, values: "Tensor", kind: str) -> Pending:
        """Add up a tensor of all ranks, in place; every rank gets the same bits."""
        del kind
        return Pending(lambda: values)

    def exchange(
        self, sent: "Tensor", to_R: Sequence[int], from_R: Sequence[int], kind: str
    ) -> Pending:
        """Send each rank its part of a flat tensor, and get theirs, one behind the other.

        Args:
            sent: Elements for rank 0, then those for rank 1 ...
            to_R: The number of elements for each.
            from_R: The number of elements that come from each.
            kind: The kind that `traffic` counts it as.
        """
        del to_R, from_R, kind
        return Pending(lambda: sent)

    def from_first(self, data: bytes | None, kind: str) -> bytes:
        """Return what the first rank gives, on every rank; others give None."""
        del kind
        assert data is not None
        return data

    def gather(self, value: Any, kind: str = "words") -> list[Any]:
        """Return the JSON values that all ranks give, by rank, on every rank."""
        del kind
        return [value]

    def gather_bytes(self, data: bytes, kind: str) -> list[bytes]:
        """Return the bytes that all ranks give, by rank, on every rank."""
        del kind
        return [data]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Leave the block on all ranks or on none: what one raises, all raise.

        In the block nothing is exchanged, or those that did not fail would wait for ever.

        Raises:
            TrainerError: The error that another rank raised, by the same name where a text makes
                it, with the rank in the message.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        said = None if failure is None else [type(failure).__name__, str(failure)[:_MAX_WORDS]]
        words = self.gather(said)
        if failure is not None:
            raise failure
        for rank, each in enumerate(words):
            if each is not None:
                raise error_of(rank, each)


def check_same(channel: Channel, what: str, said: dict[str, Any]) -> None:
    """Refuse ranks that were started with different settings; the message names rank and setting.

    Args:
        channel: The channel of all ranks.
        what: Names what is compared.
        said: Values by name, as JSON has them.

    Raises:
        ConfigurationError: On every rank.
    """
    all_said = channel.gather(said)
    for rank, theirs in enumerate(all_said):
        for name in sorted({*all_said[0], *theirs}):
            mine, its = all_said[0].get(name), theirs.get(name)
            if mine != its:
                raise ConfigurationError(
                    f"rank {rank} has another {what} than rank 0: {name} is {its!r}, not {mine!r}; "
                    "start every rank with the same file and options"
                )


def error_of(rank: int, said: tuple[str, str]) -> TrainerError:
    """Return what another rank raised, by its name and text; the new text names the rank."""
    kind, text = said
    return _known_errors().get(kind, RankError)(f"rank {rank}: {text}")


def _known_errors(base: type[TrainerError] = TrainerError) -> dict[str, type[TrainerError]]:
    """Return every error of ours that a text alone makes, by name."""
    found = {base.__name__: base}
    for kind in base.__subclasses__():
        found |= _known_errors(kind)
    return {name: kind for name, kind in found.items() if kind.__init__ is Exception.__init__}


ALONE = Channel()
"""The channel of a run of one rank."""
