"""Layers between callers and the backend: the stock server's front end, and others."""
