"""The routes of the console: pages, their live parts, logging in, and forms of operators."""

import dataclasses
import hmac
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from embertide.server.cli.control_client import Caller, CallError
from embertide.server.console import actions, sizing, views
from embertide.server.console.doors import Doors, FormError, read_form
from embertide.server.console.sessions import LIFE_S, Session, Sessions
from embertide.server.console.source import REFUSED, Source
from embertide.server.core.drift.options import MODES
from embertide.server.core.plan.planners import PLANNERS
from embertide.server.pages.rendering import STATIC, environment
from embertide.v1 import control_pb2

_HERE = Path(__file__).parent
_LOGINS_AT_ONCE = 8
_TOKEN_LETTERS_MAX = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConsoleOptions:
    """How a console is reached, and whom it asks.

    Attributes:
        control: Address of the control plane, for people.
        dial: Makes a caller of it with a token; None: without one.
        hosts: Names that browsers may use for the console, without ports.
        https: Whether they come by TLS.
    """

    control: str
    dial: Callable[[str | None], Caller]
    hosts: Collection[str] = ("localhost", "127.0.0.1", "::1")
    https: bool = False


class Console:
    """The pages of one control plane. Thread-safe.

    Attributes:
        app: The ASGI application.
        sessions: Who is logged in.
        source: The source of the control plane's last answers.
        refused_logins: Tokens that it did not take.
    """

    def __init__(self, options: ConsoleOptions, source: Source | None = None) -> None:
        """Take the options; nobody is asked before somebody logs in."""
        self.sessions = Sessions()
        self.source = source if source is not None else Source()
        self.refused_logins = 0
        self._options = options
        self._templates = environment(_HERE / "templates")
        self._secret = secrets.token_bytes(32)
        self._logging_in = 0
        self._cookie = "__Host-embertide" if options.https else "embertide"
        pages = [
            Route(path, self._page(name), methods=["GET"], name=name)
            for name, (path, _, _) in views.VIEWS.items()
        ]
        self.app: ASGIApp = Doors(
            Starlette(
                routes=[
                    *pages,
                    Route("/sizing", self._sizing, methods=["GET"]),
                    Route("/login", self._login_page, methods=["GET"]),
                    Route("/login", self._login, methods=["POST"]),
                    Route("/logout", self._form(self._log_out), methods=["POST"]),
                    Route("/series/freshness", self._series, methods=["GET"]),
                    Route("/series/heat", self._heat, methods=["GET"]),
                    Route("/operations/preview", self._form(self._preview), methods=["POST"]),
                    Route("/operations/start", self._form(self._start), methods=["POST"]),
                    Route("/operations/steer", self._form(self._steer), methods=["POST"]),
                    Route("/drift/set", self._form(self._set_drift), methods=["POST"]),
                    Route("/versions/rollback", self._form(self._roll_back), methods=["POST"]),
                    Mount("/static", _Static(directory=STATIC)),
                ],
                exception_handlers={404: self._not_found, FormError: self._bad_form},
            ),
            hosts=frozenset(each.lower() for each in options.hosts),
            https=options.https,
        )

    def close(self) -> None:
        """End all sessions, and ask no more."""
        self.source.close()
        self.sessions.close()

    # Who asks.

    def _session(self, request: Request) -> Session | None:
        cookie = request.cookies.get(self._cookie, "")
        session = self.sessions.find(cookie, by_person="hx-request" not in request.headers)
        if session is not None and session.refusal:
            self.sessions.end(cookie)
            return None
        return session

    @staticmethod
    def _to_login(request: Request) -> Response:
        """Send a visitor without a session to the form; a page that refreshes itself goes there."""
        if "hx-request" in request.headers or request.url.path.startswith("/series/"):
            return Response(status_code=401, headers={"hx-redirect": "/login"})
        return RedirectResponse("/login", 303)

    def _render(self, name: str, status: int = 200, **context: Any) -> HTMLResponse:
        shared = {
            "views": [(key, path, title) for key, (path, title, _) in views.VIEWS.items()],
            "control_address": self._options.control,
            "now_ms": time.time() * 1000,
        }
        page = self._templates.get_template(name).render(**shared, **context)
        return HTMLResponse(page, status)

    # Pages.

    def _page(self, name: str) -> Callable[[Request], Response]:
        _, title, make = views.VIEWS[name]

        def answer(request: Request) -> Response:
            session = self._session(request)
            if session is None:
                return self._to_login(request)
            reading, problem = self.source.look(session)
            if session.refusal:
                return self._to_login(request)
            context = self._frame(session, name, title)
            url = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            if reading is None:
                return self._render("nothing.html", 503, problem=problem, url=url, **context)
            query = dict(request.query_params)
            return self._render(
                f"{name}.html",
                problem=problem,
                at_ms=reading.answers.at_ms,
                url=url,
                **context,
                **make(reading, query, self.source),
            )

        return answer

    def _sizing(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return self._to_login(request)
        page = sizing.page(dict(request.query_params))
        status = 400 if page["problem"] else 200
        return self._render(
            "sizing.html", status, **self._frame(session, "sizing", "Sizing"), **page
        )

    def _frame(self, session: Session, name: str, title: str) -> dict[str, Any]:
        """Return what every page of a session shows around its own part."""
        return {
            "view": name,
            "title": title,
            "csrf": session.csrf,
            "role": session.caller.role,
            "may_act": session.caller.role in ("operator", "open", ""),
            "is_open": session.caller.open,
            "planners": list(PLANNERS),
            "modes": list(MODES),
        }

    def _series(self, request: Request) -> Response:
        if self._session(request) is None:
            return self._to_login(request)
        return JSONResponse(self.source.history.columns())

    def _heat(self, request: Request) -> Response:
        if self._session(request) is None:
            return self._to_login(request)
        query = request.query_params
        return JSONResponse(
            self.source.heat.facts(query.get("table", ""), query.get("kind", "reads"))
        )

    def _not_found(self, request: Request, error: Exception) -> Response:
        return self._render(
            "message.html", 404, title="No such page", text="There is no such page here."
        )

    def _bad_form(self, request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, FormError) else 400
        return self._render("message.html", status, title="Refused", text=str(error))

    # Logging in. The form carries a proof of a cookie that it came with.

    def _proof(self, nonce: str) -> str:
        return hmac.new(self._secret, nonce.encode(), "sha256").hexdigest()

    def _login_page(self, request: Request, error: str = "", status: int = 200) -> Response:
        nonce = secrets.token_urlsafe(16)
        page = self._render(
            "login.html", status, title="Log in", error=error, csrf=self._proof(nonce)
        )
        self._set_cookie(page, f"{self._cookie}-login", nonce, 3600)
        return page

    def _set_cookie(self, answer: Response, name: str, value: str, life_s: float) -> None:
        answer.set_cookie(
            name,
            value,
            max_age=round(life_s),
            path="/",
            secure=self._options.https,
            httponly=True,
            samesite="strict",
        )

    async def _login(self, request: Request) -> Response:
        form = await read_form(request)
        nonce = request.cookies.get(f"{self._cookie}-login", "")
        if not nonce or not hmac.compare_digest(
            self._proof(nonce).encode(), form.get("csrf", "").encode()
        ):
            return self._login_page(request, "the form was too old: send it once more", 403)
        token = form.get("token", "").strip()
        if len(token) > _TOKEN_LETTERS_MAX or not token.isascii() or not token.isprintable():
            return self._login_page(request, "that is no token: paste what your file holds", 400)
        if self._logging_in >= _LOGINS_AT_ONCE:
            return self._login_page(request, "too many log in at once: try again", 503)
        self._logging_in += 1
        try:
            caller, error = await run_in_threadpool(self._admit, token)
        finally:
            self._logging_in -= 1
        if caller is None:
            self.refused_logins += 1
            return self._login_page(request, error, 403)
        self.sessions.end(request.cookies.get(self._cookie, ""))
        answer = RedirectResponse("/", 303)
        self._set_cookie(answer, self._cookie, self.sessions.open(caller), LIFE_S)
        return answer

    def _admit(self, token: str) -> tuple[Caller | None, str]:
        """Return a caller whose token the control plane takes, or why there is none."""
        request = control_pb2.ListOperationsRequest(page_size=1)
        nobody = self._options.dial(None)
        try:
            nobody.call("ListOperations", request)
            if not nobody.open:
                # Else whoever reaches the console would have the role of its certificate.
                return None, (
                    "the console's own certificate has a role at the control plane: give it one "
                    "without a role"
                )
        except CallError as error:
            if error.code not in REFUSED:
                return None, str(error)
        finally:
            nobody.close()
        caller = self._options.dial(token or None)
        try:
            caller.call("ListOperations", request)
        except CallError as error:
            caller.close()
            return None, str(error)
        return caller, ""

    # Forms.

    def _form(self, act: Callable[[Session, Mapping[str, str]], Response]) -> Any:
        """Return an endpoint for a form of somebody who is logged in."""

        async def answer(request: Request) -> Response:
            form = await read_form(request)
            session = self._session(request)
            if session is None:
                return self._to_login(request)
            if not session.owns(form.get("csrf", "")):
                raise FormError(403, "the form is not of this session: open the page anew")
            try:
                return await run_in_threadpool(act, session, form)
            except (actions.FieldError, CallError) as error:
                status = 400 if isinstance(error, actions.FieldError) else 502
                if isinstance(error, CallError) and error.code in REFUSED:
                    status = 403
                view = request.url.path.split("/")[1]
                frame = self._frame(session, view, "Refused")
                return self._render("refused.html", status, error=str(error), **frame)

        return answer

    def _log_out(self, session: Session, form: Mapping[str, str]) -> Response:
        self.sessions.end_session(session)
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(
            self._cookie, secure=self._options.https, httponly=True, samesite="strict"
        )
        return answer

    def _preview(self, session: Session, form: Mapping[str, str]) -> Response:
        return self._previewed(session, form, "")

    def _previewed(self, session: Session, form: Mapping[str, str], notice: str) -> Response:
        preview = actions.ask(session.caller, form, dry_run=True)
        frame = self._frame(session, "operations", "Preview")
        return self._render("preview.html", preview=preview, started=False, notice=notice, **frame)

    def _start(self, session: Session, form: Mapping[str, str]) -> Response:
        if actions.is_started(session.caller, form):  # the button was pressed twice
            return RedirectResponse("/operations", 303)
        if str(session.caller.plan().epoch) != form.get("epoch", ""):
            notice = "The plan has moved on since the preview: this is the preview by the new one."
            return self._previewed(session, form, notice)
        preview = actions.ask(session.caller, form, dry_run=False)
        self.source.forget_age()
        frame = self._frame(session, "operations", "Started")
        return self._render("preview.html", preview=preview, started=True, notice="", **frame)

    def _set_drift(self, session: Session, form: Mapping[str, str]) -> Response:
        change = actions.settings_change(session.caller, form)
        if form.get("confirmed") != "yes":
            frame = self._frame(session, "drift", "Treatment of drift")
            return self._render("drift_set.html", change=change, **frame)
        actions.set_drift(session.caller, change)
        self.source.forget_age()
        return RedirectResponse("/drift", 303)

    def _roll_back(self, session: Session, form: Mapping[str, str]) -> Response:
        confirmed = form.get("confirmed") == "yes"
        preview = actions.roll_back(session.caller, form, dry_run=not confirmed)
        if not confirmed:
            frame = self._frame(session, "versions", "Go back")
            return self._render("rollback.html", preview=preview, **frame)
        self.source.forget_age()
        return RedirectResponse("/versions", 303)

    def _steer(self, session: Session, form: Mapping[str, str]) -> Response:
        id, steering = form.get("operation", ""), form.get("steering", "")
        if steering == "abort" and form.get("confirmed") != "yes":
            frame = self._frame(session, "operations", "Abort")
            return self._render("abort.html", operation=id, **frame)
        actions.steer(session.caller, id, steering)
        self.source.forget_age()
        return RedirectResponse("/operations", 303)


class _Static(StaticFiles):
    """Our own files and vendored ones; a browser asks again whether they have changed."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        answer = super().file_response(*arguments, **options)
        answer.headers["cache-control"] = "no-cache"
        return answer
