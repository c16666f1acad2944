"""Three times as many requests as the machine can answer: `make bench-overload`.

The fleet of `embertide chaos` without faults, trainer and all, on one machine. What it answers
with all clients waiting all the time is measured first. Then requests fall due at three times that
rate, each with a deadline, while checking clients compare every row that they get with the log.
What is answered has to be right, and in time; the rest may be refused or late, and keys that were
not answered for are marked and few.
"""

import argparse
import random
import time
from collections.abc import Iterator

import numpy as np

from bench import parts, report
from bench.load import Clients, Patience, Seen, encode
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from embertide.server.adapters.process import interrupt_on_signals
from embertide.server.cli.chaos.options import ChaosOptions
from embertide.server.cli.chaos.rounds import Chaos
from embertide.server.cli.chaos.traffic import MODEL, Asked, draw_keys
from embertide.server.cli.common_options import DEFAULT_BACKENDS, DEFAULT_CACHE

_FOLDER = BUILD / "bench" / "overload"
_REQUESTS = 64
_NEVER_REACHED = 1e6  # requests/s: all clients have all requests on their way
_SETTLE_S = 2.0
_SHOWN = 5


def _requests(chaos: Chaos, samples: int) -> list[bytes]:
    """Encode requests for keys that the model has."""
    rng = random.Random(1)
    drawn = (draw_keys(chaos.replay, rng, samples) for _ in range(_REQUESTS))
    return [encode(MODEL, np.array(keys, np.uint64).view(np.int64)) for keys in drawn]


def _load(chaos: Chaos, clients: Clients, rate: float | None, seconds: float) -> Seen:
    clients.start(rate)
    begin = time.time() + _SETTLE_S
    while time.time() < begin + seconds:
        chaos.tick()
    end = time.time()
    return clients.stop().between(begin, end)


def _rows(
    seen: Seen, asked: list[Asked], wrong: list[str], factor: float, deadline_s: float, share: float
) -> list[report.Row]:
    case = f"{factor:g}x overload, deadline {deadline_s * 1e3:.0f} ms"
    # Only the clients that check are timed: those that make the load have hundreds of threads in a
    # process, which wake up long after their answer has come.
    took = [each.took_s for each in asked if not each.failure]
    loads_took = (seen.log["ended"] - seen.log["sent"])[seen.log["version"] >= 0]
    keys = sum(each.keys for each in asked)
    degraded = sum(each.degraded for each in asked)
    figures = [
        ("wrong answers", "count", float(len(wrong)), 0.0, True),
        ("keys left unanswered", "share", degraded / max(keys, 1), share, True),
        ("p99 of what is answered", "s", float(np.percentile(took, 99)), deadline_s, True),
        (
            "the same, as a client of hundreds of threads sees it",
            "s",
            float(np.percentile(loads_took, 99)),
            0.0,
            False,
        ),
        ("checked answers", "keys", float(keys), 0.0, False),
        ("answered", "share", len(loads_took) / max(len(seen.log), 1), 0.0, False),
        ("answered a second", "requests/s", seen.requests_per_s, 0.0, False),
    ]
    return [
        # A target of 0 is none: what may not happen at all is a claim of its own.
        report.measure((case, name, unit), [value], better="lower", target=target, claim="18.4")
        if held and target
        else report.measure((case, name, unit), [value], better="lower", target=0)
        for name, unit, value, target, held in figures
    ] + [
        report.measure(
            (case, "no answer is wrong", "holds"),
            [float(not wrong)],
            better="higher",
            target=1,
            claim="18.4",
        )
    ]


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    interrupt_on_signals()
    deadline_s = given.deadline_ms / 1e3
    options = ChaosOptions(
        directory=_FOLDER, backends=DEFAULT_BACKENDS, cache=DEFAULT_CACHE, deadline_s=deadline_s
    )
    options.empty()
    with Chaos(options, CONSOLE.print) as chaos:
        requests = _requests(chaos, given.samples)
        patience = Patience(at_once=given.at_once, timeout_s=deadline_s)
        with Clients(chaos.fleet.grpc, requests, Patience(at_once=given.at_once)) as clients:
            most = _load(chaos, clients, _NEVER_REACHED, given.seconds / 4)
        sustained = most.requests_per_s
        CONSOLE.print(f"[dim]the fleet sustains {sustained:,.0f} requests/s")
        chaos.traffic.take()
        with Clients(chaos.fleet.grpc, requests, patience) as clients:
            seen = _load(chaos, clients, given.factor * sustained, given.seconds)
        asked, wrong = chaos.traffic.take()
        endings = [each for each in chaos.fleet.endings if each.name != "trainer"]
        if endings:
            raise BenchError(f"{endings[0].name} ended: {endings[0].log}")
    for why, count in seen.failures.most_common(_SHOWN):
        CONSOLE.print(f"[dim]{count} not answered: {why[:200]}")
    yield from _rows(seen, asked, wrong, given.factor, deadline_s, given.degraded_share)
    if wrong:
        raise BenchError("wrong answers: " + "; ".join(wrong[:_SHOWN]))


if __name__ == "__main__":
    parser = parts.options("overload", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--deadline-ms", type=float, default=500.0)
    parser.add_argument(
        "--at-once",
        type=int,
        default=512,
        help="requests on their way to each node, at most; too few, and they wait at the client",
    )
    parser.add_argument("--samples", type=int, default=32, help="of a request")
    parser.add_argument(
        "--degraded-share", type=float, default=0.01, help="of keys that may be left unanswered"
    )
    parts.command("Overload", _measure, parser)
