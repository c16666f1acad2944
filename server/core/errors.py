"""Refusals of the control plane: a code that says what kind, a message that says what and why."""

import enum


class Code(enum.Enum):
    """Kinds of refusal; each is the gRPC code of the same name."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAVAILABLE = "UNAVAILABLE"
    ABORTED = "ABORTED"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


class RefusedError(Exception):
    """A request is not done, and nothing has changed."""

    def __init__(self, code: Code, message: str) -> None:
        """Keep the kind and the words."""
        super().__init__(message)
        self.code = code
        self.message = message


class MovedOnError(RefusedError):
    """The plan moved on while a planner was at it: what it found is of another plan."""

    def __init__(self, message: str) -> None:
        """Say from which to which."""
        super().__init__(Code.FAILED_PRECONDITION, message)


class StateUnavailableError(RefusedError):
    """The `state` Redis cannot be reached, so what was decided may not have been written."""

    def __init__(self, reason: str) -> None:
        """Say why."""
        super().__init__(Code.UNAVAILABLE, f"the state store fails: {reason}")


class StateNotRestoredError(StateUnavailableError):
    """The `state` Redis lost its keys, and what was in it cannot be written again yet."""

    def __init__(self, why: str) -> None:
        """Say what is waited for."""
        RefusedError.__init__(
            self, Code.UNAVAILABLE, f"state Redis lost its keys, and is not restored yet: {why}"
        )


class SupersededError(RefusedError):
    """Another control plane has taken a higher term, or moved the epoch on."""

    def __init__(self, message: str) -> None:
        """Say who."""
        super().__init__(Code.ABORTED, f"another control plane took over: {message}")


class StateLostError(RefusedError):
    """The `state` Redis answers, and what this control plane wrote is not there any more."""

    def __init__(self, message: str) -> None:
        """Say what is missing."""
        super().__init__(
            Code.ABORTED,
            f"state Redis lost its keys: {message}; look whether it was flushed, evicts keys, or "
            "was started without its AOF",
        )


def invalid(message: str) -> RefusedError:
    """Return a refusal of a wrong value."""
    return RefusedError(Code.INVALID_ARGUMENT, message)
