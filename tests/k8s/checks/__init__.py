"""Checks of what no schema knows: names that must meet, budgets that must fit, flags that exist.

A check takes resources and returns its complaints; test_checks.py shows each one a manifest that is
broken on purpose.
"""

from collections.abc import Callable

from manifests import Resource

from checks.agreement import fleet, redis, tls
from checks.names import addresses, ports, references, selectors
from checks.pods import budgets, flags, images, probes, processes, security
from checks.training_jobs import jobs, ranks

Check = Callable[[list[Resource]], list[str]]

CHECKS: list[Check] = [
    selectors, ports, probes, budgets, images, references, addresses, jobs, ranks, security, fleet,
    flags, processes, tls, redis,
]  # fmt: skip
