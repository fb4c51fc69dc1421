"""The configuration: one struct per stage, every key with its type, range and default. No torch here.

The TOML sections have the names of the stages. Unknown keys are errors. `tests/unit/test_config.py` pins the keys:
adding one is a feature, renaming one breaks every user.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of every section: a key that is not declared is an error."""


class RunConfig(Section, frozen=True):
    """[run]: what is common to the whole run."""

    name: str = "run"
    """Of the run and its directory."""
    directory: str = "runs"
    """The run's files go to `directory/name`."""
    seed: NonNegative = 0
    """Of random weights, of the order of prompts and of every sampled token."""
    versions: Positive = 100
    """How many versions to train."""


class ModelConfig(Section, frozen=True):
    """[model]: a Hugging Face directory."""

    path: str
    """A directory with `config.json`, a tokenizer and, unless `weights = "random"`, safetensors weights."""
    weights: Literal["load", "random"] = "load"
    """From the directory, or drawn at random from `[run] seed` with `config.json` alone."""
    dtype: Literal["float32"] = "float32"
    """The dtype that engines serve in and weights are published in."""


class DatasetTask(Section, frozen=True, tag_field="kind", tag="dataset"):
    """[task] kind = "dataset": JSON lines, judged by a function of yours."""

    path: str
    """Each line: `{"prompt": text or messages, ...}`; the other fields reach the reward function as `data`."""
    reward: str
    """`module:function`, or `path/to/file.py:function`."""
    heldout_path: str | None = None
    """A second file for evaluation; otherwise `[evaluate] prompts` lines are split off by a hash of their ids."""
    system: str | None = None
    """A system message before every prompt that is given as text."""
    demonstration: str | None = "answer"
    """The field that holds a right answer, for a supervised warm start."""


class GymTask(Section, frozen=True, tag_field="kind", tag="gym"):
    """[task] kind = "gym": a reasoning-gym dataset with its own verifier."""

    name: str
    """Of the reasoning-gym dataset."""
    config: dict[str, Any] = {}
    """The dataset's own settings."""
    size: Positive = 10_000
    """How many training prompts to generate."""
    system: str | None = None
    """A system message before every question."""
    suffix: str = ""
    """Appended to every question (how to format the answer)."""
    answer_pattern: str | None = None
    """A regular expression whose first group (or whole match) is taken from the completion before it is judged."""


class EnvironmentTask(Section, frozen=True, tag_field="kind", tag="environment"):
    """[task] kind = "environment": episodes of several turns."""

    factory: str
    """`module:name` of what makes the task: `factory(**config, seed=..., heldout=...)` returns a `headrace.Task`."""
    config: dict[str, Any] = {}
    """Arguments of the factory."""


TaskConfig = DatasetTask | GymTask | EnvironmentTask


class EngineConfig(Section, frozen=True):
    """[engine]: the inference pool."""

    kind: Literal["embedded"] = "embedded"
    """What serves the model."""
    count: Positive = 1
    """Engine processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; "auto" takes a GPU if there is one."""
    graphs: bool = True
    """GPU: capture decode steps as CUDA graphs."""
    compile: bool = True
    """GPU: compile the model's layers (tens of seconds, once)."""
    threads: Positive = 1
    """Compute threads of each engine process (CPU)."""
    slots: Positive = 64
    """Sequences that decode together."""
    block_size: Positive = 16
    """Tokens in a block of the paged KV cache."""
    cache_tokens: NonNegative = 0
    """Tokens that the KV cache holds; 0 takes what `slots` sequences of the longest length need, or fits on the GPU."""
    max_length: NonNegative = 0
    """Longest sequence, its prompt included; 0 takes the model's own limit, at most 4096."""
    prefill_chunk: NonNegative = 0
    """Prompt tokens computed in one step beside the decoding sequences; 0 takes 512 on a CPU and 16384 on a GPU."""
    interrupt: Literal["never", "abort"] = "never"
    """When new weights arrive: running sequences go on under them, or end and are resumed by prefix."""
    kv: Literal["keep", "recompute"] = "recompute"
    """When new weights arrive: keep the KV of running sequences, or compute it again under the new weights."""


class RolloutsConfig(Section, frozen=True):
    """[rollouts]: how answers are sampled."""

    group_size: Positive = 8
    """Answers to one prompt, compared with each other."""
    max_tokens: Positive = 256
    """Sampled tokens of a rollout, over all its turns."""
    max_turns: Positive = 8
    """Turns of the policy in one rollout."""
    temperature: PositiveFloat = 1.0
    """Of sampling; the loss takes its log-probabilities at the same one."""
    stop: list[str] = []
    """Tokens that end a turn, beside the model's own end tokens."""


class ScoringConfig(Section, frozen=True):
    """[scoring]: judging answers, while others are generated."""

    workers: Positive = 1
    """Reward worker processes."""
    timeout: PositiveFloat = 30.0
    """Seconds after which a judgement fails its rollout."""
    shuffle: bool = False
    """Control experiment: give every rollout the reward of another one of the same batch, drawn at random."""


class BufferConfig(Section, frozen=True):
    """[buffer]: how far generation may run ahead of training."""

    depth: NonNegative = 1
    """Versions of work that may be under way beside the one in training; 0 is synchronous."""
    max_lag: NonNegative | None = None
    """No token older than this many versions is trained; by default the bound that follows from `depth`."""
    groups: Positive = 16
    """Groups in a batch (one optimizer step)."""


class AlgorithmConfig(Section, frozen=True):
    """[algorithm]: from rewards to a loss."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus"] = "grpo"
    """`(R - mean) / std` of the group, `R - mean`, `R - mean of the others`, `(R - mean) / mean`, or
    `(R - mean) / std` of the whole step."""
    loss: Literal["cispo", "grpo", "dapo", "gspo", "sapo", "dppo_tv", "topr", "decoupled_ppo"] = "cispo"
    """What becomes of importance ratios and advantages; `docs/losses.md` has the formulas."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped below at 1 - clip_low; by default where the loss has it: 0.2, for gspo 0.0003."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above at 1 + clip_high; by default 0.28 for cispo and dapo, 0.2 for grpo and decoupled_ppo,
    0.0004 for gspo."""
    sapo_tau_positive: PositiveFloat = 1.0
    """How fast the gate of sapo closes where the advantage is positive."""
    sapo_tau_negative: PositiveFloat = 1.05
    """How fast the gate of sapo closes where the advantage is not positive."""
    dppo_delta: NonNegativeFloat = 0.2
    """How far a token's probability may move before dppo_tv silences it."""
    proximal_mix: Fraction | None = None
    """The sampler's share in the proximal policy of decoupled_ppo; by default 1 / lag of the token, and 0 at lag 0."""
    corrections: list[Literal["tis", "icepop", "mis", "opsm"]] = []
    """What is done about tokens on which policy and sampler disagree, whatever the loss; any of them together."""
    tis_cap: PositiveFloat = 2.0
    """tis: the largest importance ratio that the loss sees."""
    icepop_low: NonNegativeFloat = 0.5
    """icepop: a token with a smaller ratio is left out."""
    icepop_high: PositiveFloat = 5.0
    """icepop: a token with a larger ratio is left out."""
    mis_ratio: Literal["product", "mean"] = "product"
    """mis: a sequence's ratio is the product of its tokens' ratios, or their geometric mean."""
    mis_low: NonNegativeFloat = 0.0
    """mis: a sequence with a smaller ratio is left out."""
    mis_high: PositiveFloat = 2.0
    """mis: a sequence with a larger ratio is left out."""
    opsm_limit: NonNegativeFloat = 1e-4
    """opsm: where a sequence's mean of log(sampler / policy) is larger, tokens of negative advantage are left out."""
    overlong_buffer: NonNegative = 0
    """Over the last tokens before `[rollouts] max_tokens`, this many, the overlong punishment rises; 0 is off."""
    overlong_penalty: NonNegativeFloat = 1.0
    """What the reward loses at `max_tokens` when `overlong_buffer` is on."""
    length_penalty: NonNegativeFloat = 0.0
    """What the reward loses at `max_tokens`, and in proportion at smaller lengths."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """Average over the step's tokens, over its sequences, or over `groups x group_size x max_tokens`."""


class TrainingConfig(Section, frozen=True):
    """[training]: from batches to new weights."""

    threads: Positive = 1
    """Compute threads of the trainer process (CPU)."""
    learning_rate: PositiveFloat = 1e-6
    """Of AdamW, at its peak."""
    warmup_steps: NonNegative = 0
    """Optimizer steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes on after the warm-up, over the whole run."""
    weight_decay: NonNegativeFloat = 0.0
    """Of matrices; vectors (norms, biases) do not decay."""
    beta1: Fraction = 0.9
    """Of AdamW."""
    beta2: Fraction = 0.99
    """Of AdamW."""
    clip_norm: PositiveFloat = 1.0
    """Largest global norm of a step's gradient."""
    micro_batch_tokens: Positive = 8192
    """Tokens that one forward and backward pass holds."""
    share_prefixes: bool = True
    """Compute the prompt that a group's answers share once."""
    checkpoint_every: NonNegative = 0
    """Versions between checkpoints; 0 writes only the last one."""
    keep_checkpoints: Positive = 2
    """How many of the newest checkpoints stay on disk."""


class WarmStartConfig(Section, frozen=True):
    """[warm_start]: supervised steps on the task's demonstrations, before the first version is published."""

    steps: NonNegative = 0
    """0 starts with the model as it is."""
    batch: Positive = 64
    """Demonstrations in a step."""
    learning_rate: PositiveFloat = 1e-3
    """Constant over these steps."""


class DeliveryConfig(Section, frozen=True):
    """[delivery]: from new weights to the engines."""

    transport: Literal["auto", "shm", "file", "tcp"] = "auto"
    """How weights travel: shared memory of one host, files in a directory, sockets, or the best of them, which is
    said."""
    directory: str | None = None
    """`file`: a directory that trainer and engines share; by default `weights/` in the run directory."""
    keep_files: Positive = 2
    """`file`: how many of the newest versions stay; one that is not acknowledged always does."""
    bind: str = "127.0.0.1"
    """`tcp`: the address of this host that the trainer listens on; beyond loopback, encrypted with keys of the run."""
    publish_every: Positive = 1
    """Optimizer steps that make one version."""
    canary_tokens: Positive = 16
    """Length of the fixed sequence that trainer and engine must score alike."""
    canary_tolerance: PositiveFloat = 1e-3
    """Largest difference between trainer and engine on the canary's log-probabilities."""
    deadline: PositiveFloat = 120.0
    """Seconds in which an engine must prove a version."""


class EvaluateConfig(Section, frozen=True):
    """[evaluate]: held-out prompts, before, during and after."""

    every: NonNegative = 0
    """Versions between evaluations during the run; 0 evaluates only before and after."""
    prompts: NonNegative = 0
    """Held-out prompts (never trained on); 0 switches evaluation off."""
    during: NonNegative = 0
    """Prompts of an evaluation during the run; 0 takes all."""
    samples: Positive = 1
    """Answers per prompt, for pass@k."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""


class PipelineConfig(Section, frozen=True):
    """[pipeline]: processes and deadlines."""

    launcher: Literal["local"] = "local"
    """Where worker processes run: on this host."""
    stall_seconds: PositiveFloat = 120.0
    """Seconds without any progress after which the run ends with a report of who waits for whom."""
    start_seconds: PositiveFloat = 300.0
    """Seconds in which every process must be ready."""


class ObserveConfig(Section, frozen=True):
    """[observe]: what a run shows and keeps."""

    display: Literal["auto", "live", "plain", "none"] = "auto"
    """A live panel, plain lines, or nothing; `auto` is live on a terminal and plain elsewhere."""
    timeline: bool = True
    """Write `timeline.json`."""
    keep_rollouts: bool = True
    """Keep every rollout's tokens in `segments/`."""


class Config(Section, frozen=True):
    """A whole run."""

    model: ModelConfig
    task: TaskConfig
    run: RunConfig = RunConfig()
    engine: EngineConfig = EngineConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    scoring: ScoringConfig = ScoringConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    pipeline: PipelineConfig = PipelineConfig()
    observe: ObserveConfig = ObserveConfig()
