"""Strategies of synchronisation, measured: what they send and cost, and how well they learn."""
