"""The command `embertide`: starts trainer, nodes and Redis as processes, imports none of them."""
