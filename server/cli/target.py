"""Target files: where buckets shall be, in JSON with the names that operators use.

{"base_epoch": 7, "assignments": [{"table": "user", "buckets": "0-7", "owners": ["node-0/0"]}],
 "hot_rows": [{"table": "user", "rows": 1000}],
 "tier_shares": [{"table": "user", "device": "node-0/0", "tier": "ddr", "bytes": 1048576}]}

Any of the lists may be left out. Rows null: no limit of the table's own; bytes null: no share.
"""

import json
from pathlib import Path
from typing import Any

from embertide._common.reporting import system_error
from embertide.server.adapters.process import UsageError
from embertide.server.cli.control_client import table_of
from embertide.server.core.plan.hot import NO_LIMIT
from embertide.v1 import control_pb2, plan_pb2


def read_target(path: Path, plan: plan_pb2.Plan) -> control_pb2.ReshardTarget:
    """Read a target file, its names resolved by a plan.

    Raises:
        ProcessError: The file cannot be read, or an entry is not as above; the message names it.
    """
    try:
        said = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--target {system_error(error)}") from error
    except ValueError as error:
        raise UsageError(f"--target {path} is not JSON: {error}") from error
    named = said if isinstance(said, dict) else {}
    lists = [named.get(name, []) for name in ("assignments", "hot_rows", "tier_shares")]
    if not any(lists) or not all(isinstance(each, list) for each in lists):
        raise UsageError(
            f"--target {path}: write an object with base_epoch, and assignments, hot_rows or "
            "tier_shares"
        )
    if not isinstance(said.get("base_epoch"), int):
        raise UsageError(
            f"--target {path}: base_epoch is {said.get('base_epoch')!r}; name the plan it was made "
            f"from (now {plan.epoch})"
        )
    target = control_pb2.ReshardTarget(base_epoch=said["base_epoch"])
    for number, each in enumerate(lists[0]):
        try:
            target.assignments.append(_assignment(each, plan))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"--target {path}: assignment {number} is {json.dumps(each)[:200]}; write "
                '{"table": NAME, "buckets": "FIRST-LAST", "owners": ["NODE/DEVICE"]}'
            ) from error
    for number, each in enumerate(lists[1]):
        try:
            rows = NO_LIMIT if each["rows"] is None else each["rows"]
            target.hot_rows.add(table_id=table_of(plan, each["table"]).id, rows=rows)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"--target {path}: hot_rows {number} is {json.dumps(each)[:200]}; write "
                '{"table": NAME, "rows": N}, N null for no limit'
            ) from error
    for number, each in enumerate(lists[2]):
        try:
            target.tier_shares.append(_share(each, plan))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"--target {path}: tier_shares {number} is {json.dumps(each)[:200]}; write "
                '{"table": NAME, "device": "NODE/DEVICE", "tier": "ddr", "bytes": N}, N null for '
                "no share"
            ) from error
    return target


def _share(said: dict[str, Any], plan: plan_pb2.Plan) -> plan_pb2.TierShare:
    return plan_pb2.TierShare(
        device=_owner(said["device"], plan),
        tier=plan_pb2.Tier.Value("TIER_" + said["tier"].upper()),
        table_id=table_of(plan, said["table"]).id,
        bytes=0 if said["bytes"] is None else said["bytes"],
    )


def _assignment(said: dict[str, Any], plan: plan_pb2.Plan) -> plan_pb2.Assignment:
    table = table_of(plan, said["table"]).id if "table" in said else said["table_id"]
    if "buckets" in said:
        first, _, last = str(said["buckets"]).partition("-")
        begin, count = int(first), int(last or first) - int(first) + 1
    else:
        begin, count = said["bucket_begin"], said["bucket_count"]
    return plan_pb2.Assignment(
        table_id=table,
        bucket_begin=begin,
        bucket_count=count,
        owners=[_owner(each, plan) for each in said["owners"]],
    )


def _owner(said: Any, plan: plan_pb2.Plan) -> plan_pb2.Owner:
    if isinstance(said, dict):
        return plan_pb2.Owner(node=said["node"], device=said["device"])
    node, _, device = said.rpartition("/")
    names = [each.name for each in plan.topology.nodes]
    if node not in names:
        raise UsageError(
            f"no node {node!r} in plan {plan.epoch}; it has {', '.join(names)} (write NODE/DEVICE)"
        )
    return plan_pb2.Owner(node=names.index(node), device=int(device))
