"""The console's guards: hosts, forms, sessions, tokens; and what every answer forbids."""

import ssl
from pathlib import Path

import pytest
from commands import embertide
from consoles import PATHS, made, served
from made_fleet import MadeFleet, answers
from visitor import Visitor
from waiting import wait_until

from bench.authority import Authority
from embertide.server.adapters.process import UsageError
from embertide.server.adapters.tls import TlsError
from embertide.server.console import source
from embertide.server.console.command import hosts_of
from embertide.server.console.server import HttpsFolder, check_listen
from embertide.server.console.sessions import IDLE_S, LIFE_S, SESSIONS_MAX, Sessions
from embertide.server.services.listening import ListenError


def test_every_answer_forbids_frames_and_scripts_of_elsewhere() -> None:
    with made(answers()) as (there, _):
        visitor = there.visitor("")
        for path in (*PATHS, "/nowhere", "/static/console.js", "/series/heat", "/login"):
            headers = visitor.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-cache" if "static" in path else "no-store"
        assert "server" not in visitor.get("/").headers


def test_another_name_for_this_address_is_refused() -> None:
    with made(answers()) as (there, _):
        visitor = there.visitor("")
        for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", ""):
            refused = visitor.get("/", host=name)
            assert refused.status == 421
            assert "start it with --host NAME" in refused.text
        port = there.address.rpartition(":")[2]
        for name in (f"localhost:{port}", f"LOCALHOST.:{port}", f"[::1]:{port}"):
            assert visitor.get("/", host=name).status == 200


def test_a_form_of_elsewhere_is_refused() -> None:
    with made(answers()) as (there, fleet):
        visitor = there.visitor("")
        steering = {"operation": "move-1", "steering": "pause"}
        assert visitor.post("/operations/steer", steering).status == 403
        assert visitor.post("/operations/steer", {**steering, "csrf": "guessed"}).status == 403
        other = there.visitor("")
        csrf = other.get("/operations").page.fields("/logout")["csrf"]
        assert visitor.post("/operations/steer", {**steering, "csrf": csrf}).status == 403
        own = {**steering, "csrf": visitor.get("/").page.fields("/logout")["csrf"]}
        for headers in ({"origin": "https://evil.example"}, {"sec_fetch_site": "cross-site"}):
            assert visitor.post("/operations/steer", own, **headers).status == 403
        assert "SteerOperation" not in fleet.calls
        assert visitor.post("/login", {"token": "", "csrf": "guessed"}).status == 403
        assert Visitor(there.address).post("/logout", own).headers["location"] == "/login"


def test_a_form_is_bounded() -> None:
    with made(answers()) as (there, _):
        visitor = there.visitor("")
        assert visitor.post("/login", {"token": "t" * 20_000}).status == 413
        assert visitor.post("/login", {str(at): "" for at in range(99)}).status == 400
        assert visitor.post("/login", {}, content_type="text/plain").status == 415
        assert visitor.log_in("t" * 5000).status == 400
        assert visitor.log_in("two\nlines").status == 400


def test_a_cookie_is_for_the_browser_alone() -> None:
    with made(answers()) as (there, _):
        visitor = there.visitor("")
        cookie = next(each for each in visitor.set_cookies if each.startswith("embertide="))
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert visitor.get("/").status == 200
        stolen = visitor.cookies["embertide"]
        assert visitor.send("/logout").status == 303
        visitor.cookies["embertide"] = stolen
        assert visitor.get("/").headers["location"] == "/login"


def test_nobody_sees_anything_without_a_session() -> None:
    with made(answers()) as (there, fleet):
        stranger = there.visitor()
        for path in PATHS:
            assert stranger.get(path).headers["location"] == "/login"
            live = stranger.get(path, hx_request="true")
            assert (live.status, live.headers["hx-redirect"], live.text) == (401, "/login", "")
        for path in ("/series/heat", "/series/freshness"):
            assert stranger.get(path).status == 401
        assert fleet.calls == []


def test_a_token_that_is_not_known_opens_nothing() -> None:
    with made(answers(), open=False, role="reader") as (there, _):
        refused = there.visitor().log_in("wrong")
        assert refused.status == 403
        assert "the token is not known here" in refused.text
        assert there.visitor().log_in("").status == 403
        assert there.console.refused_logins == 2
        visitor = there.visitor("good")
        assert "role reader" in visitor.get("/").text
        assert "Start an operation" not in visitor.get("/operations").text


def test_a_token_that_is_withdrawn_ends_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "VERIFY_S", 0.0)
    with made(answers(), open=False) as (there, fleet):
        visitor, other = there.visitor("good"), there.visitor("also good")
        assert visitor.get("/").status == other.get("/").status == 200
        fleet.tokens.remove("good")
        wait_until(lambda: visitor.get("/").status == 303)
        assert visitor.get("/").headers["location"] == "/login"
        assert other.get("/").status == 200


def test_a_certificate_of_the_console_lends_nobody_its_role() -> None:
    fleet = MadeFleet(answers(), role="operator")

    def dial(token: str | None) -> object:
        caller = fleet.dial(token)
        caller.open = False  # the control plane asks for tokens, or for certificates
        return caller

    with served(dial) as there:
        refused = there.visitor().log_in("whatever")
        assert refused.status == 403
        assert "certificate has a role" in refused.text


class _Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_session_ends_when_it_is_old_or_unused() -> None:
    clock = _Clock()
    sessions = Sessions(clock)
    caller = MadeFleet(answers()).dial("")
    cookie = sessions.open(caller)
    clock.now_s += IDLE_S - 1
    assert sessions.find(cookie, by_person=False) is not None  # a page that refreshes itself
    clock.now_s += 2
    assert sessions.find(cookie, by_person=False) is None
    cookie = sessions.open(caller)
    began_s = clock.now_s
    while clock.now_s < began_s + LIFE_S - IDLE_S:
        clock.now_s += IDLE_S / 2
        assert sessions.find(cookie, by_person=True) is not None
    clock.now_s = began_s + LIFE_S + 1
    assert sessions.find(cookie, by_person=True) is None
    assert len(sessions) == 0


def test_sessions_are_few_and_the_least_used_makes_room() -> None:
    clock = _Clock()
    sessions = Sessions(clock)
    caller = MadeFleet(answers()).dial("")
    cookies = []
    for _ in range(SESSIONS_MAX):
        clock.now_s += 1
        cookies.append(sessions.open(caller))
    clock.now_s += 1
    assert sessions.find(cookies[0], by_person=True) is not None
    sessions.open(caller)
    assert (len(sessions), sessions.evicted) == (SESSIONS_MAX, 1)
    assert sessions.find(cookies[0], by_person=True) is not None
    assert sessions.find(cookies[1], by_person=True) is None


def test_it_listens_to_others_by_tls_or_where_that_is_said(tmp_path: Path) -> None:
    check_listen("127.0.0.1:7080", None, plaintext=False)
    check_listen("10.0.0.1:7080", None, plaintext=True)
    check_listen("10.0.0.1:7080", tmp_path, plaintext=False)
    with pytest.raises(ListenError, match="give --https with a folder"):
        check_listen("10.0.0.1:7080", None, plaintext=False)
    refused = embertide("console", "--listen", "10.0.0.1:7080")
    assert refused.exit_code == 1
    assert "10.0.0.1:7080 would be plain HTTP" in refused.stderr
    far = embertide("console", "--control", "control.example:7070")
    assert far.exit_code == 2
    assert "the token would be sent in plain text to control.example:7070" in far.stderr
    with pytest.raises(UsageError, match="give --host NAME"):
        hosts_of("0.0.0.0:7080", [])
    assert "fleet.example" in hosts_of("0.0.0.0:7080", ["Fleet.example"])
    assert hosts_of("10.0.0.1:7080", []) == {"10.0.0.1"}
    with pytest.raises(TlsError, match=r"tls.crt"):
        HttpsFolder(tmp_path)


def test_browsers_come_by_tls(tmp_path: Path) -> None:
    folder = Authority("ours").issue(tmp_path / "https")
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    certificate = HttpsFolder(folder)
    with served(MadeFleet(answers()).dial, https=certificate) as there:
        visitor = Visitor(there.address, context)
        assert visitor.log_in().status == 303
        cookie = next(each for each in visitor.set_cookies if "__Host-embertide=" in each)
        assert "Secure" in cookie
        page = visitor.get("/")
        assert (page.status, page.headers["strict-transport-security"]) == (200, "max-age=31536000")
        (folder / "tls.crt").write_text("no certificate")
        certificate.look()
        assert certificate.refused >= 1
        assert visitor.get("/").status == 200
