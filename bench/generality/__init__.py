"""Data sets of many kinds, the defaults of `embertide init` over them, and a tuned peer."""
