"""Which column of an unknown input is the label, the time, a key, a number or a list; and why.

Pure: it looks at what `columns.py` found. Where two columns could be the label, or the time, it
does not choose: the error says how to.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from embertide._common.quoting import shown
from embertide.trainer.data.base import NUMBER, EventSchema, FeatureColumn
from embertide.trainer.data.column_names import LABELS, RATINGS, TIMES, TYPED_NAME, snake_case
from embertide.trainer.data.columns import ColumnFacts
from embertide.trainer.data.csv import listed
from embertide.trainer.errors import ConfigurationError

Role = Literal["label", "time", "key", "number", "number and key", "list", "left out"]

_ACTIONS = ("event", "event_type", "action", "action_type", "behavior", "behaviour", "type")
_WANTED_ACTIONS = (
    *("purchase", "buy", "order", "transaction", "conversion", "pay", "click", "like"),
    *("addtocart", "add_to_cart", "cart", "fav"),
)
_YES = ("yes", "true", "1", "1.0", "y", "t", "positive", "click", "good", "pos", "clicked")
_NO = ("no", "false", "0", "0.0", "n", "f", "negative", "bad", "neg", "-1", "none")
_TIME_PARTS = {"ts", "time", "timestamp", "datetime", "date", "at", "when", "epoch", "unix"}
_IDS = {
    *("id", "ids", "code", "key", "hash", "zip", "zipcode", "postcode", "cat", "category", "type"),
    *("user", "item", "product", "movie", "article", "ad", "campaign", "brand", "country", "os"),
    *("device", "region", "city", "state", "site", "app", "page", "slot", "channel", "gender"),
    *("sex", "weekday", "dow", "hour", "month", "browser", "publisher", "advertiser", "segment"),
    *("model", "carrier", "shop", "store", "seller", "genre", "language", "session", "flight"),
}
_NUMBERS = {
    *("count", "num", "n", "number", "price", "age", "amount", "cost", "duration", "length"),
    *("len", "size", "width", "height", "weight", "distance", "balance", "total", "sum", "avg"),
    *("mean", "rate", "ratio", "share", "pct", "percent", "years", "days", "minutes", "seconds"),
    *("hours", "delay", "temp", "temperature", "lat", "lon", "latitude", "longitude", "income"),
    *("gain", "loss", "score", "bid", "position", "rank", "views", "visits", "quantity", "qty"),
}
_ITEM_WORDS = {
    *(
        "item",
        "product",
        "movie",
        "article",
        "cand",
        "ad",
        "track",
        "song",
        "story",
        "video",
        "prop",
    ),
    *("book", "news", "creative", "hotel", "job", "content", "sku", "app"),
}
_USER_WORDS = {
    *("user", "userid", "uid", "customer", "member", "visitor", "reader", "candidate", "client"),
    *("listener", "account", "student", "guest"),
}
_ISO = "texts of ISO 8601, or a timestamp"
# A label of another value in fewer rows than these is one of two values, and some mistakes.
_MISTAKES = 0.005
_MAX_NAME = 64  # letters of a feature's name
# A column of more different values a row is of no use: no key comes again.
_UNIQUE = 0.95
_FEW_KEYS = 64
_RATING_VALUES = 21
# A rating of so much of the way from the least to the greatest is liked.
_LIKED = 0.7
# Integers that take a smaller share of their range are ids, not amounts.
_SPARSE = 0.05
_TEXT_LENGTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The guess about one column.

    Attributes:
        facts: The column's facts.
        role: Its use.
        why: By what that was told.
    """

    facts: ColumnFacts
    role: Role
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A person's statements about columns; they count before any guess.

    Attributes:
        label: The label's column.
        positive: Which of its values are 1.
        time: The time's column.
        no_time: Whether the order of rows is time.
        ignore: Columns that are left out.
        lists: Columns that are lists.
        keys: Columns that are keys.
        texts: Columns that are keys of text, also where most values are numbers.
        numbers: Columns that are numbers.
    """

    label: str | None = None
    positive: str = ""
    time: str | None = None
    no_time: bool = False
    ignore: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """The guess about an input.

    Attributes:
        choices: The guess about each column, in the input's order.
        positive: Which values of the label are 1; empty: it holds 0 and 1.
        unit_ms: Milliseconds in a unit of the time's column.
        unit: The name of that unit.
        texts: Columns of keys that are read as text whatever most of them look like.
    """

    choices: tuple[Choice, ...]
    positive: str
    unit_ms: float
    unit: str
    texts: tuple[str, ...] = ()

    def named(self, role: Role) -> str | None:
        """Return the column of a role that one has at most."""
        found = [each.facts.name for each in self.choices if each.role == role]
        return found[0] if found else None

    @property
    def _unit_ms(self) -> float:
        return round(self.unit_ms) if self.unit_ms >= 1 else self.unit_ms

    def key_kind(self, facts: ColumnFacts) -> Literal["", "int", "string"]:
        """Return the kind of a column's keys; empty: the input's type tells, and no text may."""
        if facts.name in self.texts:
            return "string"
        if not facts.text:
            return ""
        return "int" if facts.is_number and facts.whole else "string"

    def schema(self, *, hour: bool = False) -> EventSchema:
        """Return the schema; with a feature of the hour of the day if `hour`.

        Raises:
            ConfigurationError: No column holds keys, or two amounts have one name.
        """
        ts = self.named("time")
        features, dense, binned, taken = [], [], [], {"hour"} if hour else set()
        separators = set()
        for each in self.choices:
            name = feature_name(each.facts.name, taken)
            if each.role in ("key", "number and key", "list"):
                transform: Literal["key", "keys"] = "keys" if each.role == "list" else "key"
                features.append(
                    FeatureColumn(
                        name=name,
                        column=each.facts.name,
                        transform=transform,
                        # Read as a number, too, it has to be one.
                        kind="" if each.role == "number and key" else self.key_kind(each.facts),
                    )
                )
                taken.add(name)
            if each.role in ("number", "number and key"):
                dense.append(each.facts.name)
            if each.role == "number" and each.facts.edges:
                binned.append(each.facts)
            separators.add(each.facts.separator if each.role == "list" else "")
        for facts in binned:
            name = feature_name(f"{facts.name}_bin", taken)
            features.append(
                FeatureColumn(name=name, column=facts.name, transform="bin", edges=facts.edges)
            )
            taken.add(name)
        if hour and ts is not None:
            features.append(FeatureColumn(name="hour", column=ts, transform="hour_of_day"))
        separators.discard("")
        if not features:
            raise ConfigurationError(
                "no column holds keys, and a model needs one: name one with --key-column"
            )
        for name, count in Counter(name.lower() for name in dense).items():
            if count > 1:
                both = listed(each for each in dense if each.lower() == name)
                raise ConfigurationError(
                    f"columns {both} are amounts whose names differ in case alone, and a model's "
                    "do not: leave all but one out with --ignore, or rename them"
                )
        return EventSchema(
            features=tuple(features),
            label=self.named("label") or "",
            dense=tuple(dense),
            ts=ts,
            ts_unit_ms=1000 if ts is None else self._unit_ms,
            positive=self.positive,
            list_separator=min(separators, default="|"),
        )


def feature_name(column: str, taken: Collection[str] = ()) -> str:
    """Return a column's name as models write it: small letters, digits and underscores."""
    name = re.sub(r"[^a-z0-9]+", "_", snake_case(column)).strip("_")[:_MAX_NAME] or "column"
    number = 2
    base = name
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


def item_and_user(schema: EventSchema) -> tuple[str | None, str | None]:
    """Return the features that name what is shown and to whom, as far as their names tell."""
    found: list[str | None] = []
    ones = [each.name for each in schema.features if each.transform == "key"]
    for words in (_ITEM_WORDS, _USER_WORDS):
        found.append(next((name for name in ones if words & {*name.split("_")}), None))
    return found[0], found[1]


def guess(columns: Sequence[ColumnFacts], asked: Asked | None = None) -> Guess:
    """Guess what each column is.

    Raises:
        ConfigurationError: A column that was named is not there, none can be the label, or several
            can be the label or the time.
    """
    asked = asked or Asked()
    by_name = {each.name: each for each in columns}
    check_names(asked, tuple(by_name))
    free = [each for each in columns if each.name not in asked.ignore and each.present]
    label, why_label, positive = _label(free, asked)
    free = [each for each in free if each is not label]
    fixed = {*asked.lists, *asked.keys, *asked.texts, *asked.numbers}
    time, why_time, unit, unit_ms = _time([f for f in free if f.name not in fixed], asked)
    choices = []
    for each in columns:
        if each is label:
            choices.append(Choice(facts=each, role="label", why=why_label))
        elif time is not None and each is time:
            choices.append(Choice(facts=each, role="time", why=why_time))
        else:
            role, why = _role(each, asked)
            choices.append(Choice(facts=each, role=role, why=why))
    return Guess(
        choices=tuple(choices), positive=positive, unit_ms=unit_ms, unit=unit, texts=asked.texts
    )


def check_names(asked: Asked, names: Sequence[str]) -> None:
    """Refuse columns that were named and are not there.

    Raises:
        ConfigurationError: One is not.
    """
    more = (*asked.ignore, *asked.lists, *asked.keys, *asked.texts, *asked.numbers)
    for name in (asked.label, asked.time, *more):
        if name is not None and name not in names:
            raise ConfigurationError(
                f"there is no column {shown(name)}; name one of those there are: {listed(names)}"
            )


# --- the label ------------------------------------------------------------------------------------


def _label(columns: Sequence[ColumnFacts], asked: Asked) -> tuple[ColumnFacts, str, str]:
    """Return the label's column, why, and which of its values are 1."""
    if asked.label is not None:
        column = next((each for each in columns if each.name == asked.label), None)
        if column is None:
            raise ConfigurationError(f"--label {shown(asked.label)}: no row has a value")
        if column.kind in ("list", "numbers", "other", "time"):
            what = "times" if column.kind == "time" else f"{column.type}"
            raise ConfigurationError(
                f"--label {shown(asked.label)}: it holds {what}; name a column of numbers or words"
            )
        return column, "--label", asked.positive or _positive(column)
    two = [each for each in columns if _is_binary(each)]
    kinds: tuple[tuple[tuple[str, ...], list[ColumnFacts]], ...] = (
        (LABELS, [each for each in columns if _is_named_label(each)]),
        (RATINGS, [each for each in columns if _is_rating(each)]),
        (_ACTIONS, [each for each in columns if _wanted_action(each)]),
    )
    for names, found in kinds:
        found.sort(key=lambda each: names.index(snake_case(each.name)))
        if found:
            column = found[0]
            how = asked.positive or _positive(column)
            named = column in two or names is LABELS
            why = "its name, and 2 values" if named else "its name and values"
            return column, why, how
    if len(two) == 1:
        return two[0], "the one column of 2 values", asked.positive or _positive(two[0])
    if not two:
        raise ConfigurationError(
            "no column looks like a label of two values, or like a rating: name it with --label, "
            "and with --positive '>= 4' or such which of its values are 1; there are "
            f"{listed(each.name for each in columns)}"
        )
    several = listed(each.name for each in two)
    raise ConfigurationError(f"each of {several} could be the label: name it with --label")


def _is_binary(column: ColumnFacts) -> bool:
    if column.kind == "list" and not column.nested:
        return False
    if column.kind == "bool":
        return True
    if column.distinct != 2 or column.kind not in ("int", "float", "text"):
        return False
    # Labels are written as these numbers; 3 and 7 are no yes and no.
    return column.kind == "text" or (column.least, column.most) in ((0, 1), (-1, 1), (1, 2))


def _is_named_label(column: ColumnFacts) -> bool:
    """Whether a label by its name has two values, but for a few rows."""
    if snake_case(column.name) not in LABELS or column.kind not in ("int", "float", "bool", "text"):
        return False
    if _is_binary(column):
        return True
    main = column.counts[:2]
    rest = column.present - sum(rows for _, rows in main)
    if len(main) < 2 or rest > _MISTAKES * column.present:
        return False
    if column.kind == "text":
        return True
    low, high = sorted(float(text) for text, _ in main)
    return (low, high) in ((0, 1), (-1, 1), (1, 2))


def _is_rating(column: ColumnFacts) -> bool:
    return (
        snake_case(column.name) in RATINGS
        and column.is_number
        and 3 <= column.distinct <= _RATING_VALUES
    )


def _wanted_action(column: ColumnFacts) -> str | None:
    """Return the value that one wants of what people did, the rarest kind first."""
    if column.kind != "text" or snake_case(column.name) not in _ACTIONS or column.distinct > 8:
        return None
    values = {snake_case(text): text for text, _ in column.counts}
    return next((values[each] for each in _WANTED_ACTIONS if each in values), None)


def _positive(column: ColumnFacts) -> str:
    """Return the rule by which a label's values are 1; empty if they are 0 and 1."""
    if column.kind == "bool":
        return ""
    if column.is_number:
        if _is_binary(column) or _is_named_label(column):
            low, high = sorted(float(text) for text, _ in column.counts[:2])
            return "" if (low, high) == (0, 1) else f">= {high:g}"
        few = column.distinct <= _RATING_VALUES
        edge = _liked(column) if few else column.middle
        if not math.isfinite(edge):
            raise ConfigurationError(
                f"column {shown(column.name)} could be the label, and its values, {column.examples}"
                ", do not tell which are 1: say so with --positive '>= 4' or such"
            )
        return f">= {edge:g}" if few else f"> {edge:g}"
    action = _wanted_action(column)
    if action is not None:
        return f"== {action}"
    values = [text for text, _ in column.counts if text.strip()]
    for text in values:
        if text.strip().lower() in _YES:
            return _is_word(text)
    rest = [text for text in values if text.strip().lower() not in _NO]
    if not values:
        raise ConfigurationError(
            f"column {shown(column.name)} holds blanks alone: name another with --label"
        )
    return _is_word(min(rest or values, key=dict(column.counts).__getitem__))


def _is_word(text: str) -> str:
    """Return the rule that a label is this text, also where it looks like a number."""
    text = text.strip()
    return f"== '{text}'" if re.fullmatch(NUMBER, text) else f"== {text}"


def _liked(column: ColumnFacts) -> float:
    """Return the smallest value that is liked."""
    values = sorted(float(text) for text, _ in column.counts)
    if not math.isfinite(column.most - column.least):
        return math.nan
    if column.distinct > len(values):
        return math.ceil(column.least + _LIKED * (column.most - column.least))
    edge = column.least + _LIKED * (column.most - column.least)
    return next((value for value in values if value >= edge), math.nan)


# --- the time -------------------------------------------------------------------------------------


def _time(
    columns: Sequence[ColumnFacts], asked: Asked
) -> tuple[ColumnFacts | None, str, str, float]:
    """Return the time's column, why, its unit by name and in milliseconds."""
    if asked.time is not None:
        column = next((each for each in columns if each.name == asked.time), None)
        unit = None if column is None else _unit(column)
        if column is None or unit is None:
            hint = column.hint if column is not None and column.hint else f"which are {_ISO}"
            example = f", such as {column.examples.split(', ...')[0][:40]}" if column else ""
            raise ConfigurationError(
                f"--time {shown(asked.time)}: its values are no times{example}; {hint}, or numbers"
            )
        return column, f"--time; {unit[0]}", *unit
    if asked.no_time:
        return None, "", "rows", 1.0
    found = [each for each in columns if _could_be_time(each)]
    for narrower in (
        lambda each: each.ascends,
        lambda each: snake_case(each.name) in TIMES,
        lambda each: each.kind == "time",
    ):
        if len(found) > 1 and any(map(narrower, found)):
            found = [each for each in found if narrower(each)]
    if not found:
        return None, "", "rows", 1.0
    if len(found) > 1:
        names = listed(each.name for each in found)
        raise ConfigurationError(
            f"each of {names} could be the time: name it with --time, or say --no-time if the "
            "order of rows is time"
        )
    unit = _unit(found[0])
    assert unit is not None, "as it could be a time"
    order = "" if found[0].ascends else "; rows are not in its order"
    return found[0], f"{unit[0]}{order}", *unit


def _could_be_time(column: ColumnFacts) -> bool:
    if column.kind == "time":
        return column.distinct > 2
    if column.kind not in ("int", "float") or column.distinct <= 2:
        return False
    snake = snake_case(column.name)
    if column.unit:
        return bool({*snake.split("_")} & _TIME_PARTS) or snake in TIMES or column.ascends
    return snake in TIMES and column.ascends and column.middle >= 0


def _unit(column: ColumnFacts) -> tuple[str, float] | None:
    if column.kind == "time":
        return "a date and time", 1.0
    if column.kind not in ("int", "float"):
        return None
    if column.unit:
        return f"{column.unit} since 1970", column.unit_ms
    return "seconds from a start of its own", 1000.0


# --- the others -----------------------------------------------------------------------------------


def _role(column: ColumnFacts, asked: Asked) -> tuple[Role, str]:
    said: tuple[tuple[tuple[str, ...], Role, str], ...] = (
        (asked.ignore, "left out", "--ignore"),
        (asked.lists, "list", "--list-column"),
        (asked.keys, "key", "--key-column"),
        (asked.texts, "key", "--text-column"),
        (asked.numbers, "number", "--number-column"),
    )
    for of, role, option in said:
        if column.name in of:
            if role != "left out":
                _check_role(column, role, option)
            return role, option
    if not column.name.strip():
        return "left out", "it has no name"
    if not column.present:
        return "left out", "no row has a value"
    if column.kind in ("other", "numbers"):
        return "left out", f"its type, {shown(column.type, 60)[1:-1]}, holds no keys"
    if column.kind == "time":
        return "left out", "another time"
    if column.distinct < 2:
        return "left out", "one value"
    if column.kind == "list":
        between = f", between {column.separator!r}" if column.separator else ""
        return (
            "list",
            f"{column.length:.1f} items a row{between}" if column.nested else f"items{between}",
        )
    unique = column.distinct >= _UNIQUE * column.present and column.present > _FEW_KEYS
    typed = TYPED_NAME.fullmatch(column.name)
    if typed is not None and typed[2] == "token":
        return "key", "its name"
    if column.kind == "text":
        if column.hint:
            return "left out", column.hint
        if unique and column.expected >= _UNIQUE * column.present:
            return "left out", "a value of its own in each row"
        if column.length > _TEXT_LENGTH and column.distinct > column.present / 2:
            return "left out", "free text"
        return "key", "text"
    if column.kind == "bool":
        return "key", "yes or no"
    if not column.whole:
        return "number", "numbers with a fraction"
    return _whole(column, unique)


def _whole(column: ColumnFacts, unique: bool) -> tuple[Role, str]:
    """Return what integers are: names and values tell ids from amounts."""
    words = {*snake_case(column.name).split("_")}
    if unique and (column.ascends or words & _IDS):
        return "left out", "a value of its own in each row"
    if column.distinct <= _FEW_KEYS and not words & _NUMBERS:
        return "key", "few values"
    if words & _IDS and not words & _NUMBERS:
        return "key", "its name"
    span = column.most - column.least + 1
    # A column of floats is one or the other: read as both, it would have to be integers.
    both: Role = "number and key" if column.kind == "int" else "number"
    if words & _NUMBERS:
        return both if column.distinct <= _MAX_BOTH else "number", "its name"
    if column.distinct > _FEW_KEYS and column.distinct < _SPARSE * span and not _falls_off(column):
        return "key", "ids: few of their range"
    return both, "integers"


def _check_role(column: ColumnFacts, role: Role, option: str) -> None:
    """Refuse a use that a column's values cannot have.

    Raises:
        ConfigurationError: They cannot.
    """
    if not column.name.strip():
        raise ConfigurationError(f"{option} {shown(column.name)}: write a name in the header")
    lists = column.nested or column.kind in ("list", "text")
    fits = {
        "list": column.kind != "numbers" and lists,
        "number": column.is_number,
        "key": not column.nested and column.kind not in ("numbers", "other"),
    }
    if column.kind == "time" and role == "key":
        fits["key"] = bool(column.text)
    if not fits[role]:
        said = column.hint or f"it holds {_said_kind(column)}, such as {column.examples[:40]}"
        raise ConfigurationError(f"{option} {shown(column.name)}: {said}; leave the option out")


def _said_kind(column: ColumnFacts) -> str:
    kinds = {"text": "words", "time": "times", "list": "lists", "numbers": "lists of numbers"}
    return kinds.get(column.kind, shown(column.type, 40)[1:-1])


_MAX_BOTH = 1000
"""An amount of no more values is a key, too: a model then learns any shape of it."""


def _falls_off(column: ColumnFacts) -> bool:
    """Whether the median lies near the low end, as of amounts; ids lie anywhere."""
    return (column.middle - column.least) < 0.02 * (column.most - column.least)
