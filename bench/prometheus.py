"""A real Prometheus over a fleet of chaos: the rules and the scrape configuration that users get.

`make build/.prometheus` brings the program, Debian's, without installing it.
"""

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from bench.servers import BUILD, ROOT, BenchError
from embertide.server.adapters.process import Child, free_ports

FOLDER = BUILD / "prometheus" / "usr" / "bin"
RULES = ROOT / "k8s" / "monitoring" / "embertide.rules.yml"
_JOBS = {"node": "embertide-node", "control": "embertide-control", "trainer": "embertide-train"}
_TIMEOUT_S = 10.0


def program(name: str) -> Path:
    """Return `prometheus` or `promtool`.

    Raises:
        BenchError: It was not brought here.
    """
    path = FOLDER / name
    if not path.exists():
        raise BenchError(f"{path} is missing: run `make build/.prometheus`")
    return path


def configuration() -> dict[str, Any]:
    """Return the configuration that docs/monitoring.md shows."""
    page = (ROOT / "docs" / "monitoring.md").read_text()
    (text,) = re.findall(r"```yaml\n# prometheus.yml\n(.*?)```", page, re.S)
    made: dict[str, Any] = yaml.safe_load(text)
    return made


class Prometheus:
    """Scrapes the pages of a fleet's processes, by their names. A context manager that ends it.

    It ends with the thread that started it.
    """

    def __init__(self, pages: Mapping[str, str], folder: Path) -> None:
        """Start it; `ready` says when it answers."""
        config = configuration()
        config["rule_files"] = [str(RULES)]
        for job in config["scrape_configs"]:
            targets = [
                address
                for name, address in pages.items()
                if _JOBS[name.split("-")[0]] == job["job_name"]
            ]
            job["static_configs"] = [{"targets": targets}]
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        self._address = f"127.0.0.1:{port}"
        words = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
        words += [f"--web.listen-address={self._address}", "--log.level=warn"]
        self.process = Child([str(program("prometheus")), *words], log=folder / "prometheus.log")

    def _get(self, path: str, **parameters: str) -> Any:
        asked = urllib.parse.urlencode(parameters)
        url = f"http://{self._address}/{path}?{asked}"
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)["data"]

    def ready(self) -> bool:
        """Return whether it answers."""
        try:
            self._get("api/v1/status/runtimeinfo")
        except OSError:
            return False
        return True

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression has now."""
        found: list[dict[str, Any]] = self._get("api/v1/query", query=expression)["result"]
        return found

    def alerts(self, *states: str) -> dict[str, str]:
        """Return the alerts in any of these states, or in any, each with when it began to hold."""
        return {
            each["labels"]["alertname"]: each["activeAt"]
            for each in self._get("api/v1/alerts")["alerts"]
            if each["state"] in states or not states
        }

    def firing(self) -> dict[str, str]:
        """Return the alerts that fire, each with when it began to hold."""
        return self.alerts("firing")

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self.process.stop()
