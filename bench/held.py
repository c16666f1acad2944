"""Claims that the project's tests hold: `python -m bench.held PART ...`.

`model` is a model's life: what a feature costs that comes later is a row of `bench.change`, what
late labels cost one of `python -m bench.train labels`. `drift` is of moves, of fleets at
rest, and of planners: EMBERTIDE_CASES=200 sets how many small problems. `security` is what
keeps strangers out: what TLS costs is a row of `bench.remote`. `edges` is what comes from outside:
EMBERTIDE_TABLES sets how many tables are generated, EMBERTIDE_CALLS how many calls a restart meets.
`front` is whether what held behind the stock front end holds behind ours, and still behind that.
`rank` is of one user and many candidates: how fast they are is rows of `bench.rank`.
`console` is of its pages, buttons and doors; its costs are rows of `bench.console` and `watched`.
`sync` is of strategies of synchronisation: EMBERTIDE_KILLS=20 kills each asynchronous run so often.
"""

import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

from bench import parts, report
from bench.servers import ROOT, BenchError

_SAID = re.compile(r"^(?:(\d+) failed, )?(\d+) passed", re.MULTILINE)
# `-m pytest` would add the root to the path.
_PYTEST = (sys.executable, "-c", "import pytest, sys; sys.exit(pytest.main())", "-q")
_OURS = "not triton and not http"
_STOCK = "triton or http or stock"
# By part: case, tests, the words that choose them, claim.
CLAIMS = {
    "model": (
        ("a net of one's own, killed, ends alike", "e2e/test_killed_training.py", "own", "22.3"),
        ("a net of one's own is served", "e2e/test_net_serving.py", "own and scores", "22.3"),
        ("another schema under traffic", "e2e/test_schema_switch.py", "test_", "22.4"),
        ("a change keeps scores", "trainer/test_forking.py", "change or comes", "22.4"),
        ("late labels learned once", "e2e/test_killed_training.py", "late", "22.5"),
        ("1,000 steps as TorchRec's", "trainer/test_torchrec_page.py", "test_", "22.7"),
        ("every page: snippets, links, messages, words", "docs", "test_", "22.8"),
    ),
    "drift": (
        ("bad requests refused, nothing changed", "control/test_refusals.py", "test_", "19.9"),
        ("Redis killed in a move", "control/test_killed_state.py", "test_", "19.7"),
        ("a fleet at rest is left alone", "control/test_quiet.py", "test_", "19.3"),
        ("gains predicted within a quarter", "control/test_gains.py", "quarter", "E.7"),
        ("planners / the best of all plans", "control/test_planners.py", "nearly_best", "19.5"),
        ("recshard / the best of all shares", "control/test_recshard.py", "best or hulls", "19.5"),
        ("flexshard / the best of a grid", "control/test_flexshard.py", "best", "19.5"),
    ),
    "security": (
        ("nobody gets in whom no page names", "e2e/test_who_gets_in.py", "test_", "21.1"),
        ("Triton's doors ask for a key", "e2e/test_doors.py", "test_", "21.1"),
        ("credentials replaced under traffic", "e2e/test_rotation.py", "test_", "21.3"),
        ("a node ends soon, whoever is connected", "e2e/test_ends.py", "test_", "21.6"),
    ),
    "edges": (
        ("generated tables", "trainer/test_planted.py", "test_", "A.1"),
        ("extras alone in a fresh environment", "e2e/test_wheel.py", "extra", "A.2"),
        ("another user of the machine", "e2e/test_strangers.py", "test_", "A.4"),
        ("tasks that throw, or get no thread", "e2e/test_faulty_tasks.py", "test_", "A.5"),
        ("scripts of a day of operating", "control/test_scenarios.py", "test_", "A.6"),
        ("schedules by chance", "control/test_explore.py", "test_", "A.6"),
        ("nodes restarted, stopped, away", "e2e/test_rolling_restart.py", "test_", "A.7"),
        ("a full disk, a folder at a time", "e2e/test_full_disks.py", "test_", "A.8"),
        ("yesterday's folder, today's command", "trainer/test_going_on.py", "test_", "A.9"),
        ("messages say what to do next", "common/test_messages.py", "test_", "A.10"),
    ),
    "rank": (
        (
            "rules keep scores: nets, 2 to 40 operators",
            "trainer/test_rewrite_rules.py",
            "keep",
            "F.2",
        ),
        ("alpha 1.05 finds what 1 misses", "trainer/test_rewrite_search.py", "slower", "F.2"),
        ("programs, any users and candidates", "e2e/test_dense_plugin.py", "once_a_user", "F.2"),
        (
            "weights of fewer bits, or packed",
            "e2e/test_dense_plugin.py",
            "scored_in_a_type or converted or packs or pack",
            "F.3",
        ),
        ("served scores are the net's", "e2e/test_net_serving.py", "scores", "F.5"),
        ("one user's candidates over two nodes", "e2e/test_made_columns.py", "candidates", "F.5"),
        ("a bad request costs itself alone", "e2e/test_transforms_serving.py", "context", "F.7"),
        ("... as clients and nodes read it", "client/test_contexts.py", "test_", "F.7"),
    ),
    "console": (
        ("Chromium: pages, axe-core, no other host", "e2e/test_console_browser.py", "test_", "G.1"),
        ("the demo's page as a file: the same", "e2e/test_report_browser.py", "test_", "G.3"),
        ("pages of 1,000 nodes, none, no answer", "server/test_console_pages.py", "test_", "G.1"),
        ("every button, after a preview", "control/test_console.py", "not withdrawn", "G.1"),
        ("frames, forms, cookies, sessions", "server/test_console_doors.py", "test_", "G.5"),
        ("names stay text", "server/test_console_pages.py", "names or script", "G.5"),
        ("readers, withdrawn tokens", "control/test_console.py", "reader or token", "G.5"),
    ),
    "sync": (
        ("DCT: sent and held back are the gradient", "trainer/test_dct.py", "test_", "D.1"),
        ("groups: one at a time, windows connected", "trainer/test_groups.py", "test_", "D.3"),
        ("Hop: a million random schedules", "trainer/test_hop.py", "test_", "D.4"),
        ("each gradient is applied once", "trainer/test_row_server.py", "test_", "D.6"),
        ("killed, nodes following", "e2e/test_killed_ranks.py", "LocalSGD or partial", "D.7"),
        ("what is refused", "trainer/test_sync_settings.py", "test_", "D.9"),
    ),
    "front": (
        ("nobody gets in whom the page does not name", "e2e/test_who_gets_in.py", "test_", "B.5"),
        ("our doors ask for a key", "e2e/test_doors.py", _OURS, "B.5"),
        ("credentials replaced under traffic", "e2e/test_rotation.py", "test_", "B.5"),
        ("a node ends soon, whoever is connected", "e2e/test_ends.py", "test_", "B.5"),
        ("hostile callers", "e2e/test_hostile_callers.py", "test_", "B.5"),
        ("lookups", "e2e/test_lookup_serving.py", _OURS, "B.5"),
        ("ranking", "e2e/test_ranking_serving.py", _OURS, "B.5"),
        ("clients", "e2e/test_client.py", _OURS, "B.5"),
        ("restarts", "e2e/test_restarts.py", "test_", "B.5"),
        ("rolling restarts", "e2e/test_rolling_restart.py", "test_", "B.5"),
        ("what our front end tells of itself", "e2e/test_front.py", "test_", "B.5"),
        ("a node answers its manifest's probes", "e2e/test_manifest_probes.py", "test_", "B.5"),
        ("the stock front end: doors", "e2e/test_doors.py", _STOCK, "B.5"),
        ("the stock front end: lookups", "e2e/test_lookup_serving.py", _STOCK, "B.5"),
        ("the stock front end: ranking", "e2e/test_ranking_serving.py", _STOCK, "B.5"),
        ("the stock front end: clients", "e2e/test_client.py", _STOCK, "B.5"),
        ("the stock front end, a named installation", "e2e/test_other_triton.py", "test_", "B.5"),
        ("manifests", "k8s", "test_", "B.5"),
    ),
}


def held(case: str, tests: str, chosen: str, *, claim: str) -> report.Row:
    """Run tests, the long ones too; return whether all that were chosen passed.

    Raises:
        BenchError: None ran.
    """
    command = [*_PYTEST, "-m", "not gpu", "-k", chosen, tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = _SAID.search(done.stdout)
    if said is None:
        raise BenchError(f"{tests} -k {chosen!r} ran no test: {done.stdout[-500:]}")
    count = int(said[1] or 0) + int(said[2])
    name = (f"{case}: {count} tests of {tests}", "all passed", "1: yes")
    return report.measure(
        name, [float(done.returncode == 0)], better="higher", target=1, claim=claim
    )


def _rows(claims: Sequence[tuple[str, str, str, str]], _: object) -> Iterator[report.Row]:
    for case, tests, chosen, claim in claims:
        yield held(case, f"tests/{tests}", chosen, claim=claim)


if __name__ == "__main__":
    every = {part: functools.partial(_rows, claims) for part, claims in CLAIMS.items()}
    sys.exit(parts.main("bench.held", "Held by tests", every, __doc__))
