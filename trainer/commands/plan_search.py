"""`plan-search`: a plan of ranks whose step is predicted to be short, and what bounds that step.

`embertide plan ranks --search` and `embertide plan explain --profile` start it.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.trainer.errors import ConfigurationError

_EVALUATIONS = 100_000  # more than any search of a minute times
_STARVED = 3  # times its CPU time by the clock, after which a search ends that others leave none
_SHOWN = 6


def command(
    profile: Annotated[Path, typer.Argument(help="A file of step-profile.", dir_okay=False)],
    ranks: Annotated[int, typer.Argument(min=1, max=65_534, help="Ranks of the run.")],
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Search, and write the plan here.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Explain this plan; without it, the usual. With --output, the run's: a plan that "
            "is found has to be better.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the step's timeline here.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Time of the search on one core.")
    ] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 1,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="The run is on the profile's machine, not here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search for a plan of ranks by a profile, or say what bounds a step under a plan.

    Example: embertide plan ranks 4 plan.json --search profile.json
    """
    with report_errors(as_json):
        from embertide.trainer.eval.picture import new_picture
        from embertide.trainer.lab import step_picture
        from embertide.trainer.run.step_profile import machine
        from embertide.trainer.sync.placing import profile as profiles
        from embertide.trainer.sync.placing import search
        from embertide.trainer.sync.placing.step import StepModel, Strategy
        from embertide.trainer.sync.plan import read_for, text_for

        picture = None if plot is None else new_picture(plot)
        made = profiles.read(profile)
        if not elsewhere:
            profiles.check_machine(made, machine())
        model = StepModel(made, ranks)
        buckets = {table.name: len(table.load_P) for table in made.tables}
        usual = Strategy(search.usual(made, ranks))
        chunks = {table.name: table.chunks for table in made.tables}
        strategy = usual
        if plan is not None:
            strategy = Strategy(read_for(plan, buckets, ranks, chunks=chunks))
        # Without counted keys, what a run's configuration says of hot rows stays as it is.
        hot_rows = search.hot_choices(made, strategy.owners.hot_rows or 0) if made.hot else (0,)
        space = search.Space(profile=made, ranks=(ranks,), hot_rows=hot_rows)
        if output is not None:
            usual = strategy
        usual_s = model.step_s(usual)
        said: dict[str, Any] = {"ranks": ranks, "usual_s": usual_s, "measured_s": made.step_s}
        if output is not None:
            os.nice(5)  # the run that it is for may be at work beside it
            began, began_at = time.process_time(), time.monotonic()

            def used() -> float:
                waited_s = time.monotonic() - began_at
                return max((time.process_time() - began) / seconds, waited_s / (_STARVED * seconds))

            found = search.metropolis(space, _EVALUATIONS, seed, used=used)
            if not found.step_s < usual_s:
                found = dataclasses.replace(found, strategy=usual, step_s=usual_s)
            strategy = found.strategy
            if not made.hot:
                owners = dataclasses.replace(strategy.owners, hot_rows=usual.owners.hot_rows)
                strategy = dataclasses.replace(strategy, owners=owners)
            try:
                text = text_for(list(buckets), strategy.owners)
                output.write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                raise ConfigurationError(
                    f"{output} cannot be written: {error.strerror}; give another path"
                ) from error
            said |= {"file": str(output), "evaluations": found.evaluations}
        prediction = model.predict(strategy)
        said |= {
            "step_s": prediction.step_s,
            "bounds": [each._asdict() for each in prediction.bounds],
            "beyond": list(prediction.beyond),
            "hot_rows": len(model.hot_set(strategy.owners).key_K),
        }
        if picture is not None and plot is not None:
            step_picture.draw(picture, prediction.spans, made.measured, plot)
            said["plot"] = str(plot)
    if as_json:
        print_json(said)
        return
    _say(said)


def _say(said: dict[str, Any]) -> None:
    if "file" in said:
        say(f"{said['file']}: {said['evaluations']:,} plans were timed")
    saved = 1 - said["step_s"] / said["usual_s"]
    say(
        f"a step of {said['ranks']} ranks is predicted to take {1e3 * said['step_s']:.2f} ms, and"
        f" {1e3 * said['usual_s']:.2f} ms without a plan ({saved:+.1%} saved)"
    )
    if said["hot_rows"]:
        say(f"  of the keys that were counted {said['hot_rows']:,} are hot")
    for bound in said["bounds"][:_SHOWN]:
        share = bound["seconds"] / said["step_s"]
        say(f"  {share:4.0%}  {1e3 * bound['seconds']:8.3f} ms  {bound['what']}")
    for sentence in said["beyond"]:
        say(f"not measured: {sentence}")
