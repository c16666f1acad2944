"""Meanings of column names: labels, ratings and times."""

import re

LABELS = (
    *("label", "y", "target", "click", "clicked", "clicks", "is_click", "is_clicked", "clk"),
    *("converted", "conversion", "is_conversion", "purchase", "purchased", "bought", "buy"),
    *("installed", "is_installed", "like", "liked", "class", "outcome", "response", "churn"),
    *("default", "income", "survived", "subscribed", "finish", "is_positive", "labels", "deposit"),
)
RATINGS = ("rating", "ratings", "stars", "star", "score", "overall", "rate", "grade")
TIMES = (
    *("ts", "time", "timestamp", "datetime", "date", "event_time", "eventtime", "time_stamp"),
    *("created_at", "created", "unixtime", "unix_time", "event_timestamp", "date_time", "at"),
    *("click_time", "request_time", "occurred_at", "event_date", "when", "unixreviewtime"),
)
# RecBole's atomic files say of each column what it holds: "user_id:token".
TYPED_NAME = re.compile(r"(.+):(token|float|token_seq|float_seq)")


def tells_number(name: str) -> bool:
    """Whether a column of this name holds numbers or times also where they are texts."""
    return snake_case(name) in (*LABELS, *RATINGS, *TIMES)


def snake_case(name: str) -> str:
    """Return a name in small letters, words apart by underscores, what it says of its type off."""
    typed = TYPED_NAME.fullmatch(name.strip())
    name = typed[1] if typed else name
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s\-.]+", "_", apart).lower()
