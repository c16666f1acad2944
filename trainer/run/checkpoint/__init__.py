"""The checkpoint: all that a trainer needs to go on where it stopped."""
