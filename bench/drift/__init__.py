"""How a fleet follows what is read: hot rows, moves, and what both are worth."""
