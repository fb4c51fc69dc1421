"""Groups of one rollout, whose tokens were sampled under given versions."""

from __future__ import annotations

import numpy as np

from headrace.types import Group, Prompt, Rollout, Trace


def group(group_id: int, *versions: int) -> Group:
    trace = Trace(
        token_ids=np.arange(len(versions), dtype=np.int32),
        trained=np.ones(len(versions), np.bool_),
        logprobs=np.zeros(len(versions), np.float32),
        versions=np.array(versions, np.int32),
    )
    rollout = Rollout(id=f"{group_id}/0", index=0, traces=[trace], ending="finished", reward=1.0)
    return Group(id=group_id, prompt=Prompt(id="p", text="x"), version=min(versions), rollouts=[rollout])
