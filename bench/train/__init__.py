"""The trainer's results: quality, pruning, drift and speed."""
