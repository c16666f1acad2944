"""`python -m embertide.server.cli` is `embertide`."""

from embertide.server.cli import main

main()
