"""`chaos`: harm a fleet of its own by a seed, and say what its users would have seen."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table
from embertide.server.cli.chaos.faults import draw, kinds
from embertide.server.cli.chaos.options import ChaosError, ChaosOptions
from embertide.server.cli.chaos.report import (
    PAGE_FILE,
    REPORT_FILE,
    ROUNDS_FILE,
    add_round,
    read_rounds,
    write_report,
)
from embertide.server.cli.chaos.rounds import Chaos, line
from embertide.server.cli.common_options import (
    DEFAULT_BACKENDS,
    DEFAULT_CACHE,
    Backends,
    Json,
    Triton,
)

_MOUNTED = "EMBERTIDE_CHAOS_MOUNTED"  # set in the process that has a file system of its own
_DISK_MIB = 256  # snapshots of some minutes; it lies in memory
_FAKETIME = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")


def _clock_library() -> Path | None:
    found = (path for pattern in _FAKETIME for path in Path("/").glob(pattern.lstrip("/")))
    return next(found, None)


def _mount(publication: Path) -> bool:
    """Run this command again with a small file system at `publication`; does not return then.

    Returns False where the system does not let us.
    """
    command = ["unshare", "--mount", "--map-root-user", "--user"]
    if os.geteuid() == 0:
        command = command[:2]
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    if tried.returncode:
        return False
    publication.mkdir(parents=True, exist_ok=True)
    script = f'mount -t tmpfs -o size={_DISK_MIB}m chaos "$0" && exec "$@"'
    again = [sys.executable, "-m", "embertide.server.cli", *sys.argv[1:]]
    os.environ[_MOUNTED] = str(publication.resolve())
    os.execvp(command[0], [*command, "sh", "-c", script, str(publication), *again])


def _show_plan(seeds: Sequence[int], without: list[str]) -> None:
    for seed in seeds:
        say(f"seed {seed}")
        for fault in draw(seed, without):
            say(f"  {fault.line()}")


def _show_kinds() -> None:
    table = Table("kind", "of", "what happens")
    for kind in kinds():
        table.add_row(kind.name, ", ".join(kind.targets) or "the machine", kind.about)
    show_table(table)


def _run(options: ChaosOptions, seeds: list[int], done: list[dict[str, Any]]) -> dict[str, Any]:
    began = time.monotonic()
    if seeds:
        with Chaos(options, lambda text: say(f"== {text}", err=True)) as chaos:
            for count, seed in enumerate(seeds, 1):
                said = chaos.run(seed)
                done.append(add_round(options.directory, said))
                say(f"{count}/{len(seeds)} {line(said)}", err=True)
                for each in said.violations:
                    say(f"    error: {each}", err=True)
                minutes = (time.monotonic() - began) / 60
                if options.minutes is not None and minutes > options.minutes:
                    say(f"== {options.minutes:g} minutes are over", err=True)
                    break
    return write_report(options, done)


def command(
    seed: Annotated[
        list[int] | None,
        typer.Option(
            help="Seed of the first round, by default 1; each later round adds 1. Given several "
            "times: the seeds of all rounds."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds.", min=1)] = 10,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no round after so many minutes.", min=0.0)
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="A kind of fault to leave out; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of everything that it writes.")] = Path(
        "build/chaos"
    ),
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Events to learn from; without it, synthetic news."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A run's file for those events, as `embertide train --config` takes it."),
    ] = None,
    events_per_s: Annotated[float, typer.Option(help="How fast events happen.", min=1.0)] = 400.0,
    version_s: Annotated[int, typer.Option(help="Event time between versions, in s.", min=1)] = 60,
    clients: Annotated[int, typer.Option(help="Clients of each node.", min=1)] = 2,
    samples: Annotated[int, typer.Option(help="Samples of a request.", min=1)] = 32,
    pause_ms: Annotated[
        float, typer.Option(help="From an answer to a client's next request.", min=0.0)
    ] = 20.0,
    heal_s: Annotated[
        float, typer.Option(help="A round in which the fleet takes longer to heal has failed.")
    ] = 60.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out the rounds that --out has already.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would happen to whom, and when.")
    ] = False,
    list_kinds: Annotated[
        bool, typer.Option("--kinds", help="Print what faults there are.")
    ] = False,
    clocks: Annotated[
        bool,
        typer.Option(
            "--clocks",
            help="Set clocks wrong, too: by libfaketime, which slows every process down all the "
            "time.",
        ),
    ] = False,
    backends: Backends = DEFAULT_BACKENDS,
    triton: Triton = None,
    as_json: Json = False,
) -> None:
    """Inject seeded faults into a fleet, check every answer, and see that it heals by itself.

    Starts a trainer, a control plane, two Triton nodes, two Redis and clients on free ports, all of
    its own. In each round, faults follow from the round's seed: processes are killed and stopped,
    links cut, delayed and corrupted, Redis emptied and filled. Exit status 1: a round has failed.

    Example: embertide chaos --rounds 20, and one of them again: embertide chaos --seed 7 --rounds 1
    """
    given = seed or [1]
    seeds = given if len(given) > 1 else list(range(given[0], given[0] + rounds))
    leave_out = list(without or ())
    with report_errors(as_json):
        unknown = set(leave_out) - {kind.name for kind in kinds()}
        if unknown:
            raise ChaosError(f"--without {', '.join(sorted(unknown))}: see --kinds for the names")
        if list_kinds:
            _show_kinds()
            return
        if dry_run:
            _show_plan(seeds, leave_out)
            return
        publication = out / "publication"
        mounted = os.environ.get(_MOUNTED) == str(publication.resolve())
        if not mounted and "disk-full" not in leave_out and not _mount(publication):
            say("== no mount namespaces here: no disk will be full", err=True)
            leave_out.append("disk-full")
        clock = _clock_library() if clocks else None
        if clocks and clock is None:
            raise ChaosError("--clocks needs libfaketime: install the package faketime")
        if clock is None:
            leave_out.append("clock")
        options = ChaosOptions(
            directory=out.resolve(),
            backends=backends,
            triton=triton,
            cache=DEFAULT_CACHE,
            data=data,
            config=config,
            seed=seeds[0],
            minutes=minutes,
            events_per_s=events_per_s,
            version_s=version_s,
            clients=clients,
            samples=samples,
            pause_s=pause_ms / 1e3,
            heal_s=heal_s,
            without=tuple(leave_out),
            clock_library=clock,
        )
        options.empty(keep={ROUNDS_FILE, "evidence"} if resume else set())
        done = read_rounds(options.directory)
        held = {each["seed"] for each in done}
        try:
            figures = _run(options, [each for each in seeds if each not in held], done)
        except OSError as error:
            raise ChaosError(f"{error.filename or out}: {error.strerror or error}") from error
    if as_json:
        print_json(figures)
    else:
        say(json.dumps(figures, indent=1))
        say(f"timeline: {out / PAGE_FILE}   figures: {out / REPORT_FILE}")
    if figures["rounds_failed"]:
        raise typer.Exit(1)
