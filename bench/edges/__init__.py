"""Attacks and mishaps from outside: files, callers, strangers, full disks, restarts."""
