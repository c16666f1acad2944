"""The control plane's decisions: messages and ticks in, messages and writes out; no I/O."""
