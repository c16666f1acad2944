"""`step-profile`: what a training step costs on this machine, as a file for the search of plans."""

import itertools
import sys
from pathlib import Path
from typing import Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, Window


def command(
    output: Annotated[Path, typer.Argument(help="File to write.", dir_okay=False)],
    data: Data = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    config: Annotated[Path | None, typer.Option(help="A run's file, as for train.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps to take, of the first events.")] = 20,
    nproc: Annotated[
        int, typer.Option(min=1, help="Ranks to start on this machine; under torchrun, leave it.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Take some steps of a run, publish nothing, and write what the parts of a step cost.

    `embertide plan ranks --search` makes a plan of the file. Take the batch size, the ranks and the
    machines that the run will have: a profile holds for those that it was measured with.

    Example: embertide step-profile profile.json --config run.py --data clicks.parquet --nproc 2
    """
    from embertide.trainer.sync.launch import end_with_agent, is_launched, launch

    if is_launched():
        end_with_agent()
    elif nproc > 1:
        sys.exit(launch(nproc, 0, sys.argv[1:]))
    with report_errors(as_json):
        from embertide.trainer.data.crosses import crossed
        from embertide.trainer.run.step_profile import measure
        from embertide.trainer.sync.placing.profile import write
        from embertide.trainer.sync.ranks import Ranks

        window = Window(
            data=data,
            events=events,
            hours=hours if demo else None,
            stream_seed=stream_seed,
            config=config,
        )
        run, source = window.open()
        taken = crossed(source, run.model).batches(batch_size=run.batch_size)
        batches = list(itertools.islice(taken, steps))
        ranks = Ranks.join()
        with ranks.failing():
            profile = measure(run, batches, ranks)
        if not ranks.first:
            return
        write(profile, output)
        unexplained = profile.work.step_s / profile.step_s
        if as_json:
            said = {"file": str(output), "ranks": ranks.size, "step_s": profile.step_s}
            print_json({**said, "unexplained": unexplained})
            return
        say(
            f"{output}: a step of {profile.events} events took {1e3 * profile.step_s:.1f} ms with"
            f" {ranks.size} ranks; {unexplained:.0%} of it is explained by no part, and counts"
            " once a step"
        )
