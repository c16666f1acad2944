"""What the trainer reaches: quality, pruning, drift and speed."""
