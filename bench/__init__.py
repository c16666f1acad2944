"""Benchmarks against what a user would pick instead. `make bench-serve` runs `bench.serve`."""
