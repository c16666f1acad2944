"""Sessions of visitors: each has a token of its own, a bounded life, and there are few of them."""

import dataclasses
import hmac
import secrets
import threading
import time
from collections.abc import Callable

from embertide.server.cli.control_client import Caller

SESSIONS_MAX = 64
LIFE_S = 8 * 3600.0
IDLE_S = 30 * 60.0


@dataclasses.dataclass(slots=True)
class Session:
    """A visitor who has logged in.

    Attributes:
        caller: Calls the control plane with the visitor's token.
        csrf: The token that every form of the session must carry.
        began_s: When it began, by the clock of `Sessions`.
        used_s: When a person asked for a page; pages that refresh themselves do not count.
        verified_s: When the control plane last took the token.
        refusal: Why the control plane does not take the token any more; empty: it does.
    """

    caller: Caller
    csrf: str
    began_s: float
    used_s: float
    verified_s: float
    refusal: str = ""

    def owns(self, form_csrf: str) -> bool:
        """Return whether a form is of this session."""
        return hmac.compare_digest(self.csrf.encode(), form_csrf.encode())


class Sessions:
    """The sessions by the values of their cookies. Thread-safe.

    Attributes:
        evicted: Sessions that ended early, as there were too many.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without any; `clock` counts seconds."""
        self.evicted = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}

    def open(self, caller: Caller) -> str:
        """Begin a session whose token the control plane has just taken; return its cookie."""
        cookie, now_s = secrets.token_urlsafe(32), self._clock()
        session = Session(caller, secrets.token_urlsafe(32), now_s, now_s, now_s)
        with self._lock:
            self._drop_old(now_s)
            while len(self._sessions) >= SESSIONS_MAX:
                oldest = min(self._sessions, key=lambda each: self._sessions[each].used_s)
                self._sessions.pop(oldest).caller.close()
                self.evicted += 1
            self._sessions[cookie] = session
        return cookie

    def find(self, cookie: str, *, by_person: bool) -> Session | None:
        """Return the session of a cookie; None: there is none, or it has ended.

        A page that a person asked for keeps it alive.
        """
        now_s = self._clock()
        with self._lock:
            self._drop_old(now_s)
            session = self._sessions.get(cookie)
            if session is not None and by_person:
                session.used_s = now_s
        return session

    def end(self, cookie: str) -> None:
        """End a session."""
        with self._lock:
            session = self._sessions.pop(cookie, None)
        if session is not None:
            session.caller.close()

    def end_session(self, session: Session) -> None:
        """End a session, whatever its cookie."""
        with self._lock:
            cookies = [cookie for cookie, each in self._sessions.items() if each is session]
        for cookie in cookies:
            self.end(cookie)

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            cookies = list(self._sessions)
        for cookie in cookies:
            self.end(cookie)

    def __len__(self) -> int:
        """Count them."""
        with self._lock:
            return len(self._sessions)

    def _drop_old(self, now_s: float) -> None:
        old = [
            cookie
            for cookie, each in self._sessions.items()
            if now_s - each.began_s > LIFE_S or now_s - each.used_s > IDLE_S
        ]
        for cookie in old:
            self._sessions.pop(cookie).caller.close()
