"""What a configuration may ask for, but what its user probably does not expect. Each remark is one line, not an error.

`headrace check` prints the remarks, and a run prints them at its start.
"""

import itertools
from collections.abc import Sequence

from headrace.config.declared import loss_facts
from headrace.config.memory import runs_on_gpu
from headrace.config.model_dir import ModelFacts
from headrace.config.schema import AgentTaskConfig, Config

WHOLE_ANSWERS = ("rloo", "maxrl")
"""The advantages of algorithms that sum over the tokens of an answer instead of taking their mean."""


def dtypes(config: Config) -> dict[str, str]:
    """Return the dtypes in which the engines serve and in which the trainer computes, on the devices of this host."""
    on_gpu = runs_on_gpu(config.training.device)
    trainer = config.training.compute_dtype or ("bfloat16" if on_gpu else "float32")
    return {"engine": config.model.dtype, "trainer": trainer}


def quantization(arguments: Sequence[str]) -> str:
    """Return the method by which these arguments of a vLLM server let it quantise weights; empty if it does not."""
    for word, following in itertools.pairwise([*arguments, ""]):
        option, _, value = word.partition("=")
        if option in ("--quantization", "-q"):
            return value or following
    return ""


def remarks(config: Config, facts: ModelFacts) -> list[str]:
    """Return the remarks about a checked configuration. `facts` are those of its model."""
    algorithm, rollouts, evaluate = config.algorithm, config.rollouts, config.evaluate
    found = []
    if algorithm.advantage in WHOLE_ANSWERS and loss_facts(algorithm.loss).uses_rewards:
        effect = {
            "token": "the size of a step depends on how long its answers are",
            "sequence": "a token weighs the more, the shorter its answer is",
        }.get(algorithm.normalize)
        if effect is not None:
            found.append(
                f"[algorithm] normalize: {algorithm.advantage!r} sums over the tokens of an answer, which is "
                f'normalize = "constant"; with {algorithm.normalize!r} {effect}'
            )
    if rollouts.keep_routing and facts.experts and isinstance(config.task, AgentTaskConfig):
        found.append(
            "[rollouts] keep_routing: does not apply to agents, whose tokens are recorded without their experts; "
            "the trainer's routers choose again"
        )
    served, computed = dtypes(config).values()
    if served != computed:
        found.append(
            f"[model] dtype: engines sample in {served}, in which the trained weights are served without rounding, and "
            f"the trainer's passes are in {computed}, so ratios are not exactly 1 at lag 0 "
            f'(the same for both: [model] dtype = "{computed}", or [training] compute_dtype = "{served}")'
        )
    method = quantization(config.engine.arguments)
    if config.engine.kind == "vllm" and method:
        found.append(
            f"[engine] arguments: servers quantise the weights that they load ({method}), so ratios are not 1 at lag "
            "0; the digest is checked when a version is staged, and only the canary checks what is served"
        )
    for key, rounded in (
        ("quantize", config.engine.quantize != "none"),
        ("kv_dtype", config.engine.kv_dtype != "auto"),
    ):
        if rounded and not algorithm.corrections:
            found.append(
                f"[engine] {key}: tokens are sampled by a rounded model ({getattr(config.engine, key)}), so ratios are "
                'not 1 at lag 0, and nothing limits them (set [algorithm] corrections, such as ["tis"])'
            )
    if rollouts.min_group is not None and rollouts.min_group < rollouts.group_size:
        found.append(
            "[rollouts] min_group: the answers that a group leaves behind are its longest, so what is trained is "
            "shorter than what is generated (length_drift says by how much)"
        )
    if evaluate.samples > 1 and evaluate.temperature == 0:
        found.append(
            f"[evaluate] samples: at temperature 0 the {evaluate.samples} answers to a prompt are the same, unless the "
            "task itself draws (set [evaluate] temperature, or samples = 1)"
        )
    return found
