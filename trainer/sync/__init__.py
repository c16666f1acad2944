"""Training by many ranks: who they are, which buckets each owns, what they exchange."""
