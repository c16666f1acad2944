"""`python -m embertide.server.cli` is `embertide`."""

from embertide.server.cli.app import main

main()
