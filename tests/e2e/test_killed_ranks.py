"""Ranks killed at random while nodes follow: no node sees a version of its own, each end is equal.

A run that nothing interrupts, of as many ranks, says what is right: the bytes of the last snapshot,
and what a node answers at each version. Of ranks that are not at the same step it says how many
events are learned and when versions are due, and their own files what a node answers. Ranks that
look for a plan (`embertide train --plan auto`) are held to a run that does not.

`EMBERTIDE_KILLS` says how often each run is killed (`make test-long`: 50), `EMBERTIDE_SEED` when.
"""

import dataclasses
import os
from pathlib import Path

import pytest
from killed_run import APART, PLAIN, PLANNED, PRUNED, Stream
from rank_kills import SEED, kill_again_and_again

KILLS = int(os.environ.get("EMBERTIDE_KILLS", "3"))
SEED_OF_KILLS = int(os.environ.get("EMBERTIDE_SEED", str(SEED)))
# So many kills leave something unfinished of each kind. Fewer need no long stream.
MANY = 20
_SEARCH_STARTS = 8  # as many kills as a stream without a search gets in the time of one with it


@pytest.mark.parametrize(
    ("stream", "ranks"),
    [
        pytest.param(PLAIN, 2, id="plain"),
        pytest.param(PLAIN, 3, id="three ranks", marks=pytest.mark.long),
        pytest.param(PRUNED, 2, id="pruned", marks=pytest.mark.long),
        *(pytest.param(each, 2, id=name, marks=pytest.mark.long) for name, each in APART.items()),
        pytest.param(PLANNED, 2, id="plan auto", marks=pytest.mark.long),
    ],
)
def test_killed_ranks_end_byte_for_byte_as_those_never_killed_and_nodes_follow(
    tmp_path: Path, stream: Stream, ranks: int
) -> None:
    if KILLS < MANY and not stream.plan:
        stream = dataclasses.replace(stream, hours=2)
    kills = max(3, KILLS // _SEARCH_STARTS) if stream.plan else KILLS
    outcome = kill_again_and_again(tmp_path, stream, ranks, kills, SEED_OF_KILLS)
    print(f"seed {SEED_OF_KILLS}, {ranks} ranks: {outcome.line()}")
    findings = outcome.findings
    assert outcome.killed == kills
    assert all(outcome.ends)
    assert (findings.mixed, findings.unknown, findings.back) == (0, 0, 0)
    assert (findings.lost, findings.published_otherwise) == (0, 0)
    assert not findings.failures
    assert findings.answers > 100
    assert len(findings.versions) > outcome.versions / 4
    if stream.plan:
        assert len(outcome.plans) == len(outcome.ends)
        assert outcome.stages.total() == kills
    if KILLS >= MANY and stream.plan:
        assert {"kept", "refused"} & set(outcome.plans)
    elif KILLS >= MANY and stream.repeats:
        assert min(outcome.unfinished[name] for name in ("snapshot", "versions")) > 0
