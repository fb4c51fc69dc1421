"""Judges one answer of the quickstart's task. It runs in a sandbox, without network."""

import json
import sys

asked = json.load(sys.stdin)
right, given = asked["answer"], asked["completion"]
in_place = sum(one == other for one, other in zip(given, right, strict=False))
reward = in_place / max(len(given), len(right))
print(json.dumps({"reward": reward, "right": given == right}))
