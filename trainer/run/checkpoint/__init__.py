"""What a trainer needs to go on where it stopped."""
