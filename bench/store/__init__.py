"""Benchmarks of the store against what people use today; `python -m bench.store --help`."""
