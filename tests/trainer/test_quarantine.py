"""A batch that would make the net not finite costs itself; nothing else is lost, or not finite."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import CACHE, Killed
from shop import RUN, Shop
from snapshots import newest_files

from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.errors import TrainerError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run import quarantine
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

# No dense feature is clipped, so that an absurd price reaches the net.
BARE = tuple(dataclasses.replace(each, steps=(), missing=False) for each in RUN.model.dense)
PLAIN = dataclasses.replace(
    RUN, model=dataclasses.replace(RUN.model, dense=BARE), publish_every_s=600, snapshot_every=3
)


class Poisoned(EventSource):
    """A shop some of whose prices no net stands."""

    def __init__(self, prices: dict[int, float]) -> None:
        self._shop, self._prices = Shop(), prices
        self.schema, self.dead_letters = self._shop.schema, self._shop.dead_letters

    def total_events(self) -> int | None:
        return self._shop.total_events()

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        for batch in self._shop.batches(batch_size=batch_size, start=start):
            dense_BD = batch.dense_BD.copy()
            for event, price in self._prices.items():
                dense_BD[batch.event_B == event, 0] = price
            yield dataclasses.replace(batch, dense_BD=dense_BD)


class Without(EventSource):
    """A source without some of its events."""

    def __init__(self, source: EventSource, events: set[int]) -> None:
        self._source, self._events = source, list(events)
        self.schema, self.dead_letters = source.schema, source.dead_letters

    def total_events(self) -> int | None:
        return None

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        arrays = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")
        for batch in self._source.batches(batch_size=batch_size, start=start):
            keep_B = ~np.isin(batch.event_B, self._events)
            left = {name: getattr(batch, name)[keep_B] for name in arrays}
            if keep_B.any():
                yield dataclasses.replace(batch, first=int(left["event_B"][0]), **left)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled net, which all runs share."""
    publication = Publication(tmp_path_factory.mktemp("program") / "pub")
    Trainer(PLAIN, publication, program_cache=CACHE)
    return publication.program


@pytest.fixture
def folder(program: Path, tmp_path: Path) -> list[Publication]:
    """Three empty publications with the program."""
    made = []
    for name in "abc":
        (tmp_path / name).mkdir()
        shutil.copyfile(program, tmp_path / name / "program.pt2")
        made.append(Publication(tmp_path / name))
    return made


# These are all events of their times; for some, whatever their label, the loss is no number.
BAD = dict.fromkeys((*range(400, 405), *range(700, 705)), 3e38)


def test_a_poisoned_batch_is_as_if_it_had_not_been(folder: list[Publication]) -> None:
    trainer = Trainer(PLAIN, folder[0], program_cache=CACHE)
    seen: list[Progress] = []
    trainer.fit(Poisoned(BAD), progress=seen.append, every_s=0)
    stats = trainer.quarantine.stats
    assert stats.batches == 2
    assert seen[-1].set_aside["batches"] == 2
    lines = [json.loads(line) for line in folder[0].set_aside.read_text().splitlines()]
    without = Trainer(PLAIN, folder[1], program_cache=CACHE)
    without.fit(Without(Poisoned(BAD), {line["event"] for line in lines}))
    assert without.quarantine.stats.batches == 0
    assert newest_files(folder[0]) == newest_files(folder[1])
    assert trainer.state.events == without.state.events
    assert (
        trainer.state.prequential.daily_summaries() == without.state.prequential.daily_summaries()
    )
    assert len(lines) == stats.events < 100
    assert BAD.keys() <= {line["event"] for line in lines}
    worst = next(line for line in lines if line["event"] == 400)
    assert worst["dense"][0] == pytest.approx(3e38)
    assert worst["reason"] in ("loss not finite", "gradients not finite")


def test_a_run_killed_after_a_poisoned_batch_ends_as_one_never_killed(
    folder: list[Publication],
) -> None:
    Trainer(PLAIN, folder[0], program_cache=CACHE).fit(Poisoned(BAD))

    def die(progress: Progress) -> None:
        if progress.set_aside["batches"] == 2:
            raise Killed

    with pytest.raises(Killed):
        Trainer(PLAIN, folder[1], program_cache=CACHE).fit(Poisoned(BAD), progress=die, every_s=0)
    Trainer(PLAIN, folder[1], program_cache=CACHE).fit(Poisoned(BAD))
    assert newest_files(folder[0]) == newest_files(folder[1])


def test_too_many_in_a_row_end_the_run_and_the_last_finite_state_is_out(
    folder: list[Publication],
) -> None:
    run = dataclasses.replace(PLAIN, most_set_aside=3)
    trainer = Trainer(run, folder[0], program_cache=CACHE)
    with pytest.raises(TrainerError, match=r"4 batches in a row, events 980 to"):
        trainer.fit(Poisoned(dict.fromkeys(range(1000, 1500), 3e38)))
    assert trainer.versions.publisher.newest == folder[0].versions()[-1]
    assert trainer.state.number > 3
    for tensor in trainer.learner.net.state_dict().values():
        assert torch.isfinite(tensor).all()


def test_a_net_that_is_not_finite_is_not_published(folder: list[Publication]) -> None:
    trainer = Trainer(PLAIN, folder[0], program_cache=CACHE)

    def break_it(progress: Progress) -> None:
        if progress.events > 600:
            with torch.no_grad():
                next(trainer.learner.net.parameters()).fill_(float("inf"))

    with pytest.raises(TrainerError, match=r"tensor .* of the net is not finite"):
        trainer.fit(Poisoned({}), progress=break_it, every_s=0)
    newest = folder[0].versions()[-1]
    assert newest.number == trainer.state.number - 1 > 3
    assert newest == trainer.versions.publisher.newest


def test_the_file_of_what_was_put_aside_has_a_bound(
    folder: list[Publication], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "_MAX_BYTES", 2000)
    trainer = Trainer(PLAIN, folder[0], program_cache=CACHE)
    trainer.fit(Poisoned(BAD))
    stats = trainer.quarantine.stats
    assert folder[0].set_aside.stat().st_size <= 2000
    kept = len(folder[0].set_aside.read_text().splitlines())
    assert kept + stats.events_not_kept == stats.events
    assert stats.events_not_kept > 0


def test_a_full_drive_does_not_end_the_run(folder: list[Publication]) -> None:
    folder[0].set_aside.symlink_to("/dev/full")
    trainer = Trainer(PLAIN, folder[0], program_cache=CACHE)
    trainer.fit(Poisoned(BAD))
    stats = trainer.quarantine.stats
    assert stats.events_not_kept == stats.events > 0
