"""Publishing of the trained model: snapshots, and versions on the bus."""
