"""The quality of a run with its defaults, and the remarks on its data: `python -m bench.learns`."""
