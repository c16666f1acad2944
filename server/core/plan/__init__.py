"""Plans: what they hold, when they are valid, how they follow each other, and who makes them."""
