"""What comes from outside: files, callers, strangers, full disks, restarts."""
