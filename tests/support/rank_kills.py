"""Runs of several ranks that are killed at random, while nodes follow them.

A run that nothing interrupts says what is right: the files of its last snapshot, and what a node
answers at each of its versions. The same run is then killed again and again. Each time one rank,
all ranks, torchrun's agent or the command gets SIGKILL: while ranks start, while a snapshot is
written, or at any time. A run that comes to its end before there were enough kills is followed by
another one. Every second run has no bus, and its ranks take the folder's lock instead.
"""

import contextlib
import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
from followers import Findings, Reference, following
from killed_run import (
    VICTIMS,
    End,
    Moment,
    RankRun,
    Stream,
    Victim,
)

from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.data.generator import NewsConfig, NewsSource

SEED = 20
_KEEP, _KEEP_ALL = 8, 10_000


@dataclasses.dataclass(slots=True)
class Outcome:
    """The outcome of a series of kills.

    Attributes:
        kills: By moment and by victim.
        unfinished: How often a kill left what.
        ends: Whether each run ended as the uninterrupted one.
        stages: Of the search for a plan, at each kill; empty where none is looked for.
        plans: The stages that searches ended with, by run.
        findings: The findings of the nodes that followed.
        versions: The number of versions that the uninterrupted run has.
    """

    kills: Counter[str] = dataclasses.field(default_factory=Counter)
    unfinished: Counter[str] = dataclasses.field(default_factory=Counter)
    ends: list[bool] = dataclasses.field(default_factory=list)
    stages: Counter[str] = dataclasses.field(default_factory=Counter)
    plans: list[str] = dataclasses.field(default_factory=list)
    findings: Findings = dataclasses.field(default_factory=Findings)
    versions: int = 0

    @property
    def killed(self) -> int:
        """The number of kills."""
        return sum(self.kills[moment] for moment in get_args(Moment))

    def line(self) -> str:
        """Describe it for people."""
        findings = self.findings
        return (
            f"{self.killed} kills {dict(self.kills)}, unfinished {dict(self.unfinished)}; "
            f"{sum(self.ends)} of {len(self.ends)} ends equal; {findings.answers} answers of "
            f"{len(findings.versions)} of {self.versions} versions: {findings.mixed} mixed "
            f"{sorted(findings.mixed_at)}, {findings.unknown} unknown, {findings.back} back; "
            f"versions: {findings.lost} lost, {findings.published_otherwise} published otherwise; "
            f"{len(findings.failures)} requests failed"
            + (f"; killed at {dict(self.stages)}, plans {self.plans}" if self.plans else "")
        )


def uninterrupted(folder: Path, stream: Stream, ranks: int) -> tuple[End, Reference]:
    """Run a stream to its end with nothing killed, and without looking for a plan."""
    stream = dataclasses.replace(stream, plan=False)
    run = RankRun(folder, stream, keep_snapshots=_KEEP_ALL)
    with contextlib.closing(run):
        run.start(ranks)
        end = run.end()
    return end, Reference(run.publication, NewsSource(NewsConfig(hours=stream.hours)))


@contextlib.contextmanager
def _followed(
    folder: Path,
    stream: Stream,
    ranks: int,
    *,
    reference: Reference,
    with_bus: bool,
    findings: Findings,
) -> Iterator[RankRun]:
    """Start a run and nodes that follow it; leaving the context waits for them."""
    bus: str | None = None
    with contextlib.ExitStack() as stack:
        if with_bus:
            options = RedisOptions(log=folder / "bus.log")
            bus = stack.enter_context(RedisServer(options)).url
        keep = _KEEP if stream.repeats else _KEEP_ALL
        run = stack.enter_context(
            contextlib.closing(RankRun(folder, stream, bus=bus, keep_snapshots=keep))
        )
        run.start(ranks)
        seen = stack.enter_context(
            following(folder, run.publication, reference, bus, repeats=stream.repeats)
        )
        yield run
    findings.add(seen)


def kill_again_and_again(
    folder: Path, stream: Stream, ranks: int, kills: int, seed: int = SEED
) -> Outcome:
    """Kill runs of a stream so many times, and compare how they end.

    Raises:
        BenchError: A run does not go on, or a node does not follow.
    """
    rng = np.random.default_rng(seed)
    end, reference = uninterrupted(folder / "uninterrupted", stream, ranks)
    outcome = Outcome(versions=len(reference.embeddings))
    # However few kills there are, each of these is among them.
    victims: list[Victim] = ["rank", "agent", "command"]
    rng.shuffle(victims)
    while outcome.killed < kills:
        place = folder / f"run-{len(outcome.ends)}"
        with _followed(
            place,
            stream,
            ranks,
            reference=reference,
            with_bus=len(outcome.ends) % 2 == 0,
            findings=outcome.findings,
        ) as run:
            killed = outcome.killed
            while outcome.killed < min(kills, killed + stream.kills):
                moment: Moment = rng.choice(list(stream.moments), p=list(stream.moments.values()))
                victim: Victim = rng.choice(list(VICTIMS), p=list(VICTIMS.values()))
                victim = victims[0] if victims else victim
                if not run.kill(moment, victim, rng):
                    break
                victims = victims[1:]
                outcome.kills.update([moment, victim])
                if stream.plan:
                    outcome.stages[run.stage] += 1
                outcome.unfinished.update(run.unfinished())
                run.go_on(ranks)
            ended = run.end()
            outcome.ends.append(ended.is_as(end, stream))
            if stream.plan:
                outcome.plans.append(ended.result["plan"]["stage"])
        shutil.rmtree(place / "pub")
    return outcome
