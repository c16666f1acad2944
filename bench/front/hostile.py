"""The attacks of `bench.edges` on a front door, by nobody in particular, while others call.

Messages that say they are huge, that unpack to much, calls of headers alone, bytes that drip,
messages of 16 MiB, ten thousand connections (bench/edges/attack.py). The others' calls are to be
answered, and memory is to stay within a bound; a server that ends is started again for the next.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from bench import report
from bench.edges import callers
from bench.edges.attack import ATTACKS, Door
from bench.front import targets
from bench.front.questions import INFER, answered, requests
from bench.front.targets import LOOKUP, Kept, Site, Target
from bench.servers import BUILD
from embertide._common import kserve

CLAIM = "B.2"
_MIB = 1 << 20
# Bound on the growth of the server's memory beside a tenth: 128 calls of 4 MiB, as one
# connection may have.
_BOUND_BYTES = 512 * _MIB


def _attacked(target: Target, channel: grpc.Channel) -> Iterator[callers.Outcome]:
    request: Any = next(requests(LOOKUP, 4, 1)).SerializeToString()
    port = int(target.address.rpartition(":")[2])
    with Kept(target.server) as kept:
        for attack in ATTACKS:
            kept.await_answers()
            ends = kept.ends.total()
            outcome = callers.attacked(
                callers.Target(
                    name=target.name,
                    who="nobody",
                    process=target.server.process,
                    door=Door(port=port, path=INFER),
                    ask=lambda: answered(channel, INFER, request),
                    bound_bytes=_BOUND_BYTES,
                ),
                attack,
            )
            callers.say(outcome)
            yield outcome
            if kept.ends.total() > ends:
                kept.await_answers()


def run(options: argparse.Namespace) -> Iterator[report.Row]:
    """Attack each target in every way."""
    base = BUILD / "bench" / "front"
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as made:
        folder = Path(made)
        repository = targets.small_repository(folder / "repository")
        for name in options.target:
            site = Site(folder=folder / name, repository=repository)
            with (
                targets.TARGETS[name](site) as target,
                grpc.insecure_channel(target.address, kserve.OPTIONS) as channel,
            ):
                yield from callers.rows_of(list(_attacked(target, channel)), CLAIM)
