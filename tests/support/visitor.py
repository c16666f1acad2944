"""A browser's part in tests of the console: pages by HTTP, cookies, forms, and pages in parts."""

import http.client
import http.cookies
import ssl
import urllib.parse
from html.parser import HTMLParser
from typing import NamedTuple


class Page(HTMLParser):
    """A page in parts.

    Attributes:
        tags: Each tag with the names of its attributes.
        attributes: Each tag with its attributes.
        inline: The contents of script and style elements.
        shown: Its text.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.attributes: list[tuple[str, dict[str, str]]] = []
        self.inline = self.shown = ""
        self._within = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.attributes.append((tag, {name: value or "" for name, value in attrs}))
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within in ("script", "style"):
            self.inline += data
        self.shown += data

    def fields(self, action: str) -> dict[str, str]:
        """The named inputs of the first form of an action, with their values."""
        found: dict[str, str] = {}
        within = False
        for tag, each in self.attributes:
            if tag == "form":
                if within:
                    break
                within = each.get("action") == action
            elif within and tag == "input" and "name" in each:
                found[each["name"]] = each.get("value", "")
        return found


class Answer(NamedTuple):
    """An answer of the console."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def page(self) -> Page:
        return Page(self.text)


class Visitor:
    """Asks one console, and keeps its cookies."""

    def __init__(self, address: str, https: ssl.SSLContext | None = None) -> None:
        self.cookies: dict[str, str] = {}
        self.set_cookies: list[str] = []
        self._address = address
        self._https = https

    def get(self, path: str, **headers: str) -> Answer:
        return self._ask("GET", path, None, headers)

    def post(self, path: str, fields: dict[str, str], **headers: str) -> Answer:
        body = urllib.parse.urlencode(fields).encode()
        kind = {"content-type": "application/x-www-form-urlencoded"}
        return self._ask("POST", path, body, {**kind, **headers})

    def log_in(self, token: str = "") -> Answer:
        fields = self.get("/login").page.fields("/login")
        return self.post("/login", {**fields, "token": token})

    def send(self, path: str, **fields: str) -> Answer:
        """Send a form of the session."""
        csrf = self.get("/operations").page.fields("/logout")["csrf"]
        return self.post(path, {"csrf": csrf, **fields})

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        host, _, port = self._address.rpartition(":")
        connection = (
            http.client.HTTPSConnection(host, int(port), timeout=30, context=self._https)
            if self._https is not None
            else http.client.HTTPConnection(host, int(port), timeout=30)
        )
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookies:
            told["cookie"] = "; ".join(f"{name}={each}" for name, each in self.cookies.items())
        try:
            connection.request(method, path, body, told)
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        self.set_cookies = [value for name, value in reply.getheaders() if name == "set-cookie"]
        for each in self.set_cookies:
            for name, morsel in http.cookies.SimpleCookie(each).items():
                if morsel["max-age"] == "0":
                    self.cookies.pop(name, None)
                else:
                    self.cookies[name] = morsel.value
        return Answer(reply.status, {name.lower(): v for name, v in reply.getheaders()}, text)
