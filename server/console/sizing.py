"""The form that says how large a fleet would have to be: `embertide sizing` as a page."""

from collections.abc import Mapping
from typing import Any

from embertide.server.cli.sizing import figures
from embertide.server.core.sizing import QUESTIONS, SizingError, answers_of, size

_LETTERS_MAX = 24  # of an answer, as the form's fields take them


def page(query: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page shows for the answers of a query; without one, for the defaults."""
    texts = {name: query.get(name, "")[: _LETTERS_MAX + 1] for name in QUESTIONS}
    questions = [
        {
            "name": name,
            "label": each.label,
            "value": texts[name].strip() or f"{each.default:,.15g}",
        }
        for name, each in QUESTIONS.items()
    ]
    try:
        answers = answers_of(texts)
    except SizingError as error:
        return {
            "questions": questions,
            "wrong": error.question,
            "problem": str(error),
            "figures": [],
            "command": "",
        }
    changed = [
        f"--{name.replace('_', '-')} {value:.15g}"
        for name, value in answers.items()
        if value != QUESTIONS[name].default
    ]
    return {
        "questions": questions,
        "wrong": "",
        "problem": "",
        "figures": list(figures(size(answers))),
        "command": " ".join(["embertide sizing", *changed]),
    }
