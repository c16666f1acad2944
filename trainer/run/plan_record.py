"""The record of a run with `--plan auto`: a file of its folder, by which the next start goes on.

    PUB/plan-auto.json    the fields of `PlanRecord`, as JSON

    (no file)  profile, search --+-- none: nothing pays, or nothing can be measured
                                 +-- trial: ranks started again with a plan --+-- kept
                                                                              +-- refused

A run that is killed before the file is there profiles and searches anew; one that is killed in a
trial begins the trial again. A record of other ranks, tables or another machine counts for nothing.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_args

from embertide.trainer.config import ModelConfig
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.folder import sync_folder, write_synced
from embertide.trainer.sync import plan
from embertide.trainer.sync.plan import Ownership

FILE = "plan-auto.json"
Stage = Literal["profile", "search", "trial", "kept", "refused", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """The stage of a run's search for a plan, and its figures.

    Attributes:
        stage: "profile" and "search" are of a running process and never in the file.
        ranks: The number of ranks that it is of.
        machine: The first rank's, in words.
        plan: The plan that was found, as its file has it; empty: none.
        searched: Plans that the search timed; 0: it has not ended, or has failed.
        default_s: A step without the plan, the median of those measured; 0: not measured.
        predicted_s: A step with the plan, as the search predicts it.
        measured_s: A step with the plan, the median of those measured.
        profile_s: Time that training stood still for the profile.
        stopped_at_s: When the ranks ended, in seconds of the epoch; 0: they did not.
        stop_s: Time from there to the first step with the plan.
        why: The reason, in words.
    """

    stage: Stage = "profile"
    ranks: int = 1
    machine: str = ""
    plan: str = ""
    searched: int = 0
    default_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    profile_s: float = 0.0
    stopped_at_s: float = 0.0
    stop_s: float = 0.0
    why: str = ""

    @property
    def is_open(self) -> bool:
        """Whether nothing is decided yet."""
        return self.stage in ("profile", "search", "trial")

    def owners(self, model: ModelConfig) -> Ownership | None:
        """Return who owns what, if that is by the plan; None: as without one.

        Raises:
            ConfigurationError: The plan is not for the model's tables.
        """
        if self.stage not in ("trial", "kept"):
            return None
        named = set(json.loads(self.plan)["tables"])
        tables = {table.name for table in model.tables}
        if named != tables:
            raise ConfigurationError(
                f"it names {sorted(named)}, and the model has {sorted(tables)}"
            )
        return plan.parsed(self.plan, model, self.ranks)

    def figures(self) -> dict[str, Any]:
        """Return what people and programs are shown of it."""
        names = "stage searched default_s predicted_s measured_s profile_s stop_s why"
        return {name: getattr(self, name) for name in names.split()}

    def write(self, folder: Path) -> None:
        """Write it to a folder; it is on the drive when this returns.

        Raises:
            OSError: It cannot be written.
        """
        partial = folder / f".{FILE}"
        write_synced(partial, json.dumps(dataclasses.asdict(self)).encode())
        partial.rename(folder / FILE)
        sync_folder(folder)  # else a crash of the machine may bring the record before back


def read(folder: Path, model: ModelConfig, ranks: int, machine: str) -> tuple[PlanRecord, str]:
    """Return the record that a start goes on by, and why that of the folder counts for nothing.

    The reason is empty where there is none, or where it counts.
    """
    fresh = PlanRecord(ranks=ranks, machine=machine)
    try:
        said: Any = json.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        return fresh, ""
    except (OSError, ValueError, RecursionError) as error:
        return fresh, f"it cannot be read: {error}"
    names = {field.name: type(getattr(fresh, field.name)) for field in dataclasses.fields(fresh)}
    if (
        not isinstance(said, dict)
        or set(said) != set(names)
        or any(type(said[name]) is not kind for name, kind in names.items())
        or said["stage"] not in get_args(Stage)
    ):
        return fresh, "it is no record of a search"
    found = PlanRecord(**said)
    if found.ranks != ranks:
        return fresh, f"it is of {found.ranks} ranks, and {ranks} were started"
    if found.machine != machine:
        return fresh, f"it is of another machine ({found.machine})"
    try:
        owners = found.owners(model)
    except (ConfigurationError, ValueError, KeyError, TypeError) as error:
        return fresh, f"its plan is not for these tables: {error}"
    if owners is None and found.stage in ("trial", "kept"):
        return fresh, "its plan is not for these ranks"
    return found, ""
