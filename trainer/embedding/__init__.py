"""Embedding tables in the store, as an nn.Module."""
