"""The search for a plan of ranks, and the simulator of a step: issue E."""
