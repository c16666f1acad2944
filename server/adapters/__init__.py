"""What the server talks to: Triton, Redis, nodes, clocks."""
