"""Checks that every token is tagged with the version that sampled it, by replaying rows under the tagged versions.

The engine keeps keys and values across swaps, so a row holds those of several versions. The input before a sampled
token went through the weights of that token's tag. The plain model repeats this with a cache of its own: it computes
each stretch of tokens with the same tag under the weights of that tag.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from headrace.bench.engine_drive import DrawnAnswer
from headrace.bench.engine_rescore import logprobs_of
from headrace.bench.engine_swaps import install
from headrace.bench.publishing import Weights
from headrace.engines.base import Sampling
from headrace.models.head import float32_head
from headrace.types import Float32Array, Int32Array

TAG_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""If a log-probability differs by more than this from that of the tagged version, the tag is wrong."""


def check_tags(
    twin: Any,
    sets: tuple[Weights, Weights],
    prompts: list[Int32Array],
    answers: list[DrawnAnswer],
    rows: list[int],
    sampling: Sampling,
    dtype: str,
) -> dict[str, Any]:
    """Count the tokens whose tag cannot be right.

    In every row, a tag must not be smaller than the tag before it. The rows in `rows` are replayed too, and their
    log-probabilities are compared with the recorded ones.
    """
    backwards = sum(int((np.diff(answer.versions) < 0).sum()) for answer in answers)
    errors, others, outside = [], [], 0
    for row in rows:
        answer = answers[row]
        expected = replay(twin, sets, prompts[row], answer, sampling)
        swapped = DrawnAnswer(answer.token_ids, answer.logprobs, (answer.versions + 1).astype(np.int32))
        wrong = replay(twin, sets, prompts[row], swapped, sampling)
        # Minus infinity means that truncation leaves the token out: by rounding at the edge, or because the tag is
        # wrong.
        inside, known = ~np.isneginf(expected), ~np.isneginf(wrong)
        outside += int((~inside).sum())
        errors.append(np.abs(expected[inside] - answer.logprobs[inside]))
        others.append(np.abs(wrong[known] - answer.logprobs[known]))
    joined, other = np.concatenate(errors), np.concatenate(others)
    return {
        "mis_tagged": backwards + int((joined > TAG_TOLERANCE[dtype]).sum()),
        "replayed_tokens": len(joined) + outside,
        "replayed_outside": outside,
        "versions_seen": len({int(v) for answer in answers for v in np.unique(answer.versions)}),
        "replay_max_error": float(joined.max(initial=0.0)),
        "replay_mean_error": float(joined.mean()) if len(joined) else 0.0,
        # The mean error if all tags were wrong by one. It must be far above rounding, or the check could find nothing.
        "other_version_mean_error": float(other.mean()) if len(other) else 0.0,
    }


@torch.inference_mode()
def replay(
    twin: Any, sets: tuple[Weights, Weights], prompt: Int32Array, answer: DrawnAnswer, sampling: Sampling
) -> Float32Array:
    """Return the log-probabilities of an answer whose inputs go through the weights of their tags.

    Keys and values of older versions are kept, as in the engine.
    """
    ids = torch.from_numpy(np.concatenate([prompt, answer.token_ids]).astype(np.int64)).to(twin.device)
    cache, fed, found = DynamicCache(config=twin.config), 0, []
    for version, stretch in groupby(answer.versions.tolist()):
        install(twin, sets[version % 2])
        end = max(fed, len(prompt) - 1) + len(list(stretch))
        drawn = end - max(fed, len(prompt) - 1)
        with float32_head(twin):
            output = twin(input_ids=ids[None, fed:end], past_key_values=cache, use_cache=True, logits_to_keep=drawn)
        found.append(logprobs_of(output.logits[0], ids[end - drawn + 1 : end + 1], sampling))
        fed = end
    return np.concatenate(found)
