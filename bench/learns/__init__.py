"""What a run learns by its defaults, and what is said of its data: `python -m bench.learns`."""
