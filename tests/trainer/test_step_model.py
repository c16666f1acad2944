"""A step's prediction: what is known in closed form, and what it says of what it does not know."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from stepprofiles import LINK, NO_WORK, profile, table

from embertide.trainer.config import Codecs, FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.config.sync import DCT, AllReduce
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.sync.placing import profile as profiles
from embertide.trainer.sync.placing.profile import LayerProfile, RankProfile
from embertide.trainer.sync.placing.search import Space, propose, start_of, usual
from embertide.trainer.sync.placing.step import StepModel, Strategy, fits
from embertide.trainer.sync.placing.timeline import Task, Timeline
from embertide.trainer.sync.plan import EVERYWHERE, Ownership


def _owners(ranks: int, *owners_T: list[int]) -> Ownership:
    return Ownership(ranks, tuple(np.array(each, np.uint16) for each in owners_T))


def _step_s(made: profiles.Profile, owners: Ownership, **more: object) -> float:
    strategy = Strategy(owners, **more)  # type: ignore[arg-type]
    return StepModel(made, owners.ranks).step_s(strategy)


def test_one_rank_takes_what_its_work_takes() -> None:
    work = dataclasses.replace(
        NO_WORK, step_s=1.0, lookup_s=0.001, pool_s=0.002, give_s=0.003, update_s=0.004, adam_s=0.5
    )
    layers = (LayerProfile(name="l", parameters=2, forward_s=0.01, backward_s=0.02),)
    made = profile(ranks=(LINK,), work=work, layers=layers)
    # 1,000 events with two keys each: step, lookups, pool, forward, backward, give, apply, Adam.
    want = 1 + 2 + 4 + 10 + 20 + 6 + 8 + 1
    assert _step_s(made, _owners(1, [0], [0])) == pytest.approx(want)


def test_keys_rows_and_gradients_take_their_bytes() -> None:
    # Each rank asks the other for 500 keys: rows and gradients of 16 bytes. Keys travel meanwhile.
    exchanged = 2 * 500 * 16 / 1e6
    sums = 1000 * 4 / 1e6  # scores of all events, over two ranks
    took = _step_s(profile(), _owners(2, [0], [1]))
    assert took == pytest.approx(exchanged + sums, rel=0.3)
    half = Codecs(rows="fp16", gradients="fp16")
    saved = took - _step_s(profile(), _owners(2, [0], [1]), codecs=half)
    assert saved == pytest.approx(exchanged / 2, rel=0.3)


def test_a_table_everywhere_sends_keys_and_gradients_and_no_rows() -> None:
    model = StepModel(profile(tables=(table("a"),)), 2)
    everywhere = Strategy(_owners(2, [EVERYWHERE]))
    names = {name for _, name, _, _ in model.predict(everywhere).spans}
    assert "rows in" not in names
    assert {"keys in", "gradients in"} <= names


def test_the_net_is_summed_as_the_strategy_says() -> None:
    layers = (LayerProfile(name="l", parameters=10**6, forward_s=0, backward_s=0),)
    made = profile(layers=layers)
    owners = _owners(2, [0], [1])
    full = _step_s(made, owners)
    half = _step_s(made, owners, sync=AllReduce(values="fp16"))
    tenth = _step_s(made, owners, sync=DCT(density=0.01))
    assert full == pytest.approx(4.0, rel=0.05)
    assert half == pytest.approx(2.0, rel=0.05)
    assert tenth < 0.15


def test_a_slow_rank_is_named_as_what_bounds_the_step() -> None:
    work = dataclasses.replace(NO_WORK, update_s=0.001)
    slow = dataclasses.replace(LINK, pace=5.0)
    model = StepModel(profile(ranks=(LINK, slow), work=work), 2)
    prediction = model.predict(Strategy(_owners(2, [0], [1])))
    assert prediction.bounds[0].what == "apply of rank 1"
    # The parts of the critical path add up to the step.
    total = sum(each.seconds for each in prediction.bounds)
    assert total == pytest.approx(prediction.step_s)
    # Its bucket at the other rank: the step is shorter.
    assert model.step_s(Strategy(_owners(2, [0], [0]))) < prediction.step_s


def test_one_core_does_in_turn_what_more_do_at_a_time() -> None:
    work = dataclasses.replace(NO_WORK, route_s=0.001, give_s=0.001, publish_s=0.5)
    took = [_step_s(profile(work=work, cores=cores), _owners(2, [0], [1])) for cores in (1, 2, 3)]
    assert took[0] > took[1] > took[2]


def test_changes_give_the_times_of_a_model_that_is_made_anew() -> None:
    drawn = profile(
        ranks=tuple(dataclasses.replace(LINK, pace=1.0 + r) for r in range(4)),
        tables=(table("a", (0.4, 0.3, 0.2, 0.1)), table("b", (0.5, 0.5)), table("c")),
        work=dataclasses.replace(NO_WORK, lookup_s=0.001, update_s=0.002, give_s=0.001),
        layers=(LayerProfile(name="l", parameters=300_000, forward_s=1e-5, backward_s=1e-5),) * 3,
    )
    space = Space(
        profile=drawn,
        ranks=(4,),
        syncs=(AllReduce(), AllReduce(values="fp16"), DCT()),
        codecs=(Codecs(), Codecs(rows="int8", gradients="bf16")),
    )
    chance = random.Random(3)
    model = StepModel(drawn, 4)
    strategy = start_of(space)
    for _ in range(100):
        strategy = propose(space, strategy, chance)
        took = model.step_s(strategy)
        assert took == StepModel(drawn, 4).step_s(strategy)
        tasks = [
            Task(task.name, task.device, *(model.timeline.seconds_of(n)[:1]), task.after, lead)
            for n, task in enumerate(model.timeline.tasks)
            for lead in model.timeline.seconds_of(n)[1:]
        ]
        assert Timeline(tasks).spans() == model.timeline.spans()


def test_rows_that_do_not_fit_are_seen() -> None:
    model = StepModel(profile(budget_bytes=20_000), 2)
    assert fits(model, _owners(2, [0], [1]))
    assert not fits(model, _owners(2, [0], [0]))
    assert not fits(model, _owners(2, [EVERYWHERE], [1]))


def test_what_was_not_measured_is_said() -> None:
    made = profile()
    assert StepModel(made, 2).predict(Strategy(usual(made, 2))).beyond == ()
    strategy = Strategy(usual(made, 4), DCT(), Codecs(rows="int8"))
    said = StepModel(made, 4).predict(strategy).beyond
    assert [each.split(":")[0] for each in said] == ["4 ranks", "codec int8", "DCT"]
    large = dataclasses.replace(made, events=1 << 20)
    assert (
        "parts of 524288 events" in StepModel(large, 2).predict(Strategy(usual(large, 2))).beyond[0]
    )


def test_a_rank_that_was_not_measured_is_taken_to_be_as_the_slowest() -> None:
    fast = RankProfile(bytes_per_s=9e6, latency_s=0.0, sum_bytes_per_s=1e6)
    slow = RankProfile(pace=2.0, bytes_per_s=1e6, latency_s=0.1, sum_bytes_per_s=9e6)
    made = profile(ranks=(fast, slow))
    assert made.rank(1) is slow
    assert made.rank(7) == RankProfile(
        pace=2.0,
        bytes_per_s=1e6,
        together_bytes_per_s=2e6,
        latency_s=0.1,
        sum_bytes_per_s=1e6,
    )


def test_a_kind_of_work_has_a_pace_of_its_own() -> None:
    work = dataclasses.replace(NO_WORK, lookup_s=0.001, update_s=0.001)
    slow = dataclasses.replace(LINK, paces={"update": 5.0})
    at_first, at_second = _owners(2, [0], [0]), _owners(2, [1], [1])
    even, uneven = (profile(ranks=(LINK, each), work=work) for each in (LINK, slow))
    assert _step_s(uneven, at_first) == pytest.approx(_step_s(even, at_first))
    # Two ranks ask 500 keys of each of two tables: 2,000 updates take four times as long more.
    more = _step_s(uneven, at_second) - _step_s(even, at_second)
    assert more == pytest.approx(4 * 2000 * 0.001)


def test_a_link_whose_directions_share_it_takes_as_long_for_both() -> None:
    shared = dataclasses.replace(LINK, together_bytes_per_s=1e6)
    spread, whole = _owners(2, [0], [1]), _owners(2, [0], [0])
    of_each, of_both = (profile(ranks=(each, each)) for each in (LINK, shared))
    # Rows and gradients all go one way: nothing else is on it then.
    assert _step_s(of_both, whole) == pytest.approx(_step_s(of_each, whole), rel=0.1)
    assert _step_s(of_both, spread) == pytest.approx(2 * _step_s(of_each, spread), rel=0.2)


# --- the file -------------------------------------------------------------------------------------


def test_a_file_gives_the_profile_that_was_written(tmp_path: Path) -> None:
    work = dataclasses.replace(NO_WORK, codec_s={"fp16": 1e-9})
    made = dataclasses.replace(
        profile(work=work), step_s=0.1, measured=(("core", "lookup", 0.0, 0.5),)
    )
    profiles.write(made, tmp_path / "profile.json")
    assert profiles.read(tmp_path / "profile.json") == made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[]", "no profile"),
        ('{"format": "embertide ranks 1"}', "no profile"),
        ('{"format": "embertide step profile 1"}', "damaged"),
        ('{"format": "embertide step profile 1", "speed": 1}', "no 'speed'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        profiles.read(path)


def test_a_damaged_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profiles.write(profile(), path)
    whole = path.read_text()
    for old, new in (
        ('"lookup_s": 0', '"lookup_s": "0"'),
        ('"cores": 3', '"cores": 0'),
        ('"pace": 1.0', '"pace": NaN'),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new))
        with pytest.raises(ConfigurationError, match="damaged"):
            profiles.read(path)


def test_a_profile_of_other_tables_or_another_machine_is_refused() -> None:
    model = ModelConfig(
        name="m",
        tables=(TableConfig(name="a", dim=4), TableConfig(name="b", dim=4)),
        features=(FeatureConfig(name="a", table="a"), FeatureConfig(name="b", table="b")),
    )
    buckets = tuple(1 << each.bucket_bits for each in model.tables)
    tables = [table(name, (1.0,) * n) for name, n in zip("ab", buckets, strict=True)]
    profiles.check(profile(tables=tuple(tables)), model)
    profiles.check_machine(profile(), "a machine")
    with pytest.raises(ConfigurationError, match=r"another machine \(a machine\)"):
        profiles.check_machine(profile(), "this machine")
    with pytest.raises(ConfigurationError, match="'b' has no buckets there"):
        profiles.check(profile(tables=tuple(tables[:1])), model)
    with pytest.raises(ConfigurationError, match="'a' has 2097152 buckets there"):
        profiles.check(profile(tables=(table("a", (1.0,) * (1 << 21)), tables[1])), model)
