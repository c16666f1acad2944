"""The options of what a command listens on, apart: `metrics.py` takes a library to load."""

from typing import Annotated

import typer

METRICS_HOST = "127.0.0.1"

MetricsHost = Annotated[
    str,
    typer.Option(
        "--metrics-host",
        help="Address that --metrics-port listens on; of a pod, 0.0.0.0: /metrics asks nobody who "
        "he is.",
    ),
]
