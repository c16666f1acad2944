"""Connections to what the server talks to: Triton, Redis, nodes, clocks."""
