"""Are tokens tagged with the version that drew them? Replays rows token by token of their tags and compares.

With kept keys and values a row holds those of several versions: the input before a sampled token went through the
weights of that token's tag. The plain model does the same here, with its own cache, one stretch of a tag at a time.
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
"""A log-probability further off than this was not given by the version of its tag."""


def check_tags(
    twin: Any,
    sets: tuple[Weights, Weights],
    prompts: list[Int32Array],
    answers: list[DrawnAnswer],
    rows: list[int],
    sampling: Sampling,
    dtype: str,
) -> dict[str, Any]:
    """Tokens whose tag cannot be right. Every row: tags never go back. The chosen rows: replayed."""
    backwards = sum(int((np.diff(answer.versions) < 0).sum()) for answer in answers)
    errors, others, outside = [], [], 0
    for row in rows:
        answer = answers[row]
        expected = replay(twin, sets, prompts[row], answer, sampling)
        swapped = DrawnAnswer(answer.token_ids, answer.logprobs, (answer.versions + 1).astype(np.int32))
        wrong = replay(twin, sets, prompts[row], swapped, sampling)
        # Minus infinity: truncation leaves the token out, by rounding at its edge or because the tag is wrong.
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
        # What errors would be like if all tags were off by one: so far from rounding, the check can see it.
        "other_version_mean_error": float(other.mean()) if len(other) else 0.0,
    }


@torch.inference_mode()
def replay(
    twin: Any, sets: tuple[Weights, Weights], prompt: Int32Array, answer: DrawnAnswer, sampling: Sampling
) -> Float32Array:
    """Log-probabilities of an answer whose inputs go through the weights of the tags, with all older keys kept."""
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
