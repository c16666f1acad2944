"""Names that have gone, and what to write now: files and commands of users still have them."""

CALLED = {
    "globo": "news_model",
    "globo_counters": "news_counters",
    "globo_crossed": "news_crossed",
    "globo_history": "news_history",
    "globo_rates": "news_rates",
    "globo_schema": "news_schema",
}
_MOVED = dict.fromkeys(("criteo", "criteo_schema"), "bench/criteo.py of the source tree")


def hint(name: str) -> str:
    """Return what became of a name, to end a message with; nothing if it was never one."""
    if name in CALLED:
        return f"; it is called {CALLED[name]} now"
    return f"; {_MOVED[name]} has it now" if name in _MOVED else ""


def missing(module: str, name: str) -> Exception:
    """Return the error of a module that is asked for a name that it lacks."""
    said = f"module {module!r} has no {name!r}{hint(name)}"
    # With an AttributeError, `from module import name` would not show the message.
    return ImportError(said) if hint(name) else AttributeError(said)
