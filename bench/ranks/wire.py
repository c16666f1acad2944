"""Two ranks in two network namespaces, with a wire of 1 Gb/s between them: what is hidden of it.

A step cannot be faster than its work without a wire, nor than its bytes over the wire; a rate of
0.9 of the slower of these two means that nearly all of the other is hidden behind it. Needs root,
`ip` and `tc`. The timeline is of one step of rank 0: what its threads did, what travelled.
"""

import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from bench import report
from bench.ranks.launching import launch
from bench.servers import BUILD, ROOT, BenchError

mpl.use("Agg")
import matplotlib.pyplot as plt

_OURS = "bench.ranks.ours"
_RATE, _BURST = "1gbit", "128kb"
_BYTES_PER_S = 1e9 / 8
# Of TCP over IPv4 and Ethernet: 1,448 bytes of 1,538 on the wire are ours.
_PAYLOAD = 1448 / 1538
_BAR = 0.9
_TIMEOUT_S = 1200
# Samples of a batch, and how rows and gradients travel.
_CASES = ((4096, "fp32"), (16_384, "fp32"), (16_384, "fp16"))
_BESIDE = ("words", "bench")  # not of a step
_COLOURS = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _wire(rate: str, burst: str) -> Iterator[tuple[list[str], list[str]]]:
    """Give two namespaces, joined by a wire each way, and their addresses.

    Args:
        rate: The wire's, for `tc`.
        burst: Bytes that pass at once after a pause, for `tc`.
    """
    if os.geteuid() != 0 or not shutil.which("tc"):
        raise BenchError("network namespaces need root, ip and tc (iproute2)")
    tag = secrets.token_hex(3)
    names, links = [f"em{tag}{i}" for i in range(2)], [f"v{tag}{i}" for i in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            tc = ["tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", rate]
            tc += ["burst", burst, "latency", "50ms"]
            subprocess.run(["ip", "netns", "exec", name, *tc], check=True, capture_output=True)
        yield names, links


def over_the_wire(
    arguments: Sequence[str], rate: str = _RATE, module: str = _OURS, burst: str = _BURST
) -> dict[str, Any]:
    """Run a module, our step by default, in two namespaces and return what rank 0 printed.

    Raises:
        BenchError: There are no namespaces to be had, or a rank failed.
    """
    with _wire(rate, burst) as (names, links):
        ranks: list[subprocess.Popen[str]] = []
        for number, (name, link) in enumerate(zip(names, links, strict=True)):
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "RANK": str(number),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "10.99.0.1",
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": link,
            }
            command = ["ip", "netns", "exec", name, sys.executable, "-m", module, *arguments]
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        said = [rank.communicate(timeout=_TIMEOUT_S) for rank in ranks]
        for rank, (_, error) in zip(ranks, said, strict=True):
            if rank.returncode:
                raise BenchError(f"a rank ended with {rank.returncode}: {error[-2000:]}")
    printed: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return printed


def _wire_s(found: dict[str, Any]) -> float:
    """Return what a step's bytes take on the wire, of the rank that sends most."""
    first, after = found["steps"]
    sent = [
        sum(size for kind, (_, size) in each.items() if kind not in _BESIDE)
        for each in found["sent"]
    ]
    return float(max(sent) / (after - first) / (_BYTES_PER_S * _PAYLOAD))


def measure(repetitions: int = 5) -> Iterator[report.Row]:
    """Yield a row a batch size: the rate over the wire against the better of the two bounds."""
    for samples, codec in _CASES:
        arguments = ["--samples", str(samples), "--steps", "10", "--windows", "3"]
        arguments += ["--rows", codec, "--gradients", codec]
        bound, shaped = list[float](), list[float]()
        for _ in range(repetitions):
            free = launch(_OURS, 2, arguments)
            work_s = samples / statistics.median(free["samples_per_s"])
            bound.append(samples / max(work_s, _wire_s(free)))
            found = over_the_wire(arguments)
            shaped.append(float(statistics.median(found["samples_per_s"])))
        yield report.compare(
            (f"Criteo DLRM, batch {samples:,}, {codec}, 2 ranks over 1 Gb/s", "rate", "samples/s"),
            shaped,
            bound,
            peer_name="the slower of work and wire",
            better="higher",
            target=_BAR,
            claim="20.4",
        )
    spans = over_the_wire(
        ["--samples", "4096", "--steps", "5", "--windows", "1", "--timeline", "yes"]
    )
    draw(spans["timeline"], BUILD / "bench" / "ranks_timeline.svg")


def draw(spans: list[list[Any]], path: Path) -> None:
    """Draw [lane, name, begin_s, end_s] of a step as bars."""
    lanes = list(dict.fromkeys(lane for lane, *_ in spans))
    names = list(dict.fromkeys(name for _, name, *_ in spans))
    began = min(begin for _, _, begin, _ in spans)
    figure, axes = plt.subplots(figsize=(11, 0.8 * len(lanes) + 1.4))
    # A caller begins before the span that it calls, and is drawn underneath.
    for lane, name, begin, end in sorted(spans, key=lambda span: float(span[2])):
        axes.broken_barh(
            [(1e3 * (begin - began), 1e3 * (end - begin))],
            (lanes.index(lane) - 0.35, 0.7),
            facecolors=_COLOURS[names.index(name) % len(_COLOURS)],
        )
    handles = [
        mpl.patches.Patch(color=_COLOURS[i % len(_COLOURS)], label=name)
        for i, name in enumerate(names)
    ]
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title("A step of rank 0, over 1 Gb/s")
    axes.legend(handles=handles, ncol=5, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
