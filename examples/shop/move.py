"""Prints a target that moves the first half of the items' buckets to node-1, for `reshard`."""

import json
import subprocess

command = ["embertide", "plan", "show", "--control", "127.0.0.1:7070", "--json"]
plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
move = {"table": "item", "buckets": "0-3", "owners": ["node-1/0"]}
print(json.dumps({"base_epoch": int(plan["epoch"]), "assignments": [move]}))
