"""The same run where clicks are a stream of their own: an impression waits for its click."""

import dataclasses

from run import run as labelled
from run import schema

from embertide.config import LabelJoin
from embertide.data import feedback_schema, joined, open_events

# Half an hour for most clicks; one that comes within six hours still corrects its impression.
run = dataclasses.replace(labelled, labels=LabelJoin(wait_s=1800, correct_s=6 * 3600))
source = joined(
    open_events(
        "build/impressions.parquet",
        schema=dataclasses.replace(schema, label=None, id="impression"),
    ),
    open_events("build/clicks.parquet", schema=feedback_schema(id="impression", ts="ts")),
)
