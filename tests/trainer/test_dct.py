"""The largest gradients alone, summed over ranks: nothing is lost, and all ranks end alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rankpool import RankPool, rank_pool
from snapshots import newest_files
from syncjobs import (
    SHAPES,
    Synced,
    learned_steps,
    poisoned_step,
    restored,
    sync_steps,
    train_with,
)

from embertide.trainer.config import DCT, AllReduce
from embertide.trainer.publish.folder import Publication

SIZES = [int(np.prod(shape)) for shape in SHAPES]
BESIDE = 4 * (1 + 3)  # bytes of what is added up beside in `sync_steps`, in each message


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as made:
        yield made


def thresholded(**settings: Any) -> DCT:
    """From the first step on."""
    return DCT(whole_steps=0, **settings)


def flat(arrays: list[Any]) -> Any:
    """Tensors as a residual has them."""
    return np.concatenate([each.reshape(-1) for each in arrays])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_with_a_density_of_one_it_is_all_reduce_bit_for_bit(
    pool: RankPool, ranks: int, values: Any
) -> None:
    dct: list[Synced] = pool.run(ranks, sync_steps, DCT(density=1, values=values), 4)
    every: list[Synced] = pool.run(ranks, sync_steps, AllReduce(values=values), 4)
    for mine, theirs in zip(dct, every, strict=True):
        assert mine.sent_bytes == theirs.sent_bytes
        for one, other in zip(mine.taken, theirs.taken, strict=True):
            assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


def test_its_own_messages_with_a_density_of_one_are_all_reduce_bit_for_bit(pool: RankPool) -> None:
    config = thresholded(density=1, values="fp32", refresh_every=1)
    dct: list[Synced] = pool.run(2, sync_steps, config, 4, True)
    every: list[Synced] = pool.run(2, sync_steps, AllReduce(), 4)
    for mine, theirs in zip(dct, every, strict=True):
        assert not np.any(mine.residuals)
        for one, other in zip(mine.taken, theirs.taken, strict=True):
            assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


def test_the_first_steps_are_those_of_all_reduce_bit_for_bit(pool: RankPool) -> None:
    dct: list[Synced] = pool.run(2, sync_steps, DCT(density=0.01, whole_steps=3), 4)
    every: list[Synced] = pool.run(2, sync_steps, AllReduce(), 4)
    for mine, theirs in zip(dct, every, strict=True):
        same = [
            all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
            for one, other in zip(mine.taken, theirs.taken, strict=True)
        ]
        assert same == [True, True, True, False]
        assert [bool(np.any(each)) for each in mine.residuals] == [False, False, False, True]


def test_fp16_sums_are_those_of_fp32_within_rounding_and_half_the_bytes(pool: RankPool) -> None:
    coded: list[Synced] = pool.run(2, sync_steps, AllReduce(values="fp16"), 2)
    exact: list[Synced] = pool.run(2, sync_steps, AllReduce(), 2)
    np.testing.assert_allclose(flat(coded[0].taken[1]), flat(exact[0].taken[1]), atol=1e-3)
    beside = 2 * 3 * 4  # of each step, in the same message as fp32 gradients
    assert 2 * coded[0].sent_bytes == exact[0].sent_bytes - beside


@pytest.mark.parametrize("values", ["fp32", "fp16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sent_and_residual_are_the_gradient_and_ranks_end_alike(
    pool: RankPool, ranks: int, values: Any
) -> None:
    steps = 40
    found: list[Synced] = pool.run(
        ranks, sync_steps, thresholded(density=0.01, values=values), steps
    )
    for rank in found[1:]:
        for one, other in zip(found[0].taken, rank.taken, strict=True):
            assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
    before = [np.zeros(len(rank.residuals[0]), np.float32) for rank in found]
    for step in range(steps):
        total = np.zeros_like(before[0])
        for rank, held in zip(found, before, strict=True):
            v = flat(rank.given[step]) + held
            sent = v - rank.residuals[step]
            # Values that travelled have few bits, so that the difference is exact.
            if values == "fp16":
                assert np.array_equal(sent, sent.astype(np.float16).astype(np.float32))
            assert np.array_equal(sent + rank.residuals[step], v)
            total += sent  # in the order of ranks
        assert np.array_equal(total, flat(found[0].taken[step]))
        before = [rank.residuals[step] for rank in found]


def test_a_step_sends_its_share_at_most_and_hardly_less(pool: RankPool) -> None:
    found: list[Synced] = pool.run(2, sync_steps, thresholded(density=0.01, values="fp32"), 200)
    share = sum(round(0.01 * size) or 1 for size in SIZES)
    for rank in found:
        assert max(rank.entries) <= share
        assert np.mean(rank.entries) > 0.95 * share
    # As many bytes as the module says, and no more: 4 of a value, 2 of its position.
    room = share + sum(SIZES) // 65_535
    assert found[0].sent_bytes == 200 * (BESIDE + 6 * room)


def test_every_tensor_has_its_share_though_their_sizes_differ_a_thousandfold(
    pool: RankPool,
) -> None:
    config = thresholded(density=0.01, values="fp32")
    found: list[Synced] = pool.run(2, sync_steps, config, 100, False, (1.0, 1e-3, 1e3, 1e-3, 1.0))
    for rank in found:
        for k, size in enumerate(SIZES):
            sent = [np.count_nonzero(step[k]) for step in rank.taken[50:]]
            # Two ranks seldom choose the same. A tensor with a share of one sends a few at times.
            assert 0.8 < np.mean(sent) / (2 * max(1, round(0.01 * size))) < (1.3, 2)[size < 1000]


def test_positions_farther_apart_than_16_bits_arrive(pool: RankPool) -> None:
    config = thresholded(density=1e-5, values="fp32", refresh_every=1)
    found: list[Synced] = pool.run(2, sync_steps, config, 3)
    for step in range(3):
        total = sum(
            flat(rank.given[step])
            + (rank.residuals[step - 1] if step else 0)
            - rank.residuals[step]
            for rank in found
        )
        np.testing.assert_allclose(total, flat(found[0].taken[step]), atol=1e-7)
    assert all(3 <= n <= 5 for n in found[0].entries)


def test_without_error_feedback_the_rest_is_dropped(pool: RankPool) -> None:
    config = thresholded(density=0.01, values="fp32", error_feedback=False)
    found: list[Synced] = pool.run(2, sync_steps, config, 3)
    for step in range(3):
        given = flat(found[0].given[step]) + flat(found[1].given[step])
        taken = flat(found[0].taken[step])
        # Each element is the sum, one rank's value, or nothing.
        singles = [flat(rank.given[step]) for rank in found]
        assert np.all(
            (taken == given) | (taken == singles[0]) | (taken == singles[1]) | (taken == 0)
        )


def test_a_step_that_is_not_finite_leaves_what_was_held_back(pool: RankPool) -> None:
    for reason, same, before, net in pool.run(2, poisoned_step, thresholded(density=0.1)):
        assert reason in ("loss not finite", "gradients not finite")
        assert same
        assert all(np.isfinite(each).all() for each in (*before, *net))


def test_ranks_of_a_model_end_with_the_same_net_and_repeat(pool: RankPool) -> None:
    first = pool.run(2, learned_steps, thresholded(density=0.1), 6)
    again = pool.run(2, learned_steps, thresholded(density=0.1), 6)
    for rank, (net, held) in enumerate(first):
        assert all(np.array_equal(*each) for each in zip(net, first[0][0], strict=True))
        assert all(np.array_equal(*each) for each in zip(net, again[rank][0], strict=True))
        assert all(np.array_equal(*each) for each in zip(held, again[rank][1], strict=True))


def test_other_numbers_of_ranks_share_what_was_held_back(pool: RankPool) -> None:
    n = sum(int(np.prod(shape)) for shape in SHAPES)
    states = [
        {
            "residual_N": np.full(n, value, np.float32),
            "threshold_T": np.full(len(SHAPES), 0.5, np.float32),
            "steps": np.array([77]),
        }
        for value in (1.0, 3.0)
    ]
    same = pool.run(2, restored, DCT(), states)
    assert [each["residual_N"][0] for each in same] == [1.0, 3.0]
    assert [int(each["steps"][0]) for each in same] == [77, 77]
    other = pool.run(4, restored, DCT(), states)
    assert [each["residual_N"][0] for each in other] == [1.0] * 4
    assert [int(each["steps"][0]) for each in other] == [77] * 4
    assert all(np.all(each["threshold_T"] < 1e-30) for each in other)


def test_a_run_that_was_killed_ends_with_the_same_bytes(pool: RankPool, tmp_path: Path) -> None:
    sync = DCT(density=0.01, whole_steps=20)
    whole = pool.run(2, train_with, sync, str(tmp_path / "whole"))
    assert whole[0]["held_back"] > 0
    pool.results(2, train_with, sync, str(tmp_path / "killed"), 30)
    went_on = pool.run(2, train_with, sync, str(tmp_path / "killed"))
    assert went_on[0]["began_at"] > 0
    assert went_on[0]["events"] == whole[0]["events"]
    assert np.array_equal(went_on[0]["scores"], whole[0]["scores"])
    assert [each["held_back"] for each in went_on] == [each["held_back"] for each in whole]
    files = [newest_files(Publication(tmp_path / name)) for name in ("killed", "whole")]
    assert files[0] == files[1]


def test_a_run_goes_on_with_another_strategy_if_it_is_allowed(
    pool: RankPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "news")
    pool.results(2, train_with, DCT(density=0.01), folder, 30)
    for result in pool.results(2, train_with, AllReduce(), folder):
        assert result.kind == "CheckpointError"
        assert "--allow-change sync" in result.text
    done = pool.run(2, train_with, AllReduce(), folder, 0, ("sync",))
    assert done[0]["held_back"] == 0
