"""The store's tiers against what a user would take instead."""
