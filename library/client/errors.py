"""Errors that a call of the client may raise."""

from typing import Self


class ClientError(RuntimeError):
    """A call failed; the message says of which model, where, and why.

    Attributes:
        trace: Trace-id of the call's requests; None: they carried none.
    """

    trace: str | None = None


class InputError(ClientError, ValueError):
    """An input cannot be sent; the message names the feature, the row and the value.

    Nothing was sent.
    """


class RefusedError(ClientError):
    """The node refused a request; to send it again is of no use."""


class VersionGoneError(ClientError):
    """The node does not hold the version that was asked for; the message has the range it holds."""


class DeadlineError(ClientError):
    """The time was up before all answers were there."""


class UnavailableError(ClientError):
    """No endpoint answered, however often they were asked.

    Attributes:
        tries: Times that the request was sent.
    """

    tries = 1

    def after(self, tries: int) -> Self:
        """Note how often it was tried."""
        self.tries = tries
        return self


class DegradedError(UnavailableError):
    """More of a request's keys than `max_degraded_share` allows have no owner that answers."""
