"""The configuration: keys are pinned, every mistake is one line that names its place."""

import re
import tomllib
from pathlib import Path

import pytest

from headrace.config import (
    AgentTaskConfig,
    Config,
    DatasetTaskConfig,
    EnvironmentTaskConfig,
    FunctionScorerConfig,
    GymTaskConfig,
    JudgeConfig,
    ProgramConfig,
    TeacherConfig,
    dump_config,
    load_config,
    make_config,
    with_settings,
)
from headrace.config.declared import correction_facts, losses_that_read
from headrace.config.evaluate import EvaluationSetConfig
from headrace.config.load import POLICY_SECTIONS
from headrace.config.other_names import NAMES
from headrace.config.schema import AlgorithmConfig
from headrace.config.scorers import ProcessRewardConfig
from headrace.errors import ConfigError

MINIMAL = {"model": {"path": "m"}, "task": {"kind": "gym", "name": "spell_backward"}}

KEYS = {
    "run": {"name", "directory", "seed", "versions"},
    "model": {"path", "revision", "chat_template", "weights", "dtype"},
    "engine": {
        "kind", "count", "gpus", "gpus_per_engine",
        "threads", "slots", "block_size", "cache_tokens", "max_length", "prefill_chunk", "interrupt",
        "kv", "device", "graphs", "compile", "python", "urls", "port", "arguments", "memory_fraction",
        "expert_kernels", "fuse_projections", "router_kernel", "quantize", "kv_dtype", "staging",
    },
    "rollouts": {
        "group_size", "max_tokens", "max_turns", "temperature", "stop", "top_k", "top_p", "min_p", "keep_routing",
        "min_group", "straggler_seconds", "curriculum",
    },
    "scoring": {"workers", "timeout", "judgements_per_worker", "shuffle"},
    "buffer": {"depth", "max_lag", "groups", "on_stale", "correct_above", "filter", "oversample"},
    "algorithm": {
        "advantage", "loss", "clip_low", "clip_high", "sapo_tau_positive", "sapo_tau_negative", "dppo_delta",
        "proximal_mix", "proximal", "teacher", "teacher_divergence", "teacher_top_k", "teacher_weight", "teacher_field",
        "kl", "kl_weight", "entropy_weight",
        "corrections", "tis_cap", "icepop_low", "icepop_high", "mis_ratio", "mis_low", "mis_high",
        "opsm_limit", "overlong_buffer", "overlong_penalty", "length_penalty", "mask_overlong", "normalize",
        "credit", "discount", "baseline", "outcome_weight", "reward_kl", "reward_kl_weight", "entropy_target",
        "entropy_rate", "minibatches", "epochs", "critic", "gae_lambda",
        "critic_learning_rate", "value_weight", "sequence_tis_ratio", "sequence_tis_low", "sequence_tis_high",
    },
    "training": {
        "threads", "learning_rate", "warmup_steps", "schedule", "weight_decay", "beta1", "beta2", "clip_norm",
        "micro_batch_tokens", "share_prefixes", "checkpoint_every", "checkpoint_directory", "keep_checkpoints",
        "learning_rates", "optimizer", "max_skipped",
        "ranks", "gpus", "tensor_parallel", "compute_dtype", "activation_checkpointing", "offload",
        "device", "compile",
    },
    "lora": {"rank", "alpha", "dropout", "targets", "modules", "base", "serve", "share_base"},
    "warm_start": {"steps", "batch", "learning_rate"},
    "delivery": {
        "transport", "directory", "keep_files", "bind", "send", "dtype", "rolling", "patience", "publish_every",
        "canary_tokens", "canary_tolerance", "deadline",
    },
    "evaluate": {
        "every", "prompts", "during", "samples", "temperature", "deadline", "pass_at", "majority_at", "answer_pattern",
        "sets",
    },
    "gateway": {"serve", "bind", "port", "connections", "max_body", "queue"},
    "pipeline": {"launcher", "stall_seconds", "start_seconds", "restarts", "one_gpu", "record"},
    "cluster": {"hosts", "address", "silence_seconds", "wait_seconds", "trusted_network"},
    "observe": {"display", "timeline", "keep_rollouts", "trackers", "tracker_options", "prometheus"},
}  # fmt: skip

LOSSES = sorted(path.stem for path in Path("src/headrace/algorithms/losses/policy").glob("[!_]*.py"))


OR_OWN = "or module:attribute, or file.py:attribute"

READ_BY_LOSSES = {key: names for key in sorted(KEYS["algorithm"]) if (names := losses_that_read(key))}
READ_BY_CORRECTIONS = {key: name for name, keys in correction_facts().reads.items() for key in keys}


PROMPT_KEYS = {
    "path", "revision", "subset", "split", "heldout_path", "heldout_split", "fields", "system", "demonstration",
    "weight",
}  # fmt: skip
AGENT_KEYS = {*PROMPT_KEYS, "agent", "command", "workers", "concurrency", "timeout"}
DATASET_KEYS = {*PROMPT_KEYS, "format", "reward", "reward_weights"}
GYM_KEYS = {"name", "config", "size", "system", "suffix", "answer_pattern", "weight"}
ENVIRONMENT_KEYS = {"factory", "config", "weight"}
SCORER_KEYS = {"scorer", "weight", "config"}
SET_KEYS = {
    "path", "revision", "subset", "split", "fields", "task", "prompts", "samples", "temperature", "max_tokens", "top_k",
    "top_p", "min_p", "pass_at", "majority_at", "answer_pattern",
}  # fmt: skip
SERVED_KEYS = {"weight", "concurrency", "timeout", "retries", "patience"}
PROGRAM_KEYS = {*SERVED_KEYS, "command", "memory", "processes", "network", "environment"}
MODEL_SCORER_KEYS = {
    *SERVED_KEYS, "model", "revision", "dtype", "gpus", "memory_fraction", "threads", "cores", "slots", "max_length",
}  # fmt: skip
JUDGE_KEYS = {
    *MODEL_SCORER_KEYS, "template", "system", "url", "served_model", "api_key", "pattern", "field", "words", "samples",
    "combine", "temperature", "max_tokens", "cache",
}  # fmt: skip
PROCESS_REWARD_KEYS = {*MODEL_SCORER_KEYS, "markers", "tag", "good", "bad", "whole", "cancel_below", "when"}
TEACHER_KEYS = {
    *MODEL_SCORER_KEYS, "url", "served_model", "api_key", "tokenizer", "policy", "decay", "versions_ago", "every",
    "in_trainer",
}  # fmt: skip
POLICY_KEYS = {"model", "engine", "buffer", "algorithm", "training", "lora", "warm_start", "delivery"}
NOT_SECTIONS = {"task", "task_name", "policy_name", "scorers"}


def test_names_of_other_libraries_lead_to_keys_that_exist() -> None:
    known = {**KEYS, "task": DATASET_KEYS, "scorers": SCORER_KEYS}
    for name, meant in NAMES.items():
        for section, keys in re.findall(r"\[(\w+)(?:\.NAME)?\] (\w+(?: and \w+)*)", meant):
            assert all(key in known[section] for key in keys.split(" and ")), name
        elsewhere = {key for section, keys in known.items() for key in keys if meant != f"[{section}] {key}"}
        assert name not in elsewhere, f"{name} is a key here too"


ALONE = ["algorithm.loss=distillation", "algorithm.teacher=t"]
BESIDE = ["algorithm.teacher=t", "algorithm.teacher_weight=0.5"]
TEACHER_MISTAKES = [
    (["algorithm.teacher_weight=1.0"], r"\[algorithm\] teacher: teacher_weight needs the directory"),
    ([*ALONE, "algorithm.teacher_weight=1.0"], r"teacher_weight: loss 'distillation' learns from the teacher alone"),
    ([*BESIDE, "algorithm.teacher_top_k=4"], r"\[algorithm\] teacher_top_k: only teacher_divergence 'forward' and"),
    (
        [*ALONE, "algorithm.teacher_divergence=reverse", 'algorithm.corrections=["tis"]'],
        r"'tis' limits importance weights, and teacher_divergence 'reverse' has none",
    ),
    (
        [*BESIDE, "algorithm.teacher_divergence=reverse", "rollouts.top_p=0.9"],
        r"\[algorithm\] teacher_divergence: 'reverse' compares whole distributions",
    ),
]


def test_any_loss_may_have_a_teacher_beside_its_rewards() -> None:
    more = ["algorithm.teacher_divergence=forward", "algorithm.teacher_top_k=4", "algorithm.loss=grpo"]
    assert make_config(MINIMAL, [*BESIDE, *more]).algorithm.teacher_top_k == 4


def test_keys_are_pinned() -> None:
    config = make_config({**MINIMAL, "lora": {}})
    pinned = {
        AgentTaskConfig: AGENT_KEYS, DatasetTaskConfig: DATASET_KEYS,
        EnvironmentTaskConfig: ENVIRONMENT_KEYS, GymTaskConfig: GYM_KEYS,
        EvaluationSetConfig: SET_KEYS, FunctionScorerConfig: SCORER_KEYS, JudgeConfig: JUDGE_KEYS,
        ProgramConfig: PROGRAM_KEYS, ProcessRewardConfig: PROCESS_REWARD_KEYS, TeacherConfig: TEACHER_KEYS,
    }  # fmt: skip
    assert {kind: set(kind.__struct_fields__) for kind in pinned} == pinned
    assert set(POLICY_SECTIONS) == POLICY_KEYS
    sections = set(Config.__struct_fields__) - NOT_SECTIONS
    assert {name: set(getattr(config, name).__struct_fields__) for name in sections} == KEYS


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("buffer.depht=2", "[buffer] unknown key 'depht' (did you mean 'depth'?)"),
        ("bufer.depth=2", "unknown section 'bufer' (did you mean 'buffer'?)"),
        ("training.lr=1e-5", "[training] unknown key 'lr' (here it is [training] learning_rate)"),
        ("training.num_generations=8", "[training] unknown key 'num_generations' (here it is [rollouts] group_size)"),
        ("algorithm.beta=0.1", "[algorithm] unknown key 'beta' (here it is [algorithm] kl and kl_weight)"),
        ("run.max_steps=8", "[run] unknown key 'max_steps' (here it is [run] versions)"),
        ("run.name=a/b", "[run] name: 'a/b' is not the name of one folder ([run] directory is its path)"),
        ("run.name=..", "[run] name: '..' is not the name of one folder ([run] directory is its path)"),
        ("buffer.depth=-1", "[buffer] depth: expected `int` >= 0 (one of: a number, unbounded)"),
        ("buffer.depth=many", "[buffer] depth: invalid enum value 'many' (one of: a number, unbounded)"),
        ("buffer.oversample=0.5", "[buffer] oversample: expected `float` >= 1.0"),
        ("scoring.workers=9223372036854775808", "[scoring] workers: a whole number of 64 bits is too large"),
        ("scoring.workers=4097", "[scoring] workers: expected `int` <= 4096"),
        (
            'buffer.filter=["long"]',
            "[buffer] filter.0: invalid enum value 'long' (one of: zero_variance, overlong)",
        ),
        (
            "algorithm.loss=ppo",
            f"[algorithm] loss: invalid enum value 'ppo' (one of: {', '.join(LOSSES)}, {OR_OWN})",
        ),
        ("engine.kind=vlm", f"[engine] kind: invalid enum value 'vlm' (one of: embedded, vllm, {OR_OWN})"),
        ("engine.kind=own:", f"[engine] kind: invalid enum value 'own:' (one of: embedded, vllm, {OR_OWN})"),
        ("engine.kind=3", f"[engine] kind: expected `str`, got `int` (one of: embedded, vllm, {OR_OWN})"),
        (
            "algorithm.advantage=gppo",
            "[algorithm] advantage: invalid enum value 'gppo' "
            f"(one of: grpo, dr_grpo, rloo, maxrl, reinforce_plus_plus, {OR_OWN})",
        ),
        (
            "delivery.transport=rdma",
            f"[delivery] transport: invalid enum value 'rdma' (one of: auto, shm, file, tcp, cuda_ipc, nccl, {OR_OWN})",
        ),
        (
            "pipeline.launcher=slurm",
            f"[pipeline] launcher: invalid enum value 'slurm' (one of: auto, local, forked, ray, {OR_OWN})",
        ),
        (
            'algorithm.corrections=["tsi"]',
            "[algorithm] corrections.0: invalid enum value 'tsi' (one of: tis, sequence_tis, icepop, mis, opsm)",
        ),
        ("algorithm.corrections=tis", "[algorithm] corrections: expected `array`, got `str`"),
        ("task.kind=bandit", "[task] kind: invalid value 'bandit' (one of: dataset, gym, environment, agent)"),
        ("training.learning_rate=0", "[training] learning_rate: expected `float` > 0.0"),
        ("training.beta1=1.0", "[training] beta1: expected `float` < 1.0"),
        ("training.beta2=1", "[training] beta2: expected `float` < 1.0"),
        ("training.beta2=-0.1", "[training] beta2: expected `float` >= 0.0"),
        ("training.learning_rate=inf", "[training] learning_rate: inf is not a finite number"),
        ("training.learning_rate=nan", "[training] learning_rate: nan is not a finite number"),
        ("training.learning_rates.embed=inf", "[training] learning_rates.embed: inf is not a finite number"),
        ("rollouts.temperature=1e999", "[rollouts] temperature: inf is not a finite number"),
        ("rollouts.min_p=nan", "[rollouts] min_p: nan is not a finite number"),
        ("algorithm.entropy_weight=inf", "[algorithm] entropy_weight: inf is not a finite number"),
        ("algorithm.length_penalty=+inf", "[algorithm] length_penalty: inf is not a finite number"),
        ("lora.alpha=inf", "[lora] alpha: inf is not a finite number"),
        ("task.config.words=[1.0, -inf]", "[task] config.words.1: -inf is not a finite number"),
        ("rollouts.top_p=0", "[rollouts] top_p: expected `float` > 0.0"),
        ("rollouts.top_k=2000", "[rollouts] top_k: expected `int` <= 1024"),
        ("training.learning_rates.embed=0", "[training] learning_rates: expected `float` > 0.0"),
        ("training.learning_rates=0.1", "[training] learning_rates: expected `object`, got `float`"),
        ("rollouts.stop=[1]", "[rollouts] stop.0: expected `str`, got `int`"),
        ("lora.rank=0", "[lora] rank: expected `int` >= 1"),
        ("lora.dropout=1.0", "[lora] dropout: expected `float` < 1.0"),
        ("lora.targets=[]", "[lora] targets: expected `array` of length >= 1"),
        ("lora.ranks=4", "[lora] unknown key 'ranks' (did you mean 'rank'?)"),
        ("lora.serve=both", "[lora] serve: invalid enum value 'both' (one of: merged, unmerged)"),
        ("depth=3", "--set depth=3: expected section.key=value, such as --set buffer.depth=2"),
        ("buffer.depth.x=3", "[buffer] depth: expected `int | str`, got `object` (one of: a number, unbounded)"),
    ],
)
def test_mistakes_are_one_line(setting: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(MINIMAL, [setting])
    assert str(caught.value) == expected


def test_a_number_in_place_of_a_section_is_one_line_too() -> None:
    with pytest.raises(ConfigError, match=r"^run: inf is not a finite number$"):
        make_config({**MINIMAL, "run": float("inf")})


def test_required_sections_are_named() -> None:
    with pytest.raises(ConfigError, match=r"section \[model\] is required"):
        make_config({})
    with pytest.raises(ConfigError, match=r"\[model\] path is required"):
        make_config({"model": {}, "task": MINIMAL["task"]})


def test_values_that_cannot_go_together() -> None:
    with pytest.raises(ConfigError, match=r"\[buffer\] max_lag: 1 is below depth 2"):
        make_config(MINIMAL, ["buffer.depth=2", "buffer.max_lag=1"])
    with pytest.raises(ConfigError, match=r"\[buffer\] max_lag: required with depth = 'unbounded'"):
        make_config(MINIMAL, ["buffer.depth=unbounded"])
    with pytest.raises(ConfigError, match=r"\[buffer\] on_stale: 'salvage' needs max_lag"):
        make_config(MINIMAL, ["buffer.on_stale=salvage"])
    with pytest.raises(ConfigError, match=r"\[buffer\] correct_above: .* there are none"):
        make_config(MINIMAL, ["buffer.correct_above=1"])
    with pytest.raises(ConfigError, match=r"\[buffer\] filter: 'zero_variance' .* group_size >= 2"):
        single = ["rollouts.group_size=1", "algorithm.advantage=reinforce_plus_plus"]
        make_config(MINIMAL, ['buffer.filter=["zero_variance"]', *single])
    with pytest.raises(ConfigError, match=r"\[buffer\] oversample: .* filter is empty"):
        make_config(MINIMAL, ["buffer.oversample=2"])
    for min_group in (1, 9):
        with pytest.raises(ConfigError, match=r"\[rollouts\] min_group: \d is not between 2 and group_size 8"):
            make_config(MINIMAL, [f"rollouts.min_group={min_group}"])
    for advantage in ("grpo", "dr_grpo", "rloo", "maxrl"):
        with pytest.raises(ConfigError, match=rf"\[rollouts\] group_size: advantage '{advantage}' .* at least 2"):
            make_config(MINIMAL, [f"algorithm.advantage={advantage}", "rollouts.group_size=1"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] icepop_low: 6.0 is above icepop_high 5.0"):
        make_config(MINIMAL, ["algorithm.icepop_low=6.0"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] overlong_buffer: 65 is above \[rollouts\] max_tokens 64"):
        make_config(MINIMAL, ["rollouts.max_tokens=64", "algorithm.overlong_buffer=65"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] proximal_mix: a proximal policy that is recomputed"):
        make_config(MINIMAL, ["algorithm.proximal=recomputed", "algorithm.proximal_mix=0.5"])
    for key in ("discount=0.9", "baseline=group", "outcome_weight=1"):
        with pytest.raises(ConfigError, match=r"\[algorithm\] \w+: credit is 'rollout', so nothing finer is compared"):
            make_config(MINIMAL, [f"algorithm.{key}"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] baseline: 'state' is what precedes a turn"):
        make_config(MINIMAL, ["algorithm.credit=step", "algorithm.baseline=state"])
    with pytest.raises(
        ConfigError, match=r"\[scoring\] shuffle: only the rewards .* credit = 'turn' learns from finer"
    ):
        make_config(MINIMAL, ["algorithm.credit=turn", "scoring.shuffle=true"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] reward_kl_weight: reward_kl is 'none'"):
        make_config(MINIMAL, ["algorithm.reward_kl_weight=0.1"])
    with pytest.raises(
        ConfigError, match=r"\[algorithm\] reward_kl: it is paid from rewards, which loss 'distillation'"
    ):
        make_config(MINIMAL, ["algorithm.reward_kl=k1", "algorithm.loss=distillation", "algorithm.teacher=t"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] entropy_rate: there is no entropy_target to follow"):
        make_config(MINIMAL, ["algorithm.entropy_rate=0.1"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] entropy_weight: 2 is above 1, the largest weight"):
        make_config(MINIMAL, ["algorithm.entropy_target=1.0", "algorithm.entropy_weight=2.0"])
    assert make_config(MINIMAL, ["algorithm.entropy_weight=2.0"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] sequence_tis_low: 3.0 is above sequence_tis_high 2.0"):
        make_config(MINIMAL, ["algorithm.sequence_tis_low=3.0"])
    for key in ("gae_lambda=0.5", "critic_learning_rate=0.1", "value_weight=0.1"):
        with pytest.raises(ConfigError, match=r"\[algorithm\] \w+: there is no critic"):
            make_config(MINIMAL, [f"algorithm.{key}"])
    for key in ("credit=turn", "advantage=rloo"):
        with pytest.raises(ConfigError, match=r"\[algorithm\] \w+: the critic gives every token its advantage"):
            make_config(MINIMAL, ["algorithm.critic=true", f"algorithm.{key}"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] critic: it judges by rewards, which loss 'distillation'"):
        make_config(MINIMAL, ["algorithm.critic=true", "algorithm.loss=distillation", "algorithm.teacher=t"])
    with pytest.raises(ConfigError, match=r"\[scoring\] shuffle: only the rewards .* a critic learns from finer"):
        make_config(MINIMAL, ["algorithm.critic=true", "scoring.shuffle=true"])
    assert make_config(MINIMAL, ["algorithm.critic=true", "algorithm.discount=0.9", "rollouts.group_size=1"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] minibatches: 5 is above \[buffer\] groups = 4"):
        make_config(MINIMAL, ["algorithm.minibatches=5", "buffer.groups=4"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] mask_overlong: \[buffer\] filter 'overlong' leaves"):
        make_config(MINIMAL, ["algorithm.mask_overlong=true", 'buffer.filter=["overlong"]'])
    with pytest.raises(ConfigError, match=r"\[algorithm\] teacher: loss 'distillation' needs the directory"):
        make_config(MINIMAL, ["algorithm.loss=distillation"])
    with pytest.raises(ConfigError, match=r"\[algorithm\] teacher: only loss 'distillation' learns from one"):
        make_config(MINIMAL, ["algorithm.teacher=elsewhere"])
    for settings, line in TEACHER_MISTAKES:
        with pytest.raises(ConfigError, match=line):
            make_config(MINIMAL, settings)
    with pytest.raises(ConfigError, match=r"\[algorithm\] corrections: 'opsm' goes by rewards"):
        make_config(MINIMAL, ["algorithm.loss=distillation", "algorithm.teacher=t", 'algorithm.corrections=["opsm"]'])
    with pytest.raises(ConfigError, match=r"\[engine\] cache_tokens"):
        make_config(MINIMAL, ["engine.cache_tokens=64"])
    for other in ("lora.rank=4", "delivery.send=delta", "engine.staging=none"):
        with pytest.raises(ConfigError, match=r'\[engine\] quantize = "fp8" does not go together with '):
            make_config(MINIMAL, ["engine.quantize=fp8", other])
    for other in ("lora.serve=merged", 'lora.modules=["norm"]'):
        with pytest.raises(ConfigError, match=r"\[engine\] fuse_projections does not go together with \[lora\]"):
            make_config(MINIMAL, ["engine.fuse_projections=true", "lora.serve=unmerged", other])
    make_config(MINIMAL, ["engine.fuse_projections=true", "lora.serve=unmerged"])
    with pytest.raises(ConfigError, match=r'\[engine\] kv_dtype: only engine kind "embedded" has it'):
        make_config(MINIMAL, ["engine.kv_dtype=fp8", "engine.kind=vllm", "engine.python=python"])
    with pytest.raises(ConfigError, match=r'quantize = "fp8" does not go together with kind = "vllm"'):
        make_config(MINIMAL, ["engine.quantize=fp8", "engine.kind=vllm", "engine.python=python"])
    with pytest.raises(ConfigError, match=r"\[lora\] targets: a name is empty"):
        make_config(MINIMAL, ['lora.targets=["q_proj", ""]'])
    with pytest.raises(ConfigError, match=r"\[lora\] modules: lm_head is one of targets too"):
        make_config(MINIMAL, ['lora.targets=["lm_head"]', 'lora.modules=["lm_head"]'])
    with pytest.raises(ConfigError, match=r"\[lora\] dropout: stacked experts take none"):
        make_config(MINIMAL, ['lora.targets=["mlp.experts.down_proj"]', "lora.dropout=0.1"])
    with pytest.raises(ConfigError, match=r"\[delivery\] bind: 'here' is not an IP address"):
        make_config(MINIMAL, ["delivery.bind=here"])
    with pytest.raises(ConfigError, match=r"\[delivery\] bind: 0.0.0.0 is every interface"):
        make_config(MINIMAL, ["delivery.bind=0.0.0.0"])
    with pytest.raises(ConfigError, match=r"\[gateway\] bind: 0.0.0.0 is every interface; .* that agents can reach"):
        make_config(MINIMAL, ["gateway.bind=0.0.0.0"])
    far = ["delivery.transport=nccl", "delivery.bind=10.0.0.1"]
    with pytest.raises(
        ConfigError, match=r'^\[cluster\] trusted_network: \[delivery\] transport = "nccl" would .*10.0.0.1'
    ):
        make_config(MINIMAL, far)
    assert make_config(MINIMAL, [*far, "cluster.trusted_network=true"]).cluster.trusted_network
    data = {"kind": "dataset", "path": "p"}
    with pytest.raises(ConfigError, match=r"\[task\] reward: two functions have the same name"):
        make_config({**MINIMAL, "task": {**data, "reward": ["a.py:reward", "b.py:reward"]}})
    with pytest.raises(ConfigError, match=r"\[task\] reward_weights: 1 for 2 reward functions"):
        make_config({**MINIMAL, "task": {**data, "reward": ["a:one", "a:two"], "reward_weights": [1.0]}})
    with pytest.raises(ConfigError, match=r"\[task\] reward is required"):
        make_config({**MINIMAL, "task": {**data, "reward": []}})
    with pytest.raises(ConfigError, match=r"\[task\] command: give an agent or a command, not both"):
        make_config({**MINIMAL, "task": {"kind": "agent", "path": "p", "agent": "a:b", "command": ["c"]}})
    with pytest.raises(ConfigError, match=r"\[evaluate\] every"):
        make_config(MINIMAL, ["evaluate.every=5"])
    with pytest.raises(ConfigError, match=r"\[training\] tensor_parallel: 2 does not divide ranks = 3"):
        make_config(MINIMAL, ["training.ranks=3", "training.tensor_parallel=2"])
    for allowed in ("lora.base=nf4", "training.optimizer=adamw_8bit", "delivery.send=delta", "delivery.transport=nccl"):
        assert make_config(MINIMAL, ["training.ranks=2", allowed]).training.processes == 2
        assert make_config(MINIMAL, ["training.offload=true", allowed]).training.offload
    tensor_ranks = ["training.ranks=2", "training.tensor_parallel=2"]
    assert make_config(MINIMAL, [*tensor_ranks, "lora.rank=4"]).lora is not None
    assert make_config(MINIMAL, [*tensor_ranks, "lora.rank=4", "algorithm.critic=true"]).algorithm.critic
    policies = ["algorithm.kl=k3", "algorithm.loss=decoupled_ppo", "algorithm.proximal=recomputed"]
    assert make_config(MINIMAL, ["training.ranks=2", "training.optimizer=muon", *policies]).algorithm.kl == "k3"
    with pytest.raises(ConfigError, match=r'\[engine\] urls: only engine kind "vllm" has it'):
        make_config(MINIMAL, ['engine.urls=["http://127.0.0.1:8000"]'])
    with pytest.raises(ConfigError, match=r'\[engine\] python: engine kind "vllm" needs'):
        make_config(MINIMAL, ["engine.kind=vllm"])
    with pytest.raises(ConfigError, match=r'\[engine\] kv: "keep" is not for vLLM'):
        make_config(MINIMAL, ["engine.kind=vllm", "engine.python=python3", "engine.kv=keep"])
    vllm = ["engine.kind=vllm", "engine.python=python3"]
    assert make_config(MINIMAL, [*vllm, "lora.rank=4", "lora.alpha=6.0"]).lora.scaling == 1.5
    with pytest.raises(ConfigError, match=r'"vllm" does not go together with \[lora\] serve = "unmerged"'):
        make_config(MINIMAL, [*vllm, "lora.serve=unmerged"])
    with pytest.raises(ConfigError, match=r'"vllm" does not go together with \[lora\] base = "nf4"'):
        make_config(MINIMAL, [*vllm, "lora.base=nf4"])
    with pytest.raises(ConfigError, match=r'does not go together with \[lora\] on \[model\] weights = "random"'):
        make_config(MINIMAL, [*vllm, "lora.rank=4", "model.weights=random"])
    assert (
        make_config(MINIMAL, ["engine.kind=vllm", "engine.python=python3", "engine.interrupt=drain"]).engine.processes
        == 1
    )


def test_a_range_of_engines() -> None:
    config = make_config(MINIMAL, ["engine.count={least = 2, most = 4}"])
    assert (config.engine.at_start, config.engine.processes) == (2, 4)
    assert make_config(tomllib.loads(dump_config(config))) == config
    assert make_config(MINIMAL, ["engine.count.most=3"]).engine.at_start == 1
    number = make_config(MINIMAL, ["engine.count=3"]).engine
    assert (number.at_start, number.processes) == (3, 3)
    servers = ["engine.kind=vllm", 'engine.urls=["http://a:1", "http://b:1"]']
    assert make_config(MINIMAL, servers).engine.at_start == 2
    for settings, line in (
        (["engine.count={least = 3, most = 2}"], "[engine] count: least = 3 is above most = 2"),
        (["engine.count={least = 1}"], "[engine] count.most is required"),
        (["engine.count={leest = 1, most = 2}"], "[engine] unknown key 'count.leest' (did you mean 'least'?)"),
        (["engine.count=many"], "[engine] count: expected `int | object | null`, got `str`"),
        ([*servers, "engine.count.most=3"], "[engine] count: urls name the servers; `headrace scale RUN_DIR --add"),
    ):
        with pytest.raises(ConfigError, match=re.escape(line)):
            make_config(MINIMAL, settings)


def test_one_answer_is_enough_where_its_group_is_not_compared() -> None:
    single = "rollouts.group_size=1"
    assert make_config(MINIMAL, [single, "algorithm.advantage=reinforce_plus_plus"]).rollouts.group_size == 1
    assert make_config(MINIMAL, [single, "algorithm.loss=distillation", "algorithm.teacher=t"]).rollouts.group_size == 1


CHANGED = {
    "clip_low": 0.1, "clip_high": 0.1, "sapo_tau_positive": 2.0, "sapo_tau_negative": 2.0, "dppo_delta": 0.3,
    "proximal": "recomputed", "proximal_mix": 0.5, "tis_cap": 3.0, "icepop_low": 0.4, "icepop_high": 4.0,
    "mis_ratio": "mean", "mis_low": 0.1, "mis_high": 3.0, "opsm_limit": 1e-3, "teacher_divergence": "forward",
    "sequence_tis_ratio": "mean", "sequence_tis_low": 0.1, "sequence_tis_high": 3.0,
}  # fmt: skip


def settings_of(loss: str, **more: object) -> dict[str, dict[str, object]]:
    teacher = {"teacher": "t"} if loss == "distillation" else {}
    return {**MINIMAL, "algorithm": {"loss": loss, **teacher, **more}}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("key", sorted(READ_BY_LOSSES))
def test_a_key_that_the_loss_does_not_look_at_is_refused(loss: str, key: str) -> None:
    if loss in READ_BY_LOSSES[key]:
        assert getattr(make_config(settings_of(loss, **{key: CHANGED[key]})).algorithm, key) == CHANGED[key]
        return
    with pytest.raises(ConfigError, match=rf"^\[algorithm\] {key}: loss '{loss}' does not look at it \(only \w+.*\)$"):
        make_config(settings_of(loss, **{key: CHANGED[key]}))
    default = getattr(AlgorithmConfig(), key)
    assert make_config(settings_of(loss, **({} if default is None else {key: default}))).algorithm.loss == loss


@pytest.mark.parametrize(("key", "correction"), READ_BY_CORRECTIONS.items())
def test_a_key_of_a_correction_that_is_off_is_refused(key: str, correction: str) -> None:
    assert make_config(settings_of("grpo", corrections=[correction], **{key: CHANGED[key]}))
    others = sorted(set(READ_BY_CORRECTIONS.values()) - {correction})
    with pytest.raises(ConfigError, match=rf"^\[algorithm\] {key}: only '{correction}' looks at it, which is not in"):
        make_config(settings_of("grpo", corrections=others, **{key: CHANGED[key]}))


def test_weights_of_what_is_off_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^\[algorithm\] kl_weight: kl is 'none'"):
        make_config(MINIMAL, ["algorithm.kl_weight=0.01"])
    assert make_config(MINIMAL, ["algorithm.kl_weight=0.01", "algorithm.kl=k2"]).algorithm.kl_weight == 0.01
    with pytest.raises(ConfigError, match=r"^\[algorithm\] overlong_penalty: overlong_buffer is 0"):
        make_config(MINIMAL, ["algorithm.overlong_penalty=0.5"])
    assert make_config(MINIMAL, ["algorithm.overlong_penalty=0.5", "algorithm.overlong_buffer=8"])


def test_resolved_configuration_loads_as_itself(tmp_path: Path) -> None:
    config = make_config(MINIMAL, ["buffer.max_lag=4", 'task.config={"min_len" = 3}', "run.name=a b"])
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    assert load_config(file) == config
    assert with_settings(config, ["buffer.depth=0"]).buffer.depth == 0


def test_an_adapter_is_trained_only_where_it_is_asked_for(tmp_path: Path) -> None:
    assert make_config(MINIMAL).lora is None
    config = with_settings(make_config(MINIMAL), ["lora.rank=4"])
    assert config.lora is not None
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (4, 32.0, ["all-linear"])
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(tmp_path / "bad.toml")


@pytest.mark.parametrize("path", sorted(Path("examples").rglob("*.toml")), ids=str)
def test_every_shipped_toml_is_valid(path: Path) -> None:
    config = load_config(path)
    assert make_config(tomllib.loads(dump_config(config))) == config
