"""Where a run begins: at nothing, or at the newest checkpoint of its publication that is whole."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from embertide.trainer.checkpoint import checkpoint as checkpoints
from embertide.trainer.checkpoint.checkpoint import Checkpoint, CheckpointError, SavedCheckpoint
from embertide.trainer.checkpoint.settings import check_allowed, differences, remember
from embertide.trainer.config import RunConfig
from embertide.trainer.forking import Fork, Forked, fork
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.state import RunState
from embertide.trainer.sync import plan
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    """What a run goes on from.

    Attributes:
        state: As of then.
        version: Whose checkpoint it is; None: there was none.
        harmed: Checkpoints that were put aside on the way.
        forked: What came of another run; None: nothing did.
    """

    state: RunState
    version: VersionId | None
    harmed: int
    forked: Forked | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resuming:
    """What decides where a run begins.

    Attributes:
        run: The configuration.
        publication: Where its checkpoints are.
        ranks: Those of the run.
        channel: Of the training threads of all ranks.
        allow_change: Paths of settings that may differ from the checkpoint's.
        plan_file: Who owns which bucket; None: as much for each rank, by what was measured.
        fork: Whose state a run begins with, where the publication has none; None: nobody's.
    """

    run: RunConfig
    publication: Publication
    ranks: Ranks
    channel: Channel
    allow_change: Sequence[str] = ()
    plan_file: Path | None = None
    fork: Fork | None = None

    def begin(self) -> Beginning:
        """Resume the newest checkpoint; harmed ones are put aside, and the one before is taken.

        All ranks call it together.

        Raises:
            CheckpointError: The publication holds a run of another configuration, or versions and
                no checkpoint that is whole.
            ConfigurationError: `allow_change` names no setting, or one that cannot change.
        """
        check_allowed(self.allow_change)
        harmed_checkpoints = 0
        while True:
            harmed: tuple[int, int, str] | None = None
            state: RunState | None = None
            # The first says which: on a network's file system others may not see it yet.
            with self.channel.together():
                newest = checkpoints.newest(self.publication) if self.ranks.first else None
            named = self.channel.gather(newest)[0]
            version = None if named is None else VersionId(*named)
            with self.channel.together():
                try:
                    state = self._resumed(version)
                except checkpoints.HarmedCheckpointError as error:
                    harmed = (*error.version, str(error))
            # What one rank finds harmed, none goes on from.
            found = [each for each in self.channel.gather(harmed) if each is not None]
            if state is not None and not found:
                forked = None
                if version is None and self.fork is not None:
                    with self.channel.together():
                        forked = fork(state, self.fork)
                return Beginning(state, version, harmed_checkpoints, forked)
            number, lineage, words = found[0]
            harmed_checkpoints += 1
            with self.channel.together():
                if self.ranks.first:
                    aside = checkpoints.put_aside(self.publication, VersionId(number, lineage))
                    log.error(
                        "%s: the checkpoint of version %d is put aside as %s, and the run goes on "
                        "from the one before, with what came after it",
                        words,
                        number,
                        aside,
                    )

    def _owners(self, saved: Checkpoint | None) -> Ownership:
        """Return who owns what: as the plan says, or by what was measured up to a checkpoint."""
        if self.plan_file is not None:
            return plan.read(self.plan_file, self.run.model, self.ranks.size)
        if saved is not None and self.run.prune is not None:
            # What pruning remembers is by rank.
            before = plan.parsed(saved.plan, self.run.model, self.ranks.size)
            if before is not None:
                return before
        load = saved.load if saved is not None and saved.load else None
        return plan.balanced(self.run.model, self.ranks.size, load)

    def _resumed(self, version: VersionId | None) -> RunState:
        if version is not None and not checkpoints.is_complete(self.publication, version):
            raise CheckpointError(
                f"the first rank goes on from the checkpoint of version {version.number}, which is "
                f"not in {self.publication.path} here: give all ranks one folder"
            )
        if version is None:
            if self.publication.versions():
                raise CheckpointError(
                    f"{self.publication.path} holds versions but no checkpoint to go on from: bring"
                    " its checkpoints/ back (harmed ones end in .harmed), or train in a new folder;"
                    " nodes serve this one as it is, so keep it until they follow the new one"
                )
            return RunState(self.run, self.ranks, self._owners(None))
        found = SavedCheckpoint(self.publication, version)
        saved = found.checkpoint
        differing = differences(saved.config, self.run, saved.changed)
        for each in differing:
            if each.path not in self.allow_change:
                raise CheckpointError(f"{self.publication.path} was trained with {each}")
            log.warning(
                "%s changes from %r to %r after version %d",
                each.path,
                each.saved,
                each.value,
                version.number,
            )
        state = RunState(self.run, self.ranks, self._owners(saved))
        state.changes = remember(saved.changes, version.number, differing)
        state.restore(found)
        log.info("resumed at event %d, version %d", state.offset, state.number)
        return state
