"""The two roles of Redis, started by a real server with the files of their manifests."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tls_redis import link_server
from waiting import wait_until

from bench.authority import Authority
from embertide._common.redis_url import client_of
from embertide.server.adapters.bus import Bus
from embertide.server.adapters.process import Child, free_ports
from embertide.v1 import update_pb2

ROOT = Path(__file__).resolve().parent.parent.parent
K8S = ROOT / "k8s"
RULES = re.compile(r"^\| (\w+) \| (bus|state) \| `(.*)` \|$", re.MULTILINE)
USERS = {"bus": ("trainer", "node", "control"), "state": ("node", "control")}


class Pod:
    """A Redis as its pod starts it, on the files that the pod sees, in a folder."""

    def __init__(self, folder: Path, role: str, *, closed: bool) -> None:
        """Lay its files out as the base does (closed), or as overlays/dev does, and start it."""
        self.folder, self.role, self.closed = folder, role, closed
        (self.port,) = free_ports(1)
        for name in ("data", "redis", "redis-tls", "redis-users"):
            (folder / name).mkdir()
        self.authority = Authority()
        self.authority.issue(folder / "redis-tls")
        self.make_users()
        layers = [K8S / "base" / "redis", *([] if closed else [K8S / "overlays/dev/redis"])]
        with (folder / "redis-users" / "users.acl").open("a") as users:
            users.write("user test on >test ~* +@all\n")
        for file in (file for layer in layers for file in layer.iterdir()):
            (folder / "redis" / file.name).write_text(self._here(file.read_text()))
        config = folder / "redis" / f"{role}.conf"
        command = [str(link_server(folder)), str(config), "--port", "0"]
        if not closed:
            command[-1] = str(self.port)
        self.process = Child(command, log=folder / "log")
        wait_until(lambda: "Ready to accept" in self.process.log_text())

    def _here(self, text: str) -> str:
        text = re.sub(r"/etc/(redis)", rf"{self.folder}/\1", text)
        text = text.replace("dir /data", f"dir {self.folder}/data")
        text = text.replace("redis-cli", f"redis-cli -p {self.port}")
        return text.replace("6379", str(self.port))

    def make_users(self) -> None:
        """Make users as new-overlay.sh does, with passwords that were not there before."""
        made = self.folder / "overlay"
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([str(K8S / "new-overlay.sh"), str(made)], check=True, timeout=60)
        shutil.copy(made / "secrets" / f"{self.role}.acl", self.folder / "redis-users/users.acl")
        shutil.copy(made / "secrets" / "redis-reload", self.folder / "redis-users/reload")

    def words(self, script: str, *words: str) -> list[str]:
        """The command line of one of its scripts, with Debian's redis-cli, which has TLS."""
        return ["env", "PATH=/usr/bin:/bin", "sh", str(self.folder / "redis" / script), *words]

    def reloader(self) -> Child:
        """Start the container beside it, five times a second."""
        return Child(self.words("reload.sh", "0.2"), log=self.folder / "reload.log")

    def keeper(self) -> redis.Redis:
        """Return a client who may do everything: the test's own."""
        if not self.closed:
            return client_of(f"redis://localhost:{self.port}")
        ca = f"ssl_ca_certs={self.folder}/redis-tls/ca.crt"
        return client_of(f"rediss://test:test@localhost:{self.port}?{ca}")

    def client(self, user: str) -> redis.Redis:
        """Return a client of one of ours, with the password of now."""
        return client_of(self.url(user))

    def url(self, user: str) -> str:
        """Return the URL that one of ours is given."""
        if not self.closed:
            return f"redis://localhost:{self.port}"
        password = self.folder / "overlay" / "secrets" / f"redis-{user}"
        query = f"password_file={password}&ssl_ca_certs={self.folder}/redis-tls/ca.crt"
        return f"rediss://{user}@localhost:{self.port}?{query}"


def said(child: Child, words: str, times: int = 1) -> Callable[[], bool]:
    """Whether a process has said something so many times."""
    return lambda: child.log_text().count(words) >= times


@pytest.fixture
def pod(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pod]:
    role, closed = request.param
    made = Pod(tmp_path, role, closed=closed)
    yield made
    made.process.stop()


def pods(role: str) -> pytest.MarkDecorator:
    """A test of a role, closed as in the base and open as in overlays/dev."""
    ids = [f"{role} closed", f"{role} open"]
    return pytest.mark.parametrize("pod", [(role, True), (role, False)], ids=ids, indirect=True)


@pods("bus")
def test_the_bus_writes_nothing_and_refuses_when_full(pod: Pod) -> None:
    with pod.client("trainer") as trainer, pod.keeper() as keeper:
        said = keeper.config_get()
        assert (said["save"], said["appendonly"]) == ("", "no")
        assert said["maxmemory-policy"] == "noeviction"
        assert said["maxmemory"] == str(2 << 30)
        trainer.xadd("e:{news}:versions", {"m": "x"})
        keeper.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            trainer.xadd("e:{news}:versions", {"m": "x"})
        assert trainer.exists("e:{news}:versions")
    assert not list((pod.folder / "data").iterdir())


@pods("bus")
def test_the_control_plane_reads_the_bus_and_writes_orders_alone(pod: Pod) -> None:
    commit = update_pb2.GlobalCommit(version=update_pb2.Version(number=3, lineage=1))
    with pod.client("trainer") as trainer:
        trainer.xadd("e:{news:commit}:log", {"m": commit.SerializeToString()}, id="3-1")
    bus = Bus(pod.url("control"), "news")
    news = bus.news(0, 0)
    assert [each.version.number for each in news.commits] == [3]
    assert news.bus is not None
    assert news.bus.used_bytes > 0
    bus.order_rollback(update_pb2.RollbackOrder(id="one", version=2))
    order = bus.rollback().order
    assert order is not None
    assert order.id == "one"
    bus.close()
    if pod.closed:
        with pod.client("control") as control:
            for key in ("lineage", "promoted", "rolled_back", "trainer"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    control.set(f"e:{{news:commit}}:{key}", "1")
            with pytest.raises(redis.exceptions.NoPermissionError):
                control.delete("e:{news:commit}:log")


@pods("state")
def test_the_state_is_written_before_it_is_acknowledged(pod: Pod) -> None:
    with pod.client("control") as control, pod.keeper() as keeper:
        said = keeper.config_get()
        assert (said["appendonly"], said["appendfsync"]) == ("yes", "always")
        assert said["maxmemory-policy"] == "noeviction"
        assert said["maxmemory"] == str(256 << 20)
        control.set("c:{news}:epoch", "1")
    assert list((pod.folder / "data").rglob("*.aof"))


@pods("bus")
def test_a_probe_finds_a_redis_that_answers_and_one_that_does_not(pod: Pod) -> None:
    probe = pod.words("probe.sh")
    assert subprocess.run(probe, check=False, timeout=10).returncode == 0
    pod.process.stop()
    assert subprocess.run(probe, check=False, timeout=10).returncode != 0


@pytest.mark.parametrize("pod", [("bus", True), ("state", True)], ids=USERS, indirect=True)
def test_a_stranger_may_do_nothing_and_the_probe_ping_alone(pod: Pod) -> None:
    for user in USERS[pod.role]:
        with pod.client(user) as ours:
            assert ours.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                ours.config_get("dir")
    ca = f"ssl_ca_certs={pod.folder}/redis-tls/ca.crt"
    stranger = client_of(f"rediss://localhost:{pod.port}?{ca}")
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.get("e:x")
    with client_of(f"rediss://probe:none@localhost:{pod.port}?{ca}") as probe:
        assert probe.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            probe.get("e:x")
    plain = client_of(f"redis://localhost:{pod.port}")
    with plain, pytest.raises(redis.ConnectionError):
        plain.ping()


@pytest.mark.parametrize("pod", [("bus", True)], ids=["closed"], indirect=True)
def test_new_users_and_certificates_hold_without_a_restart(pod: Pod) -> None:
    """Even of another authority, and for one whose password changed twice in a row."""
    with pod.reloader() as reloader:
        wait_until(said(reloader, "have been read"))
        for turn in (1, 2):
            old = pod.folder / "old"
            shutil.rmtree(old, ignore_errors=True)
            shutil.copytree(pod.folder / "overlay" / "secrets", old)
            pod.make_users()
            Authority().issue(pod.folder / "redis-tls")
            wait_until(said(reloader, "have been read", turn + 1))
            with pod.client("node") as node:
                assert node.ping()
            query = f"password_file={old}/redis-node&ssl_ca_certs={pod.folder}/redis-tls/ca.crt"
            before = client_of(f"rediss://node@localhost:{pod.port}?{query}")
            with before, pytest.raises(redis.AuthenticationError):
                before.ping()
        assert pod.process.alive()
        began = time.monotonic()
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("pod", [("bus", True)], ids=["closed"], indirect=True)
def test_what_redis_cannot_read_leaves_what_was_there(pod: Pod) -> None:
    with pod.reloader() as reloader:
        wait_until(said(reloader, "have been read"))
        users = pod.folder / "redis-users" / "users.acl"
        good = users.read_text()
        users.write_text(good + "user x on +nothing\n")
        wait_until(said(reloader, "could not be read"))
        assert "nothing" in reloader.log_text()
        with pod.client("node") as node:
            assert node.ping()
        users.write_text(good + "\n")
        wait_until(said(reloader, "have been read", 2))


def test_the_rules_are_those_of_the_page() -> None:
    page = {
        (user, role): rule
        for user, role, rule in RULES.findall((ROOT / "docs/security.md").read_text())
    }
    script = (K8S / "new-overlay.sh").read_text()
    for role, users in USERS.items():
        (part,) = re.findall(rf"((?:  user .*\n)+)}} >\"\$folder/secrets/{role}.acl\"", script)
        said = dict(re.findall(r"  user (\w+) '(.*)'", part))
        assert said == {user: page[user, role] for user in users}
    assert len(page) == sum(map(len, USERS.values()))


def test_an_overlay_is_made_once_and_read_by_its_owner_alone(tmp_path: Path) -> None:
    script, place = str(K8S / "new-overlay.sh"), tmp_path / "mine"
    subprocess.run([script, str(place), "registry.example.org/embertide"], check=True, timeout=60)
    files = [place, *place.rglob("*")]
    assert {file.stat().st_mode & 0o077 for file in files} == {0}
    assert (
        "newName: registry.example.org/embertide/node" in (place / "kustomization.yaml").read_text()
    )
    before = (place / "secrets" / "tokens").read_text()
    again = subprocess.run(
        [script, str(place)], capture_output=True, text=True, check=False, timeout=60
    )
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert (place / "secrets" / "tokens").read_text() == before
    assert subprocess.run([script], capture_output=True, check=False, timeout=60).returncode == 2
