"""`send-events`: add the events of a file, or of the generated news, to a Redis Stream."""

from typing import Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.trainer.commands import event_bar
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, open_input


def command(
    stream: Annotated[
        str, typer.Argument(help="The stream: redis://HOST:PORT/DB, with #KEY for one of several.")
    ],
    data: Data = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    start: Annotated[int, typer.Option(help="Event index of the input to begin at.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Events of an entry, at least.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Add events to a stream, as fast as Redis takes them; a trainer reads them with --data.

    What is rejected here is counted and not sent. Where it stops, it says with which --start to
    go on.

    Example: send-events redis://127.0.0.1:6379 --data clicks.parquet
    """
    from embertide.trainer.data.redis_stream import EventSender, StreamConfig
    from embertide.trainer.errors import ConfigurationError, TrainerError

    with report_errors(as_json), event_bar("sending") as bar:
        source = open_input(data, events, hours if demo else None, stream_seed)
        try:
            batches = source.batches(batch_size=batch_size, start=start)
            sender = EventSender(StreamConfig.of(stream), source.schema)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        task = bar.add_task("", total=source.total_events(), completed=start, state="")
        for batch in batches:
            try:
                sender.send(batch)
            except TrainerError as error:
                raise TrainerError(f"{error}; go on with --start {batch.first}") from error
            start = batch.next_offset
            bar.update(task, completed=start)
    rejected = source.dead_letters.by_reason
    if as_json:
        print_json({"events": sender.sent, "next": start, "rejected": rejected})
        return
    say(f"{sender.sent:,} events sent")
    if rejected:
        say(f"rejected rows: {rejected}")
