"""The small run whose publications lie in tests/golden, one for each checkpoint format.

Run as a program by the build of a format, in its tree, it makes them anew; by a later one, it goes
on from a copy of them, and prints how that ended:

    export PYTHONPATH=.
    python tests/support/golden_run.py make tests/golden/checkpoint-N
    python tests/support/golden_run.py go-on COPY/publication

The format of several ranks is made by two of them, and its end is that of one process that goes on:

    torchrun --standalone --nproc-per-node 2 tests/support/golden_run.py make-by-ranks OUT
    python tests/support/golden_run.py expect OUT

Bytes are the same on every x86-64 CPU: torch and MKL, which choose their instructions by the CPU,
are told before they are loaded to use what all have, by one thread.

OUT/publication is left by a run that was killed half way. OUT/expected.json tells the end of a run
that nothing stopped: sha256 of the files of its last snapshot, and what the manifest says of the
version. It covers what a checkpoint can hold: several buckets, pruning, counters, histories, the
state of Adam. It imports only what all these builds have.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from killing import Killed, train
from snapshots import snapshot_files

from embertide.trainer.config import (
    CountersConfig,
    FeatureConfig,
    ModelConfig,
    PruneConfig,
    RunConfig,
    SequenceConfig,
    TableConfig,
)
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=40, new_items_per_hour=5))
KILLED_AFTER = 8  # batches
_PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}

_TABLES = {"user": "user", "prev": "article", "cand": "article"}
_COUNTERS = CountersConfig(feature="cand", half_lives_s=(600, 3600))
MODEL = ModelConfig(
    name="golden",
    tables=(
        TableConfig(name="user", dim=8, chunks=2, bucket_bits=1),
        TableConfig(name="article", dim=8, chunks=2, bucket_bits=1, counters=_COUNTERS),
        TableConfig(name="rest", dim=8, chunks=2),
    ),
    features=tuple(
        FeatureConfig(name=feature.name, table=_TABLES.get(feature.name, "rest"))
        for feature in NEWS.schema.features
    ),
    sequences=(SequenceConfig(name="hist", user="user", item="cand", length=3, users=100),),
    net="history",
    bottom_mlp=(4,),
    top_mlp=(8,),
    attention_mlp=(4,),
)


def _pruning(**settings: Any) -> PruneConfig:
    """Pruning as it was in format 5, whatever the defaults are."""
    known = {field.name for field in dataclasses.fields(PruneConfig)}
    return PruneConfig(**{name: value for name, value in settings.items() if name in known})


RUN = RunConfig(
    model=MODEL,
    prune=_pruning(
        bytes=8_000,
        utility="squares",
        counts_worth=0.0,
        half_life=20,
        first=(3,),
        every=5,
        least=2,
        waiting_bytes=512,
    ),
    batch_size=24,
    publish_every_s=600,
    snapshot_every=4,
)


def empty(path: Path) -> Publication:
    """A publication without versions, with a program that is none: no test serves it."""
    path.mkdir(parents=True)
    (path / "program.pt2").write_bytes(b"no program")
    return Publication(path)


def end(publication: Publication) -> dict[str, Any]:
    """Return what two runs must share: the files of the newest snapshot, and its version."""
    snapshot = publication.snapshot_path(publication.snapshots()[-1])
    files = snapshot_files(snapshot)
    manifest = json.loads(files.pop("manifest.json"))
    named = {name: manifest[name] for name in ("version", "watermark_ms", "schema_id", "dense_id")}
    return {**named, "files": {n: hashlib.sha256(data).hexdigest() for n, data in files.items()}}


def make(out: Path) -> None:
    """Leave a publication half way, and what a whole run ends with."""
    train(RUN, NEWS, empty(out / "publication"), KILLED_AFTER)
    whole = empty(out / "whole")
    train(RUN, NEWS, whole)
    (out / "expected.json").write_text(json.dumps(end(whole), indent=1, sort_keys=True) + "\n")
    shutil.rmtree(whole.path)


def make_by_ranks(out: Path) -> None:
    """Leave a publication half way, as one of the ranks that torchrun started."""
    from embertide.trainer.sync.ranks import Ranks

    ranks = Ranks.join()
    path = out / "publication"
    publication = empty(path) if ranks.first else Publication(path)
    trainer = Trainer(RUN, publication, ranks=ranks)
    learn, left = trainer.learner.learn, KILLED_AFTER

    def learn_some(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return learn(*arguments)

    trainer.learner.learn = learn_some  # type: ignore[method-assign, assignment]
    with contextlib.suppress(Killed):
        trainer.fit(NEWS)


def expect(out: Path) -> None:
    """Note how one process that goes on ends."""
    copy = out / "copy"
    shutil.copytree(out / "publication", copy)
    ended = go_on(copy)["end"]
    (out / "expected.json").write_text(json.dumps(ended, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(copy)


def go_on(path: Path) -> dict[str, Any]:
    """Go on with a run, and say where it was and how it ended."""
    publication = Publication(path)
    trainer = Trainer(RUN, publication)
    begun = {
        "number": trainer.state.number,
        "changes": len(trainer.state.changes),
        "done": trainer.state.done,
    }
    trainer.fit(NEWS)
    return {**begun, "passes": trainer.state.rows.passes, "end": end(publication)}


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in _PORTABLE.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_PORTABLE})
    done = {"make": make, "make-by-ranks": make_by_ranks, "expect": expect}.get(sys.argv[1])
    if done is not None:
        done(Path(sys.argv[2]))
    else:
        print(json.dumps(go_on(Path(sys.argv[2]))))
