"""A training run: its loop, its state and versions, its start, and its checkpoints."""
