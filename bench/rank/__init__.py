"""Ranking: one user and many candidates."""
