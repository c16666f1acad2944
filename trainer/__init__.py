"""Continuous trainer: events in, versions of the whole model out."""
