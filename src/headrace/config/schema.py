"""The configuration: one struct per stage, every key with its type, range and default. No torch here.

The TOML sections have the names of the stages. Unknown keys are errors. `tests/unit/test_config.py` pins the keys:
adding one is a feature, renaming one breaks every user.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from headrace.config.names import Names
from headrace.types import POLICY, TASK

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]

POLICY_LOSSES = Path(__file__).parents[1] / "algorithms" / "losses" / "policy"
"""Its modules are the losses there are. They are looked up, not imported: they need torch."""

AdvantageName = Annotated[str, Names(("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus"))]
LossName = Annotated[str, Names(module.name for module in pkgutil.iter_modules([str(POLICY_LOSSES)]))]
EngineName = Annotated[str, Names(("embedded", "vllm"))]
TransportName = Annotated[str, Names(("auto", "shm", "file", "tcp", "cuda_ipc", "nccl"))]
LauncherName = Annotated[str, Names(("auto", "local", "forked"))]


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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype that engines serve in; the trainer's own weights are float32."""


class TaskSection(Section, frozen=True, tag_field="kind"):
    """The keys of a task of any kind."""

    weight: PositiveFloat = 1.0
    """This task's share of the prompts, relative to the weights of the run's other tasks. A run has one so far."""


class DatasetTaskConfig(TaskSection, frozen=True, kw_only=True, tag="dataset"):
    """[task] kind = "dataset": JSON lines, judged by a function of yours."""

    path: str
    """Each line: `{"prompt": text or messages, ...}`; the other fields reach the reward function as `data`."""
    reward: str | None = None
    """`module:function`, or `path/to/file.py:function`. Required unless there are `[scorers.NAME]`."""
    heldout_path: str | None = None
    """A second file for evaluation; otherwise `[evaluate] prompts` lines are split off by a hash of their ids."""
    system: str | None = None
    """A system message before every prompt that is given as text."""
    demonstration: str | None = "answer"
    """The field that holds a right answer, for a supervised warm start."""


class GymTaskConfig(TaskSection, frozen=True, kw_only=True, tag="gym"):
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


class EnvironmentTaskConfig(TaskSection, frozen=True, kw_only=True, tag="environment"):
    """[task] kind = "environment": episodes of several turns."""

    factory: str
    """`module:name` of what makes the task: `factory(**config, seed=..., heldout=...)` returns a `headrace.Task`."""
    config: dict[str, Any] = {}
    """Arguments of the factory."""


class AgentTaskConfig(TaskSection, frozen=True, kw_only=True, tag="agent"):
    """[task] kind = "agent": agents that speak OpenAI's API work on prompts, through the gateway of the run."""

    path: str
    """Each line: `{"prompt": text or messages, ...}`; the other fields reach the agent too."""
    agent: str | None = None
    """`module:function`, or `path/to/file.py:function`; its reward is what it returns, or posts."""
    command: list[str] = []
    """Instead of `agent`: a program to start for every rollout; without either, agents come from outside."""
    heldout_path: str | None = None
    """A second file for evaluation; otherwise `[evaluate] prompts` lines are split off by a hash of their ids."""
    system: str | None = None
    """A system message before every prompt that is given as text."""
    demonstration: str | None = "answer"
    """The field that holds a right answer, for a supervised warm start."""
    workers: Positive = 1
    """Processes in which agents run."""
    concurrency: Positive = 32
    """Agents that run at the same time in each of them, in threads."""
    timeout: PositiveFloat = 120.0
    """Seconds from an agent's beginning in which it must have its reward; without one its rollout fails."""


TaskConfig = DatasetTaskConfig | GymTaskConfig | EnvironmentTaskConfig | AgentTaskConfig


class EngineConfig(Section, frozen=True):
    """[engine]: the inference pool."""

    kind: EngineName = "embedded"
    """What serves the model: Headrace's own engine, vLLM servers, or `module:factory` of an engine of yours."""
    count: Positive = 1
    """Engine processes (vLLM: servers to start)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; "auto" takes a GPU if there is one."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    """GPU: the share of its memory that an engine may take; by default nearly all that is free, and beside a trainer on
    the same GPU what an estimate of its need leaves."""
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
    interrupt: Literal["never", "abort", "drain", "block"] = "never"
    """When new weights arrive: running sequences go on under them; end and are resumed by prefix; end by themselves
    first, and no other begins; or all that were asked for end first."""
    kv: Literal["keep", "recompute"] = "recompute"
    """When new weights arrive: keep the KV of running sequences, or compute it again under the new weights."""
    python: str = ""
    """vLLM: the interpreter of the environment that it lives in (`make vllm` creates `.venv-vllm/bin/python`)."""
    urls: list[str] = []
    """vLLM: servers that already run, instead of starting `count`; their key is taken from `VLLM_API_KEY`."""
    port: NonNegative = 0
    """vLLM: the first server's port on loopback, the others follow; 0 takes free ones."""
    arguments: list[str] = []
    """vLLM: further arguments of every server that is started."""

    @property
    def processes(self) -> int:
        """How many engine processes a run has."""
        return len(self.urls) or self.count


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
    top_k: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Draw among this many of the likeliest tokens; 0 among all. With any of `top_k`, `top_p` and `min_p` the tokens
    left to draw from (at most the 1024 likeliest) are recorded, and the loss normalises over them."""
    top_p: Share = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    min_p: Fraction = 0.0
    """Leave out tokens less likely than this share of the likeliest one."""
    keep_routing: bool = True
    """Mixtures of experts: the experts that each sampled token was drawn with are recorded, 2 bytes for each expert in
    each layer, and training passes go through them. Otherwise the trainer's routers choose again."""
    min_group: Positive | None = None
    """A group is closed without its stragglers when so many of its answers have ended and `straggler_seconds` have
    passed; by default it waits for all."""
    straggler_seconds: PositiveFloat = 60.0
    """From the beginning of the group; only with `min_group`."""
    curriculum: bool = False
    """Draw prompts by difficulty: those that were solved rest for some epochs, those that nobody solved come again
    sooner. Solved is an answer with a reward of at least 1."""
    stop: list[str] = []
    """Tokens that end a turn, beside the model's own end tokens."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


class ScoringConfig(Section, frozen=True):
    """[scoring]: judging answers, while others are generated."""

    workers: Positive = 1
    """Reward worker processes."""
    timeout: PositiveFloat = 30.0
    """Seconds after which a judgement fails its rollout."""
    shuffle: bool = False
    """Control experiment: give every rollout the reward of another one of the same batch, drawn at random."""


class ScorerConfig(Section, frozen=True):
    """[scorers.NAME]: one of the scorers that judge rollouts. Without any, the task's own reward is the one scorer."""

    scorer: str
    """`module:attribute`, or `path/to/file.py:attribute`."""
    weight: float = 1.0
    """What its values count in a rollout's reward."""
    config: dict[str, Any] = {}
    """Arguments of the scorer."""


class BufferConfig(Section, frozen=True):
    """[buffer]: how far generation may run ahead of training."""

    depth: NonNegative | Literal["unbounded"] = 1
    """Versions of work that may be under way beside the one in training; 0 is synchronous, and "unbounded" a stream
    that only `max_lag`, required then, holds back."""
    max_lag: NonNegative | None = None
    """No token older than this many versions is trained; by default the bound that follows from `depth`."""
    on_stale: Literal["wait", "drop", "salvage"] = "wait"
    """Where a slow group would come to be over `max_lag`: batches wait for it; it is cancelled and dropped; or it is
    cancelled, and its tokens are the untrained beginning of a new attempt under newer weights."""
    correct_above: NonNegative | None = None
    """The `corrections` of [algorithm] touch only tokens older than this many versions; by default all tokens."""
    groups: Positive = 16
    """Groups in a batch (one optimizer step)."""
    filter: list[Literal["zero_variance", "overlong"]] = []
    """Leave out groups whose rewards are all equal; leave out answers that were cut at their length limit, and groups
    with fewer than two others. Others are generated in their place."""
    oversample: Annotated[float, Meta(ge=1, le=8)] = 1.0
    """While groups are filtered, up to this many times the slots are taken: as many more as the measured rate of
    filtered groups says. What turns out to be one too many is dropped, so the lag bound stays."""


class AlgorithmConfig(Section, frozen=True):
    """[algorithm]: from rewards to a loss."""

    advantage: AdvantageName = "grpo"
    """`(R - mean) / std` of the group, `R - mean`, `R - mean of the others`, `(R - mean) / mean`, or
    `(R - mean) / std` of the whole step."""
    loss: LossName = "cispo"
    """What becomes of importance ratios and advantages; `docs/losses.md` has the formulas."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped below at 1 - clip_low; by default where the loss has it: 0.2, for gspo 0.0003."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above at 1 + clip_high; by default 0.28 for cispo, dapo and distillation, 0.2 for grpo and
    decoupled_ppo, 0.0004 for gspo."""
    sapo_tau_positive: PositiveFloat = 1.0
    """How fast the gate of sapo closes where the advantage is positive."""
    sapo_tau_negative: PositiveFloat = 1.05
    """How fast the gate of sapo closes where the advantage is not positive."""
    dppo_delta: NonNegativeFloat = 0.2
    """How far a token's probability may move before dppo_tv silences it."""
    proximal: Literal["interpolated", "recomputed"] = "interpolated"
    """The proximal policy of decoupled_ppo: between sampler and policy, or the weights that the version in training
    began with, which takes a copy of them and one more forward pass."""
    proximal_mix: Fraction | None = None
    """The sampler's share in the interpolated proximal policy of decoupled_ppo; by default 1 / lag of the token, and 0
    at lag 0."""
    teacher: str | None = None
    """distillation: the directory of the model to learn from, whose vocabulary must be the model's own."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """An estimate of the divergence from the reference policy is added to the loss, which takes one more forward pass:
    from the weights before the first policy step, of which a copy is kept; with [lora] from the base model, without a
    copy, also after a warm start."""
    kl_weight: NonNegativeFloat = 1e-3
    """Of `kl`."""
    entropy_weight: NonNegativeFloat | None = None
    """Of the entropy bonus at trained tokens; 0 only measures the entropy, and by default it is not computed."""
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

    ranks: Positive = 1
    """Trainer processes that share the model, its optimizer and the work of a step; on GPUs, each has its own. More
    than one not with optimizer "adamw_8bit", `[lora] base` "nf4", `[delivery] send` "delta" or transport "nccl"."""
    tensor_parallel: Positive = 1
    """Ranks that work on one row of tokens together, each with a slice of every matrix; divides `ranks`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is trained; "auto" takes a GPU if there is one."""
    compile: bool = True
    """GPU: compile the model's layers (a minute, once)."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the passes, by default bfloat16 on a GPU and float32 on a CPU; master weights, optimizer and sums of
    gradients are in float32 always."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass: less memory, more time."""
    offload: bool = False
    """GPU: weights, gradients and optimizer lie in host memory and visit the device layer by layer."""
    threads: Positive = 1
    """Compute threads of each trainer process (CPU)."""
    learning_rate: PositiveFloat = 1e-6
    """At its peak."""
    learning_rates: dict[str, PositiveFloat] = {}
    """Factors on the learning rate by part of a parameter's name, such as `{embed = 0.1}`; the first that fits."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """AdamW; with states in 8 bits (bitsandbytes or torchao must be installed); or Muon for the matrices of hidden
    layers, at AdamW's learning rates, and AdamW for all else."""
    warmup_steps: NonNegative = 0
    """Optimizer steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes on after the warm-up, over the whole run."""
    weight_decay: NonNegativeFloat = 0.0
    """Of matrices; vectors (norms, biases) do not decay."""
    beta1: BelowOne = 0.9
    """Of AdamW."""
    beta2: BelowOne = 0.99
    """Of AdamW."""
    clip_norm: PositiveFloat = 1.0
    """Largest global norm of a step's gradient."""
    max_skipped: Positive = 10
    """Steps in a row whose gradients are not finite, and which are skipped for it, before the run ends."""
    micro_batch_tokens: Positive = 8192
    """Tokens that one forward and backward pass holds."""
    share_prefixes: bool = True
    """Compute the prompt that a group's answers share once; on a GPU where it is long enough to pay."""
    checkpoint_every: NonNegative = 0
    """Versions between checkpoints; 0 writes only the last one."""
    keep_checkpoints: Positive = 2
    """How many of the newest checkpoints stay on disk."""


class LoraConfig(Section, frozen=True):
    """[lora]: train a low-rank adapter instead of the weights; without this section all weights are trained."""

    rank: Positive = 16
    """Of the adapter's matrices."""
    alpha: PositiveFloat = 32.0
    """The adapter's product is multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """Of the adapter's inputs, in training passes only; stacked experts take none."""
    targets: Annotated[list[str], Meta(min_length=1)] = field(default_factory=lambda: ["all-linear"])
    """Ends of names of linear layers ("q_proj") or stacked experts ("experts.down_proj"); "all-linear" is every linear
    layer but the vocabulary projection."""
    modules: list[str] = []
    """Ends of names of modules that are trained in full, and delivered so, beside the adapter ("norm")."""
    base: Literal["full", "nf4"] = "full"
    """The frozen linear layers: as they are, or rounded to 4 bits (NF4, blocks of 64), in which the trainer holds them;
    engines serve the rounded weights."""
    serve: Literal["merged", "unmerged"] = "merged"
    """How engines apply the adapter: added to their weights at every swap, or computed beside them in every pass."""

    @property
    def scaling(self) -> float:
        """What the product of the adapter's two matrices is multiplied by."""
        return self.alpha / self.rank


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

    transport: TransportName = "auto"
    """How weights travel: shared memory of one host, files in a directory, sockets, memory that the GPUs of one host
    share, a broadcast, or the best of them, which is said."""
    directory: str | None = None
    """`file`: a directory that trainer and engines share, a path or a URL such as `s3://bucket/folder` for fsspec; by
    default `weights/` in the run directory."""
    keep_files: Positive = 2
    """`file`: how many of the newest versions stay; one that is not acknowledged always does."""
    bind: str = "127.0.0.1"
    """`tcp`: the address of this host that the trainer listens on; beyond loopback, encrypted with keys of the run."""
    send: Literal["full", "delta"] = "full"
    """What travels: all weights, or losslessly what has changed, where that is smaller. With [lora], the adapter."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype that weights travel in; by default the one that engines serve in."""
    rolling: bool = False
    """One engine after the other takes a new version, so that the others serve meanwhile; otherwise all at once."""
    patience: NonNegativeFloat = 10.0
    """Seconds that a version waits for slower engines once the first has proved it; they get no new group meanwhile."""
    publish_every: Positive = 1
    """Optimizer steps that make one version."""
    canary_tokens: Positive = 16
    """Length of the fixed sequence that trainer and engine must score alike."""
    canary_tolerance: PositiveFloat | None = None
    """Mean difference between trainer and engine on the canary's log-probabilities, at most; by default four times that
    of the first version, at least 1e-3."""
    deadline: PositiveFloat = 120.0
    """Seconds in which an engine must prove a version."""


class EvaluateConfig(Section, frozen=True):
    """[evaluate]: held-out prompts, before, during and after."""

    every: NonNegative = 0
    """Versions between evaluations during the run; 0 evaluates only before and after."""
    prompts: NonNegative | None = None
    """Held-out prompts (never trained on); 0 switches evaluation off. By default all of a held-out file, if there is
    one."""
    during: NonNegative = 0
    """Prompts of an evaluation during the run; 0 takes all."""
    samples: Positive = 1
    """Answers per prompt, for pass@k."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""


class GatewayConfig(Section, frozen=True):
    """[gateway]: the OpenAI-compatible server in front of the engines; always there where the task is an agent."""

    serve: bool = False
    """Serve in every other run too."""
    bind: str = "127.0.0.1"
    """The address of this host that it listens on. A key is needed everywhere; beyond loopback it is not encrypted."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0 takes a free one, which is said."""


class PipelineConfig(Section, frozen=True):
    """[pipeline]: processes and deadlines."""

    launcher: LauncherName = "auto"
    """How worker processes start, on this host: each by itself; or forked from one that has loaded their libraries,
    which is faster; `auto` forks where no GPU is used, on Linux."""
    stall_seconds: PositiveFloat = 120.0
    """Seconds without any progress after which the run ends with a report of who waits for whom; after half of them an
    engine that has requests and sends no token is taken for dead."""
    start_seconds: PositiveFloat = 300.0
    """Seconds in which every process must be ready."""
    one_gpu: Literal["turns", "slices", "mps"] = "turns"
    """Trainer and engines on one GPU: each has it for itself in turn, the trainer for a whole step; the driver slices
    its time; or they run side by side under NVIDIA's MPS, which is started for the run. Where that cannot be started
    they take turns, and the run says so and why."""
    restarts: NonNegative = 3
    """How often in a row an engine or trainer that dies is started again; with more deaths the run ends. One that has
    served for a minute starts counting anew."""
    record: bool = False
    """Journal the schedule too: admissions, completions, swaps and consumes, in their order."""


class ObserveConfig(Section, frozen=True):
    """[observe]: what a run shows and keeps."""

    display: Literal["auto", "live", "plain", "none"] = "auto"
    """A live panel, plain lines, or nothing; `auto` is live on a terminal and plain elsewhere."""
    timeline: bool = True
    """Write `timeline.json`."""
    keep_rollouts: bool = True
    """Keep every rollout's tokens in `segments/`."""
    trackers: list[str] = []
    """Code of your own that follows the run: `module:attribute` or `path/to/file.py:attribute` of what makes a tracker,
    which is given every record of `metrics.jsonl`."""


class PolicyConfig(Section, frozen=True):
    """[policies.NAME]: a model that is sampled from, with its engines, its trainer and its deliveries."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    lora: LoraConfig | None = None
    warm_start: WarmStartConfig = WarmStartConfig()
    delivery: DeliveryConfig = DeliveryConfig()


class Config(Section, frozen=True):
    """A whole run, in the short form: `task` is the one task, and `model`, `training` and so on the one policy's."""

    model: ModelConfig
    task: TaskConfig
    task_name: str = TASK
    policy_name: str = POLICY
    run: RunConfig = RunConfig()
    engine: EngineConfig = EngineConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    scoring: ScoringConfig = ScoringConfig()
    scorers: dict[str, ScorerConfig] = {}
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    lora: LoraConfig | None = None
    warm_start: WarmStartConfig = WarmStartConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gateway: GatewayConfig = GatewayConfig()
    pipeline: PipelineConfig = PipelineConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def tasks(self) -> dict[str, TaskConfig]:
        """Every task of the run by its name: one so far."""
        return {self.task_name: self.task}

    @property
    def policies(self) -> dict[str, PolicyConfig]:
        """Every policy of the run by its name, which is the policy's id in all records: one so far."""
        sections = {key: getattr(self, key) for key in PolicyConfig.__struct_fields__}
        return {self.policy_name: PolicyConfig(**sections)}
