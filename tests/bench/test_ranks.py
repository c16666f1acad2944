"""The step of ranks that is measured, with small tables."""

import pytest

from bench.ranks import batches, ours
from bench.shapes import Shape
from embertide.trainer.config import AllReduce, Codecs
from embertide.trainer.sync.ranks import Ranks


def test_a_step_is_timed_and_every_rank_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batches, ours):
        monkeypatch.setattr(module, "ROWS", 500)
    monkeypatch.setattr(ours, "_SHAPE", Shape(name="small", rows=500))

    def measured() -> dict[str, object]:
        how = {"threads": 1, "warmup": 1, "steps": 2, "windows": 2, "seed": 3}
        return ours.measure(Ranks.join(), 64, codecs=Codecs(), sync=AllReduce(), **how)

    said = [measured() for _ in range(2)]
    assert said[0]["loss"] == said[1]["loss"]
    rates = said[0]["samples_per_s"]
    assert isinstance(rates, list)
    assert len(rates) == 2
    assert min(rates) > 0
    drawn = batches.draw(3, 1, 64)
    assert 0 <= drawn.keys_BF.min() <= drawn.keys_BF.max() < 500
    parts = [drawn.part(rank, 4) for rank in range(4)]
    assert [len(part.label_B) for part in parts] == [16] * 4
    with pytest.raises(ValueError, match="cannot be split"):
        drawn.part(0, 3)
