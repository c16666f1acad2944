"""An S3 server (moto's) that can be harmed; run by the Python of build/moto, which lacks ours.

    build/moto/bin/python tests/support/s3_server.py PORT

POST /harm with JSON: `methods` and `key` (a regular expression that is found in the path) say which
requests, `times` how many of them, `status` what they get in place of an answer; or `flip`, that
the middle byte of what they get is another; or `wait_s`, that they wait.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class Harmed:
    """A WSGI application before the real one."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._harm: dict[str, Any] = {}
        self._lock = threading.Lock()

    def _due(self, environ: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            harm = self._harm
            if not harm.get("times") or environ["REQUEST_METHOD"] not in harm["methods"]:
                return {}
            if not re.search(harm["key"], environ["PATH_INFO"]):
                return {}
            harm["times"] -= 1
            return harm

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/harm":
            size = int(environ.get("CONTENT_LENGTH") or 0)
            with self._lock:
                left = self._harm.get("times", 0)
                if size:
                    self._harm = json.loads(environ["wsgi.input"].read(size))
            start_response("200 OK", [])
            return [str(left).encode()]
        harm = self._due(environ)
        time.sleep(harm.get("wait_s", 0))
        if "status" in harm:
            start_response(f"{harm['status']} Harmed", [("Content-Length", "0")])
            return [b""]
        answer: Iterable[bytes] = self._server(environ, start_response)
        if not harm.get("flip"):
            return answer
        data = bytearray(b"".join(answer))
        if data:
            data[len(data) // 2] ^= 0x10
        return [bytes(data)]


def main() -> None:
    app = Harmed(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True)
    print("listening", flush=True)
    server.serve_forever()


main()
