"""A run's measurements of itself: by user and slice, and events that it never learns from."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from embertide.trainer.config import EvalConfig, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.eval.grouped import gauc
from embertide.trainer.eval.metrics import summarise
from embertide.trainer.eval.monitor import Monitor
from embertide.trainer.model.learner import Learner, Prepared
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=100, users=60))
NAMES = [feature.name for feature in news_model().features]
MEASURED = EvalConfig(
    user="user", slices=("hour_of_day", "device"), hold_out=0.2, hold_out_by="user", most_values=2
)


def everything() -> Batch:
    return next(NEWS.batches(batch_size=NEWS.total_events() or 0))


def held_mask(config: EvalConfig, batch: Batch) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    return Monitor(config, NAMES).is_held_out(batch)


def test_a_hold_out_is_the_share_asked_for_and_depends_on_nothing_else() -> None:
    batch = everything()
    by_event = held_mask(EvalConfig(hold_out=0.2), batch)
    assert by_event.mean() == pytest.approx(0.2, abs=4 * (0.16 / len(batch)) ** 0.5)
    parts = NEWS.batches(batch_size=50)
    again = np.concatenate([held_mask(EvalConfig(hold_out=0.2), part) for part in parts])
    assert (again == by_event).all()
    by_user = held_mask(MEASURED, batch)
    users = batch.keys_BF[:, NAMES.index("user")]
    assert not set(users[by_user]) & set(users[~by_user])
    assert 0 < by_user.mean() < 0.5
    assert not held_mask(EvalConfig(), batch).any()


def test_a_resumed_run_holds_out_the_same_events_and_learns_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig(
        model=news_model(),
        batch_size=64,
        publish_every_s=600,
        snapshot_every=2,
        evaluation=MEASURED,
    )
    learned: list[Batch] = []
    scores: list[object] = []
    learn, kill_after = Learner.learn, 10**9

    def noting(self: Learner, batch: Batch | Prepared, *more: object) -> object:
        if len(learned) == kill_after:
            raise KeyboardInterrupt
        ready = batch if isinstance(batch, Prepared) else self.prepare(batch)
        learned.append(ready.batch)
        scores.append(learn(self, ready))
        return scores[-1]

    monkeypatch.setattr(Learner, "learn", noting)
    whole = Trainer(run, Publication(tmp_path / "whole"), program_cache=CACHE)
    whole.fit(NEWS)
    batch = everything()
    held = held_mask(MEASURED, batch)
    events = np.concatenate([each.event_B for each in learned])
    assert events.tolist() == batch.event_B[~held].tolist()
    assert whole.state.events + int(held.sum()) == len(batch)
    of_held = whole.state.monitor.held.daily_summaries()
    assert sum(each.events for each in of_held.values()) == int(held.sum())

    users, labels = batch.keys_BF[~held][:, NAMES.index("user")], batch.label_B[~held]
    score = np.concatenate([np.asarray(each) for each in scores])
    wanted = gauc(users, labels, score)
    quality = whole.state.monitor.quality(whole.state.prequential)
    assert whole.state.monitor.daily_gauc() == {0: pytest.approx(wanted.gauc, abs=1e-12)}
    exact = summarise(labels, score)
    assert quality["prequential"]["normalised_entropy"] == pytest.approx(exact.normalised_entropy)
    slices = whole.state.monitor.slices()
    assert list(slices) == ["hour_of_day", "device"]
    assert set(slices["hour_of_day"]) == {"0", "1"}
    for hour in (0, 1):
        mine = batch.ts_ms_B[~held] // 3_600_000 == hour
        of_hour = summarise(labels[mine], score[mine])
        assert slices["hour_of_day"][str(hour)]["events"] == int(mine.sum())
        assert slices["hour_of_day"][str(hour)]["log_loss"] == pytest.approx(of_hour.log_loss)

    kill_after = len(learned) * 8 // 5
    with pytest.raises(KeyboardInterrupt):
        Trainer(run, Publication(tmp_path / "cut"), program_cache=CACHE).fit(NEWS)
    kill_after = 10**9
    resumed = Trainer(run, Publication(tmp_path / "cut"), program_cache=CACHE)
    assert resumed.state.monitor.held.daily()
    resumed.fit(NEWS)
    assert resumed.state.monitor.held.daily_summaries() == of_held
    assert resumed.state.monitor.daily_gauc() == whole.state.monitor.daily_gauc()
    assert json.dumps(resumed.state.monitor.slices()) == json.dumps(slices)


def test_figures_begin_again_with_a_day() -> None:
    monitor = Monitor(EvalConfig(user="user", slices=("device",)), NAMES)
    batch = everything()
    score = np.full(len(batch), 0.5, np.float32)
    monitor.add(batch, score)
    later = dataclasses.replace(batch, ts_ms_B=batch.ts_ms_B + 86_400_000)
    monitor.add(later, score)
    assert monitor.daily_gauc() == {0: 0.5, 1: 0.5}
    assert sum(each["events"] for each in monitor.slices()["device"].values()) == len(batch)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"user": "nobody"}, "evaluation names 'nobody'; the features of one key are user"),
        ({"slices": ("device", "colour")}, "evaluation names 'colour'"),
        ({"hold_out": 1.0}, "hold_out is 1.0"),
        ({"hold_out_by": "user"}, "hold_out is 0; give a share"),
        ({"slices": ("device", "device")}, "8 different ones at most"),
        ({"most_values": 0}, "most_values is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig(model=news_model(), evaluation=EvalConfig(**settings))  # type: ignore[arg-type]
