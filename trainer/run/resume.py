"""Where a run begins: at nothing, or at the newest checkpoint of its publication that is whole."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from embertide._common.quoting import terminal_text
from embertide.trainer.config import RunConfig
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.origin import FolderOrigin
from embertide.trainer.publish.snapshot import read_manifest
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import Checkpoint, CheckpointError, SavedCheckpoint
from embertide.trainer.run.checkpoint.settings import check_allowed, differences, remember
from embertide.trainer.run.fork import Fork, Forked, carry_over, fork
from embertide.trainer.run.state import RunState
from embertide.trainer.sync import plan
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class StartState:
    """The state that a run goes on from.

    Attributes:
        state: As of then.
        version: The version of the checkpoint; None: there was none.
        saved: That checkpoint, its rows as they were read.
        harmed: Checkpoints that were put aside on the way.
        forked: The state carried over from another run or model; None: none was.
        changed: Whether the publication's versions were of another model until now.
    """

    state: RunState
    version: VersionId | None
    harmed: int
    forked: Forked | None = None
    changed: bool = False
    saved: SavedCheckpoint | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resumer:
    """Decides where a run begins.

    Attributes:
        run: The configuration.
        publication: Where its checkpoints are.
        ranks: Those of the run.
        channel: Channel of the training threads of all ranks.
        allow_change: Paths of settings that may differ from the checkpoint's.
        plan_file: Who owns which bucket; None: as much for each rank, by what was measured.
        owners: Who owns which bucket, in place of a file; None: nothing says so.
        fork: The run whose state a new one begins with, where the publication has none; None:
            nobody's.
        change_model: Whether the model may be another one than the checkpoint's.
    """

    run: RunConfig
    publication: Publication
    ranks: Ranks
    channel: Channel
    allow_change: Sequence[str] = ()
    plan_file: Path | None = None
    owners: Ownership | None = None
    fork: Fork | None = None
    change_model: bool = False

    def begin(self) -> StartState:
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
            start: StartState | None = None
            # The first says which: on a network's file system others may not see it yet.
            with self.channel.together():
                newest = checkpoints.newest(self.publication) if self.ranks.first else None
            named = self.channel.gather(newest)[0]
            version = None if named is None else VersionId(*named)
            with self.channel.together():
                try:
                    start = self._resumed(version)
                except checkpoints.HarmedCheckpointError as error:
                    harmed = (*error.version, str(error))
            # No rank goes on from a checkpoint that one rank finds harmed.
            found = [each for each in self.channel.gather(harmed) if each is not None]
            if start is not None and not found:
                if version is None and self.fork is not None:
                    with self.channel.together():
                        forked = fork(start.state, self.fork)
                    start = dataclasses.replace(start, forked=forked)
                return dataclasses.replace(start, harmed=harmed_checkpoints)
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
        if self.owners is not None:
            return self.owners
        if self.plan_file is not None:
            return plan.read(self.plan_file, self.run.model, self.ranks.size)
        if saved is not None and self.run.prune is not None:
            # The memory of pruning is by rank.
            before = plan.parsed(saved.plan, self.run.model, self.ranks.size)
            if before is not None:
                return before
        load = saved.load if saved is not None and saved.load else None
        return plan.balanced(self.run.model, self.ranks.size, load)

    def _resumed(self, version: VersionId | None) -> StartState:
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
            return StartState(RunState(self.run, self.ranks, self._owners(None)), None, 0)
        found = SavedCheckpoint(self.publication, version)
        saved = found.checkpoint
        differing = differences(saved.config, self.run, saved.changed)
        refused = [each for each in differing if each.path not in self.allow_change]
        first_alone = self._publishes_the_first_head_alone(found.snapshot)
        changes_model = self.change_model and (
            first_alone or any(each.changes_the_model for each in refused)
        )
        for each in refused:
            if not (changes_model and each.changes_the_model):
                raise CheckpointError(
                    f"{self._named(saved)} was trained with {each}; give it so, or "
                    f"--allow-change {each.path}"
                )
        if first_alone and not changes_model:
            raise CheckpointError(
                f"{self.publication.path} publishes the score of its first head alone, as builds "
                "before this one did: go on with --change-model, which publishes those of all, or "
                "--fork it into a new folder"
            )
        for each in differing:
            log.warning("%s after version %d", each.change(), version.number)
        if changes_model:
            self._check_change(version, found.snapshot)
        state = RunState(self.run, self.ranks, self._owners(None if changes_model else saved))
        state.changes = remember(saved.changes, version.number, differing)
        if changes_model:
            forked = carry_over(state, found, self.publication.path, keep_place=True)
            state.number = version.number
            state.generation = self.publication.versions()[-1].number + 1
            return StartState(state, None, 0, forked, changed=True)
        state.restore(found)
        log.info("resumed at event %d, version %d", state.offset, state.number)
        return StartState(state, version, 0, saved=found)

    def _named(self, saved: Checkpoint) -> str:
        """Name the folder; of one with another model or other events, what it is of."""
        origin = FolderOrigin.of(saved.origin)
        model = f"model {origin.model!r}" if origin.model else ""
        known = ", ".join(each for each in (model, terminal_text(origin.events)) if each)
        return f"{self.publication.path} ({known})" if known else str(self.publication.path)

    def _publishes_the_first_head_alone(self, of: VersionId) -> bool:
        if self.run.model.outputs == 1:
            return False
        snapshot = self.publication.snapshot_path(of)
        return snapshot.exists() and "heads" not in read_manifest(snapshot)

    def _check_change(self, version: VersionId, of: VersionId) -> None:
        """Refuse to change a model whose newest version is not the checkpoint's.

        Args:
            version: The version of the checkpoint.
            of: The version of the snapshot with its rows.

        Raises:
            CheckpointError: It is not, or the run holds rows back.
        """
        newest = self.publication.versions()[-1]
        schema = read_manifest(self.publication.snapshot_path(of))["schema_id"]
        if (
            newest.number > version.number  # but for a change that was killed before its snapshot
            and self.publication.read_commit(newest).commit.schema_id == schema
        ):
            raise CheckpointError(
                f"{self.publication.path} has version {newest.number}, and its newest checkpoint is"
                f" of {version.number}: start the run once more with its own settings and stop it"
                " (SIGTERM), then change the model"
            )
        if self.run.publish_budget is not None:
            raise CheckpointError(
                "a run with a publish_budget cannot change its model in place: --fork it into a new"
                " folder"
            )
