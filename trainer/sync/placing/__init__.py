"""Predicts what a training step takes under a plan, and searches for a plan that takes less."""
