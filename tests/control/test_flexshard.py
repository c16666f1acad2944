"""The planner `flexshard` against a fine grid of all answers, on small cases."""

import numpy as np
import pytest
from small_cases import CASES, sequences_answer, sequences_problem

from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.flexshard import FlexShard, _Group
from embertide.server.core.plan.instance import instances, owned_after
from embertide.server.core.plan.row_reads import RowReads, fit_exponent, share_of_first
from embertide.server.core.plan.workload import TableTraits

KIB = 1024


@pytest.mark.parametrize("seed", range(CASES))
def test_the_busiest_link_is_near_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = sequences_problem(random)
    copy_bytes = float(random.uniform(20, 800)) * KIB
    proposal, ours, best = sequences_answer(problem, copy_bytes)
    assert ours <= best * 1.05
    (instance,) = instances(problem)
    group = _Group(instance)
    owned_DB = owned_after(instance, proposal.owners)
    assert (instance.bytes_D(owned_DB) <= instance.budget_D).all()
    assert sum(n * group.copy_bytes[t] for t, n in proposal.hot_rows.items()) <= copy_bytes
    assert FlexShard(copy_bytes).propose(problem) == proposal


def test_what_zipf_saves_uniform_keys_do_not() -> None:
    def saved(exponent: float) -> float:
        random = np.random.default_rng(1)
        problem = sequences_problem(random, exponents=(exponent, exponent), slack=0.0)
        (instance,) = instances(problem)
        group = _Group(instance)
        rows = sum(law.rows for law in group.law.values())
        # Copies of a twentieth of all rows.
        copy_bytes = rows / 20 * max(group.copy_bytes.values())
        proposal = FlexShard(copy_bytes).propose(problem)
        owned_DB = owned_after(instance, proposal.owners)
        copies = {t: float(n) for t, n in proposal.hot_rows.items()}
        return 1 - group.busiest(owned_DB, copies) / group.busiest(instance.owned_DB, {})

    assert saved(1.3) > 0.8
    assert saved(0.0) < 0.12
    assert saved(0.0) < saved(0.6) < saved(1.0) < saved(1.3)


def test_a_fit_gives_back_the_law() -> None:
    for exponent in (0.0, 0.5, 0.9, 1.0, 1.2, 2.0):
        share = share_of_first(exponent, 100, 1e6)
        found = fit_exponent(1e6, 100, share)
        assert found == pytest.approx(exponent, abs=1e-3)
        law = RowReads(TableTraits(rows=1e6, head_keys=100, head_share=share))
        assert law.first(100) == pytest.approx(share, rel=1e-3)
        assert law.first(1e6) == pytest.approx(1.0)
        if exponent:
            assert law.rank_of(law.of_rank(500)) == pytest.approx(500, rel=1e-3)
    weights = np.arange(1, 100_001) ** -1.1
    exact = weights[:5000].sum() / weights.sum()
    assert share_of_first(1.1, 5000, 100_000) == pytest.approx(exact, rel=1e-6)
    assert fit_exponent(0.0, 0, 0.0) == 0.0


def test_what_does_not_apply_is_refused() -> None:
    random = np.random.default_rng(1)
    with pytest.raises(RefusedError, match="no table is read as sequences"):
        FlexShard().propose(sequences_problem(random, sums=1.0))
    with pytest.raises(RefusedError, match="no group has two nodes"):
        FlexShard().propose(sequences_problem(random, nodes=1))
