"""Snapshots, compared byte for byte."""

from bench.snapshots import snapshot_files

__all__ = ["snapshot_files"]
