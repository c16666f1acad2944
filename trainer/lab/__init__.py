"""Studies over whole runs: backtests, searches, memory that a run would need, caches by trace.

The commands start them; nothing else of the trainer imports them.
"""
