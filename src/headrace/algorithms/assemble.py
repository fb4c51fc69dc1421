"""Assembly of scored groups into a batch: sequences, advantages, weights. No torch is imported here.

The batch depends on the set of groups, never on the order in which they arrived. The weights in the batch already
contain the normalisation of the whole optimizer step.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.algorithms.advantages import FloatArray
from headrace.algorithms.credit import BY_ROLLOUT, Credit, token_advantages, token_rewards
from headrace.types import POLICY, Batch, Group, Int32Array, Kept, Rollout, TeacherScores, Trace, join_routing

Normalize = Literal["token", "sequence", "constant"]


def assemble(
    groups: Sequence[Group],
    *,
    step: int,
    version: int,
    advantage: str,
    normalize: Normalize,
    group_size: int,
    max_tokens: int,
    temperature: float,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    length_penalty: float = 0.0,
    mask_overlong: bool = False,
    credit: Credit = BY_ROLLOUT,
    critic: bool = False,
    minibatches: int = 1,
    epochs: int = 1,
    republished: Sequence[int] = (),
) -> Batch:
    """Assemble the batch of one optimizer step: every trace of every usable rollout becomes one sequence.

    The weight of a trained token depends on `normalize`. With "token" it is 1 / (trained tokens of the step). With
    "sequence" it is 1 / (rollouts x trained tokens of its rollout), where rollouts without a trained token are not
    counted. With "constant" it is 1 / (groups x group_size x max_tokens). Advantages are computed from rewards shaped
    by length (see `shaped`); the recorded rewards stay as they were judged. `credit` says how finely. With
    `mask_overlong`, answers that were cut at their length limit are compared with the others, but not trained. All
    groups must train the same policy. `temperature` is that of tokens which were recorded without one.

    With a `critic`, the batch has rewards in place of advantages. With several `minibatches`, whole groups are dealt
    out to them in turn, and weights are normalised over each minibatch as if it were a step of its own.
    """
    policies = {group.policy for group in groups} or {POLICY}
    if len(policies) > 1:
        raise ValueError(f"one batch trains one policy, not {', '.join(sorted(policies))}")
    ordered = [
        sorted(group.usable, key=lambda rollout: rollout.index) for group in sorted(groups, key=lambda group: group.id)
    ]

    everyone = [rollout for rollouts in ordered for rollout in rollouts]
    if unjudged := [rollout.id for rollout in everyone if rollout.reward is None]:
        raise ValueError(f"rollout {unjudged[0]} has not been judged")

    def rewards(rollouts: Sequence[Rollout]) -> FloatArray:
        return shaped(
            np.array([rollout.reward for rollout in rollouts], np.float64),
            np.array([rollout.sampled_tokens for rollout in rollouts], np.int32),
            max_tokens=max_tokens,
            overlong_buffer=overlong_buffer,
            overlong_penalty=overlong_penalty,
            length_penalty=length_penalty,
        )

    rewards_of = [rewards(rollouts) for rollouts in ordered]
    earned: list[FloatArray] = []
    if critic:
        values = np.zeros(sum(len(trace) for rollout in everyone for trace in rollout.traces), np.float64)
        for rollouts, own in zip(ordered, rewards_of, strict=True):
            for rollout, reward in zip(rollouts, own, strict=True):
                earned.extend(token_rewards(rollout, float(reward), credit.scorers))
    else:
        values = token_advantages(advantage, ordered, rewards_of, credit)
    if mask_overlong:
        ordered = [[_without_training(rollout) for rollout in rollouts] for rollouts in ordered]
    minibatches = max(1, min(minibatches, len(ordered)))
    weight_in = [
        _weight_in(ordered[part::minibatches], normalize, group_size * max_tokens) for part in range(minibatches)
    ]
    traces: list[Trace] = []
    weights_of, numbers, part_of = [], [], []
    known: dict[tuple[int, int], int] = {}
    for index, rollouts in enumerate(ordered):
        part = index % minibatches
        for rollout in rollouts:
            weight = weight_in[part](rollout)
            for position, trace in enumerate(rollout.traces):
                traces.append(trace)
                weights_of.append(weight)
                part_of.append(part)
                # The n-th traces of a group's rollouts begin with the same tokens. The traces of one rollout (several
                # agents) need not.
                numbers.append(known.setdefault((index, position), len(known)))
    named: dict[str, Any] = {"step": step, "version": version, "republished": list(republished), "epochs": epochs}
    if critic:
        named["rewards"] = _joined(earned, np.float32)
    if minibatches > 1:
        named["minibatches"] = np.asarray(part_of, np.int32)
    sampled_at = _temperatures(traces, temperature)
    return _batch(traces, values, weights_of, numbers, **named, **sampled_at, policy=policies.pop())


def _weight_in(groups: Sequence[Sequence[Rollout]], normalize: Normalize, largest: int) -> Callable[[Rollout], float]:
    """Return the function that gives the weight of a rollout's trained tokens among these groups.

    `largest` is the most tokens that a group can have.
    """
    everyone = [rollout for rollouts in groups for rollout in rollouts]
    total = sum(rollout.trained_tokens for rollout in everyone)
    counted = sum(rollout.trained_tokens > 0 for rollout in everyone)

    def weight(rollout: Rollout) -> float:
        if normalize == "token":
            return 1.0 / max(total, 1)
        if normalize == "sequence":
            return 1.0 / max(counted * rollout.trained_tokens, 1)
        return 1.0 / (len(groups) * largest)

    return weight


def _without_training(rollout: Rollout) -> Rollout:
    """Return a rollout that was cut at its length limit with no token marked as trained, and any other as it is."""
    if rollout.ending != "truncated":
        return rollout
    traces = [msgspec.structs.replace(trace, trained=trace.trained & False) for trace in rollout.traces]
    return msgspec.structs.replace(rollout, traces=traces)


def _temperatures(traces: Sequence[Trace], unrecorded: float) -> dict[str, Any]:
    """Return the batch's `temperature`, and its `temperatures` if the trained tokens were sampled at several."""
    every = _joined([trace.temperature_of_tokens(unrecorded) for trace in traces], np.float64)
    used = np.unique(every[_joined([trace.trained for trace in traces], np.bool_)])
    if len(used) > 1:
        return {"temperature": unrecorded, "temperatures": every.astype(np.float32)}
    return {"temperature": float(used[0]) if len(used) else unrecorded}


def shaped(
    rewards: FloatArray,
    lengths: Int32Array,
    *,
    max_tokens: int,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    length_penalty: float = 0.0,
) -> FloatArray:
    """Return the rewards minus the costs of length: `overlong`, and `length_penalty` x length / max_tokens."""
    cost = overlong(lengths, max_tokens=max_tokens, buffer=overlong_buffer) * overlong_penalty
    return np.asarray(rewards - cost - length_penalty * (lengths / max_tokens), np.float64)


def overlong(lengths: Int32Array, *, max_tokens: int, buffer: int) -> FloatArray:
    """Return DAPO's soft penalty: 0 up to max_tokens - buffer, then linear to 1 at max_tokens. Buffer 0 is off."""
    if buffer == 0:
        return np.zeros(len(lengths), np.float64)
    return np.asarray(np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0), np.float64)


def assemble_demonstrations(
    pairs: Sequence[tuple[Int32Array, Int32Array]], *, step: int, version: int, policy: str = POLICY
) -> Batch:
    """Assemble the batch of one supervised step on (prompt ids, answer ids): mean likelihood of the answers' tokens.

    No policy sampled these tokens, so their versions are `NO_VERSION` and their recorded log-probabilities are 0.
    """
    traces = []
    for prompt_ids, answer_ids in pairs:
        trace = Trace.of_context(np.concatenate([prompt_ids, answer_ids]).astype(np.int32))
        trace.trained[len(prompt_ids) :] = True
        traces.append(trace)
    n = len(traces)
    weight = 1.0 / max(sum(trace.trained_tokens for trace in traces), 1)
    named = {"step": step, "version": version, "policy": policy, "objective": "imitation"}
    values = np.ones(sum(len(trace) for trace in traces), np.float64)
    return _batch(traces, values, [weight] * n, list(range(n)), **named)


def _batch(
    traces: Sequence[Trace], values: FloatArray, weights: Sequence[float], groups: Sequence[int], **rest: Any
) -> Batch:
    """Return the batch of these traces, with the advantage of every token and the weight of each trace's tokens."""
    lengths = np.array([len(trace) for trace in traces], np.int32)
    trained = _joined([trace.trained for trace in traces], np.bool_)
    per_token = np.repeat(np.asarray(weights, np.float64), lengths)
    return Batch(
        token_ids=_joined([trace.token_ids for trace in traces], np.int32),
        lengths=lengths,
        groups=np.asarray(groups, np.int32),
        trained=trained,
        logprobs=_joined([trace.logprobs for trace in traces], np.float32),
        versions=_joined([trace.versions for trace in traces], np.int32),
        advantages=np.where(trained, values, 0.0).astype(np.float32),
        weights=np.where(trained, per_token, 0.0).astype(np.float32),
        kept=Kept.joined([(len(trace), trace.kept) for trace in traces]),
        routing=join_routing([(len(trace), trace.routing) for trace in traces]),
        teacher=TeacherScores.joined([(len(trace), trace.teacher) for trace in traces]),
        **rest,
    )


def _joined(arrays: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
