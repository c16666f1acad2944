"""Control plane and command line: what operators talk to."""
