"""`mirror`: keep the newest of a publication in object storage in a folder that nodes read."""

import contextlib
import dataclasses
import logging
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from embertide._common.private import close_umask
from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.trainer.commands.listening import METRICS_HOST, MetricsHost


def command(
    url: Annotated[str, typer.Argument(help="As s3://BUCKET/PREFIX: train's --storage.")],
    folder: Annotated[Path, typer.Argument(help="The folder, of this mirror alone.")],
    once: Annotated[
        bool, typer.Option("--once", help="Fetch what is there, and end; 1: that failed.")
    ] = False,
    every_s: Annotated[float, typer.Option(help="Seconds between looks.", min=0.05)] = 2.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve /metrics for Prometheus on this port.", min=1, max=65535),
    ] = None,
    metrics_host: MetricsHost = METRICS_HOST,
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
) -> None:
    """Keep the newest snapshot and all versions after it in a folder, each proved, until Ctrl-C.

    `embertide serve` does this by itself where it is given a URL.

    Example: embertide mirror s3://models/news /var/lib/embertide/news
    """
    from embertide.trainer.commands.metrics import CountersPage, served
    from embertide.trainer.errors import ConfigurationError
    from embertide.trainer.publish.folder import Publication
    from embertide.trainer.publish.mirror import Mirror, MirrorStats
    from embertide.trainer.publish.storage import Storage, StorageError, is_url

    ended = threading.Event()
    with report_errors(as_json), contextlib.ExitStack() as stack:
        if not is_url(url):
            raise ConfigurationError(f"{url} is no URL: give s3://BUCKET/PREFIX")
        logging.getLogger("embertide").setLevel(logging.INFO)
        mirror = Mirror(Storage(url), Publication(folder))
        if once:
            mirror.round()
            newest = mirror.newest()
            if newest is None:
                raise StorageError(f"{url} holds no snapshot that is whole")
            if as_json:
                said = {**newest._asdict(), **dataclasses.asdict(mirror.stats)}
                print_json({"result": said})
            else:
                say(f"{folder} has version {newest.number} of lineage {newest.lineage}")
            return
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: ended.set())
        if metrics_port is not None:
            page = CountersPage(
                "mirror", "Fetched, or not.", lambda: dataclasses.asdict(mirror.stats)
            )
            stack.enter_context(served(metrics_port, page, metrics_host))

        def show(stats: MirrorStats) -> None:
            if stats.rounds == 1 and mirror.newest() is not None:
                say(f"{folder} is up to date", err=True)

        mirror.run(every_s, ended, show)


if __name__ == "__main__":
    close_umask()
    typer.run(command)
