"""Operations of the control plane: they move buckets, and outlive a control plane that is lost."""

import time

from acceptance.site import Site
from bench.cluster import Json, RefusedError, wait_until


def buckets(site: Site) -> dict[str, int]:
    """Buckets by node."""
    found: dict[str, int] = {}
    for each in site.status()["devices"]:
        node = each["device"].rsplit("/", 1)[0]
        found[node] = found.get(node, 0) + each["buckets"] + each["moving"]
    return found


def operation(site: Site, id: str) -> Json:
    """Return an operation as the control plane reports it, once it can be asked."""
    found: list[Json] = []

    def listed() -> bool:
        try:
            said = site.embertide("reshard", "list", role="reader")
        except RefusedError:
            return False
        found.extend(each for each in said["operations"] if each["id"] == site.own(id))
        return bool(found)

    wait_until(f"operation {id}", listed, 60)
    return found[-1]


def state_of(site: Site, id: str) -> str:
    """RUNNING, PAUSED and so on."""
    return str(operation(site, id)["state"]).removeprefix("OPERATION_STATE_")


def ended(site: Site, id: str, timeout_s: float = 240.0) -> str:
    """Wait for an operation's end; return its state."""
    states = ("SUCCEEDED", "FAILED", "ABORTED")
    wait_until(f"end of operation {id}", lambda: state_of(site, id) in states, timeout_s)
    return state_of(site, id)


def done(site: Site, what: str, id: str, timeout_s: float = 240.0) -> None:
    """Wait for an operation's end and write down how it ended."""
    state = ended(site, id, timeout_s)
    site.find(what, state, "SUCCEEDED", holds=state == "SUCCEEDED")


def reshard(site: Site) -> None:
    """All buckets of a node move away and back, under requests."""
    with site.at("reshard under traffic"):
        began = time.monotonic()
        site.embertide("node", "drain", "embertide-node-1", "--id", "@drain-1")
        done(site, "drained", "@drain-1")
        left = buckets(site)["embertide-node-1"]
        site.find("buckets of the drained node", left, "0", holds=not left)
        site.embertide("reshard", "--planner", "join", "--id", "@back-1")
        done(site, "given its share again", "@back-1")
        share = buckets(site)["embertide-node-1"]
        site.find("its buckets", share, "> 0", holds=share > 0)
        site.find_answers("requests", site.answers(began))


def lose_control(site: Site) -> None:
    """The control plane's pod is killed in each state of an operation, which goes on."""
    label = "app.kubernetes.io/name=embertide-control"
    slow = ("reshard", "--planner", "join", "--bytes-per-s", "100000", "--id")

    def kill() -> None:
        site.cluster.run("delete", "pod", "-l", label, "--grace-period=0", "--force")
        site.status()

    def expect(what: str, id: str, *states: str) -> None:
        now = state_of(site, id)
        site.find(what, now, " or ".join(states), holds=now in states)

    with site.at("loss of the control plane"):
        began = time.monotonic()
        site.embertide("node", "drain", "embertide-node-1", "--id", "@lost-0")
        ended(site, "@lost-0")
        site.embertide(*slow, "@lost-1")
        expect("an operation", "@lost-1", "RUNNING")
        kill()
        expect("after the loss", "@lost-1", "RUNNING", "SUCCEEDED")
        done(site, "it goes on to its end", "@lost-1")
        site.embertide("node", "drain", "embertide-node-1", "--id", "@lost-2")
        ended(site, "@lost-2")
        site.embertide(*slow, "@lost-3")
        site.embertide("reshard", "pause", "@lost-3")
        kill()
        expect("one that is halted, after the loss", "@lost-3", "PAUSED")
        site.embertide("node", "drain", "embertide-node-0", "--id", "@lost-4")
        kill()
        expect("one that waits for it, after the loss", "@lost-4", "PENDING")
        site.embertide("reshard", "abort", "@lost-4")
        site.embertide("reshard", "resume", "@lost-3")
        kill()
        expect("one that was ended, after the loss", "@lost-4", "ABORTED")
        done(site, "the halted one, let go on, goes to its end", "@lost-3")
        site.find_answers("requests", site.answers(began))
