"""The run's file that `init` writes: Python with comments, for people to change.

Names and values of the input stand in it as literals and comments alone (quoting.py). What was
written is read again as a syntax tree and compared with what was meant, before it is any file.
"""

import math
import textwrap
from collections.abc import Iterator

from embertide._common.quoting import python_comment, python_literal
from embertide.trainer.commands.init_plan import Plan, opened_paths, options_of
from embertide.trainer.commands.run_file import Opening, brief, changed, read_plain
from embertide.trainer.data.base import EventSchema, EventTimes, FeatureColumn
from embertide.trainer.data.guess import item_and_user
from embertide.trainer.errors import ConfigurationError

_DAY_S = 86_400
_HOUR_S = 3600
_COLUMNS = 70  # of a line of numbers
# Settings that the file says anyhow.
_SAID_OF_MODEL = ("name", "tables", "features", "dense")
_SAID = ("model", "optimizer", "correction", "publish_every_s", "snapshot_every")


def run_text(plan: Plan, title: str) -> str:
    """Return the run's file, which defines what the plan says and nothing else.

    Raises:
        ConfigurationError: It would not.
    """
    text = "\n".join([*_head(plan, title), *_source(plan), "", *_run(plan), ""])
    _prove(text, plan)
    return text


def _prove(text: str, plan: Plan) -> None:
    try:
        found = read_plain(text)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the run's file would not be what was meant: {error}; rename the columns and files, "
            "and report this"
        ) from error
    wanted: dict[str, object] = {"run": plan.run, "source": Opening(*_opening(plan))}
    if found != wanted:
        odd = [name for name in {*found, *wanted} if found.get(name) != wanted.get(name)]
        raise ConfigurationError(
            f"the run's file would define {', '.join(sorted(odd))} otherwise than was meant; "
            "rename the columns and files, and report this"
        )


def _opening(plan: Plan) -> tuple[object, dict[str, object]]:
    paths = list(opened_paths(plan))
    options = {**options_of(plan), "schema": plan.schema}
    return (paths[0] if len(paths) == 1 else paths), options


def _head(plan: Plan, title: str) -> Iterator[str]:
    yield '"""A run, as `embertide init` guessed it.'
    yield ""
    yield "Change what is wrong; `embertide train FOLDER --config` with this file's name runs it."
    yield "`embertide train --print-config news` says of every setting what it means."
    yield '"""'
    yield ""
    yield python_comment(f"Over {title}.")
    names = {"ModelConfig", "TableConfig", "FeatureConfig", "OptimizerConfig", "RunConfig"}
    names |= {"DenseConfig"} if plan.run.model.dense else set()
    names |= {"CorrectionConfig"} if plan.run.correction is not None else set()
    yield "from embertide.config import ("
    yield from (f"    {name}," for name in sorted(names))
    yield ")"
    yield "from embertide.data import EventSchema, EventTimes, FeatureColumn, open_events"
    yield ""


def _source(plan: Plan) -> Iterator[str]:
    schema = plan.schema
    yield "source = open_events("
    paths = opened_paths(plan)
    if len(paths) == 1:
        yield f"    {python_literal(paths[0])},"
    else:
        yield "    ["
        yield from (f"        {python_literal(path)}," for path in paths)
        yield "    ],"
    yield from (f"    {name}={python_literal(said)}," for name, said in options_of(plan).items())
    yield "    schema=EventSchema("
    yield "        features=("
    for feature in schema.features:
        yield from (f"            {line}" for line in _feature(plan, feature))
    yield "        ),"
    yield f"        label={python_literal(schema.label)},"
    if schema.positive:
        yield "        # These values of the label are 1, all others 0."
        yield f"        positive={python_literal(schema.positive)},"
    if schema.dense:
        yield "        # Amounts, in the order of the model's `dense`."
        yield f"        dense={python_literal(schema.dense)},"
    yield from (f"        {line}" for line in _time(plan, schema))
    if schema.list_separator != "|":
        yield f"        list_separator={python_literal(schema.list_separator)},"
    yield "    ),"
    yield ")"
    out = [each for each in plan.guess.choices if each.role == "left out"]
    if out:
        yield "# Left out:"
        yield from (python_comment(f"  {e.facts.name}: {_sentence(e.why)}") for e in out)


def _time(plan: Plan, schema: EventSchema) -> Iterator[str]:
    if schema.ts is None:
        yield "# No time: the order of rows is time. A row counts as a millisecond."
        return
    yield python_comment(f"{plan.guess.unit[:1].upper()}{plan.guess.unit[1:]}.")
    yield f"ts={python_literal(schema.ts)},"
    yield f"ts_unit_ms={schema.ts_unit_ms!r},"
    if schema.times != EventTimes():
        yield "# As long as the longest silence in the file: no event of it is doubted."
        yield f"times=EventTimes(max_jump_s={python_literal(schema.times.max_jump_s)}),"


def _feature(plan: Plan, feature: FeatureColumn) -> Iterator[str]:
    if feature.transform == "hour_of_day":
        yield "# The hour of the day, from the time."
    elif feature.transform == "bin":
        yield python_comment(f"The bin that {feature.column} falls into: a key, with a row.")
        yield python_comment(f"Who asks sends {feature.column}; embertide.Client makes the bin.")
    else:
        choice = next(each for each in plan.guess.choices if each.facts.name == feature.column)
        yield python_comment(f"{choice.facts.expected:,} keys: {_sentence(choice.why)}")
    if not feature.edges:
        yield f"{brief(feature)},"
        return
    yield "FeatureColumn("
    yield f"    {', '.join(changed(feature, ('edges',)))},"
    edges = textwrap.wrap(", ".join(map(python_literal, feature.edges)), _COLUMNS)
    yield "    edges=("
    yield from (f"        {line}" for line in [*edges[:-1], f"{edges[-1]},"])
    yield "    ),"
    yield "),"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _run(plan: Plan) -> Iterator[str]:
    run, model = plan.run, plan.run.model
    yield "run = RunConfig("
    yield "    model=ModelConfig("
    yield f"        name={python_literal(model.name)},"
    yield "        # A table a feature; of 10^5 rows a bucket, for ever."
    yield "        tables=("
    yield from (f"            {brief(each)}," for each in model.tables)
    yield "        ),"
    yield "        features=("
    yield from (f"            {brief(each)}," for each in model.features)
    yield "        ),"
    if model.dense:
        yield "        # The share of values below, whatever the scale; None is a value of its own."
        yield "        dense=("
        yield from (f"            {brief(each)}," for each in model.dense)
        yield "        ),"
    yield from (f"        {line}," for line in changed(model, _SAID_OF_MODEL))
    yield "    ),"
    yield f"    optimizer={brief(run.optimizer)},"
    if run.correction is not None:
        yield "    # Scores follow a label rate that moves; how quickly, the run finds out (0)."
        yield f"    correction={brief(run.correction)},"
    yield from (f"    {line}," for line in changed(run, _SAID))
    yield f"    # {_every(plan)}"
    yield f"    publish_every_s={run.publish_every_s},"
    yield "    # Versions from one snapshot, with its checkpoint, to the next."
    yield f"    snapshot_every={run.snapshot_every},"
    yield ")"
    yield from map(python_comment, _more(plan))


def _more(plan: Plan) -> Iterator[str]:
    """Say what the run could have beside, with the names of this input."""
    item, user = item_and_user(plan.schema)
    yield "What may be worth turning on; docs/training.md says what each costs:"
    if plan.schema.has_clock and item is not None:
        yield f"  how often {item} came of late, counted in its table:"
        counters = f"counters=CountersConfig(feature={item!r})"
        yield f"    TableConfig(name={item!r}, chunks=4, {counters})"
    if item is not None and user is not None:
        yield f"  the last {item} that {user} liked, as a sequence of the model:"
        yield (
            f"    net='history', sequences=(SequenceConfig(name='hist', user={user!r}, "
            f"item={item!r}, published=True),)"
        )
    ones = [each.name for each in plan.schema.features if each.transform == "key"][:2]
    if len(ones) == 2:
        yield "  a row for two keys that come together; with a table, behind other features:"
        yield f"    FeatureConfig(name='pair', table='pair', crossed={tuple(ones)!r})"
    yield "  a tenth of the bytes, by rows that are worth them: prune=PruneConfig(ratio=10)"


def _every(plan: Plan) -> str:
    seconds = plan.run.publish_every_s
    if plan.schema.ts is None:
        return f"A version every {1000 * seconds:,} rows, each of which counts as a millisecond."
    for unit, length in (("day", _DAY_S), ("hour", _HOUR_S), ("minute", 60), ("second", 1)):
        if seconds % length == 0 and math.isfinite(seconds):
            count = seconds // length
            return f"A version every {count:,} {unit}{'s' if count > 1 else ''} of event time."
    return ""
