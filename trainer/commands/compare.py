"""`compare`: two published versions on the same events, with confidence intervals."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table
from embertide.trainer.commands import event_bar
from embertide.trainer.commands.evaluate import Config, DdrMib, User
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, open_run
from embertide.trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from embertide.trainer.eval.paired import Comparison

_NAMES = {"normalised_entropy": "NE", "log_loss": "log loss", "auc": "AUC", "gauc": "GAUC"}


def _in_words(found: "Comparison") -> str:
    """Say what the figures come to; normalised entropy decides, as it sees all that scores do."""
    entropy = found.differences["normalised_entropy"]
    verdict = f"{found.confidence:.1%} confidence, by normalised entropy: "
    if entropy.verdict == "tie":
        verdict += "a tie: the difference is within chance"
    else:
        verdict += entropy.verdict
    others = {name: each.verdict for name, each in found.differences.items()}
    apart = [
        f"{_NAMES[name]}: {each}"
        for name, each in others.items()
        if name not in ("normalised_entropy", "log_loss") and each != entropy.verdict
    ]
    return verdict + (f" (but {', '.join(apart)})" if apart else "")


def command(
    first: Annotated[Path, typer.Argument(help="A publication's folder, or a snapshot's.")],
    second: Annotated[Path, typer.Argument(help="Another, or the same with another version.")],
    data: Data = None,
    config: Config = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    first_version: Annotated[
        int | None, typer.Option(help="Version of the first.", show_default="the newest")
    ] = None,
    second_version: Annotated[
        int | None, typer.Option(help="Version of the second.", show_default="the newest")
    ] = None,
    user: User = None,
    block_s: Annotated[
        int, typer.Option(min=1, help="Without users, blocks of so many seconds are resampled.")
    ] = 600,
    replicates: Annotated[int, typer.Option(min=100, help="Draws of the bootstrap.")] = 1000,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Confidence of intervals.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 1,
    ddr_mib: DdrMib = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Compare two published versions on the same events: which one is better, or neither.

    Users are resampled, or blocks of time where there are none, so that an interval does not take
    the events of one user for as many users. Where the interval of a difference has 0 in it, the
    answer is a tie.

    Example: embertide compare build/news build/news-wide --data day-9.parquet
    """
    from embertide.trainer.data.history import for_requests
    from embertide.trainer.eval.paired import MIN_CLUSTERS, compare
    from embertide.trainer.eval.published import PublishedModel
    from embertide.trainer.eval.scored import score_events

    with report_errors(as_json):
        run, source = open_run(config, data, events, hours if demo else None, stream_seed)
        if run is not None:
            source = for_requests(source, run.model)
        models = [
            PublishedModel.open(path, version, ddr_budget_bytes=ddr_mib << 20)
            for path, version in ((first, first_version), (second, second_version))
        ]
        with event_bar("scoring") as bar:
            task = bar.add_task("", total=source.total_events(), state="")
            scored = score_events(
                models,
                source,
                user=user,
                progress=lambda done: bar.update(task, completed=done),
            )
        block_B = scored.ts_ms_B // (1000 * block_s)
        try:
            found = compare(
                scored.label_B,
                *scored.score_MB,
                cluster_B=block_B if scored.user_B is None else scored.user_B,
                user_B=scored.user_B,
                replicates=replicates,
                confidence=confidence,
                seed=seed,
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
    resampled = "blocks of time" if scored.user_B is None else "users"
    learned = [int((scored.ts_ms_B <= model.watermark_ms).sum()) for model in models]
    if as_json:
        versions = {
            "versions": [model.number for model in models],
            "events_up_to_watermark": learned,
            "resampled": resampled,
        }
        print_json(versions | dataclasses.asdict(found))
        return
    table = Table(
        title=f"{found.events:,} events, {found.clusters:,} {resampled}, {replicates:,} draws"
    )
    table.add_column("")
    for name in ("first", "second", "difference", f"{confidence:.1%} interval"):
        table.add_column(name, justify="right")
    table.add_column("better")
    for name, each in found.differences.items():
        table.add_row(
            _NAMES[name],
            f"{each.first:.4f}",
            f"{each.second:.4f}",
            f"{each.difference:+.5f}",
            f"{each.low:+.5f} {each.high:+.5f}",
            each.verdict.replace(" is better", ""),
        )
    show_table(table)
    say(_in_words(found))
    if found.clusters < MIN_CLUSTERS:
        say(f"note: {found.clusters} {resampled} are too few for intervals to be trusted", err=True)
    if any(learned):
        say(
            f"note: {learned[0]:,} and {learned[1]:,} of these events are not after the versions' "
            "watermarks: they may have learned from them",
            err=True,
        )
