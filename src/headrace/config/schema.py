"""The configuration: one struct per section, with the type, range and default of every key. It imports no torch.

The TOML sections have the names of the stages. Unknown keys are errors. `tests/unit/test_config.py` pins the keys,
because adding a key is a feature and renaming a key breaks every user.
"""

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, field
from msgspec.structs import replace

from headrace.config.algorithm import LOSSES as LOSSES
from headrace.config.algorithm import AlgorithmConfig as AlgorithmConfig
from headrace.config.base import (
    PROCESSES as PROCESSES,
)
from headrace.config.base import (
    BelowOne,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Processes,
    Share,
)
from headrace.config.base import Gpus as Gpus
from headrace.config.base import Names as Names
from headrace.config.base import Section as Section
from headrace.config.base import is_reference as is_reference
from headrace.config.base import names_of as names_of
from headrace.config.evaluate import EvaluateConfig
from headrace.config.scorers import ModelScorerSection, ScorerConfig, TeacherConfig
from headrace.types import POLICY, TASK


class RunConfig(Section, frozen=True):
    """[run]: settings of the whole run."""

    name: str = ""
    """The name of the run and of its directory. A run without a name becomes `run`, or `run-2`, `run-3`, ... if
    there are such runs already. A name that is given is never changed: if the run exists, it is refused."""
    directory: str = "runs"
    """The run's files go to `directory/name`."""
    seed: NonNegative = 0
    """The seed of random weights, of the order of prompts, and of every sampled token."""
    versions: Positive = 100
    """The number of versions to train."""


class ModelConfig(Section, frozen=True):
    """[model]: the model to train, by its name on the Hugging Face hub or as a directory."""

    path: str
    """A directory with `config.json`, `tokenizer.json` and, unless `weights = "random"`, safetensors weights. Where
    there is no such directory: a name on the hub, such as "Qwen/Qwen3-0.6B" (`docs/models_and_data.md`)."""
    revision: str = ""
    """The branch, tag or commit of a model on the hub. By default its main branch. The run saves the commit that this
    was when the run began, and resumes with it."""
    chat_template: str | None = None
    """A chat template of your own in place of the model's: a file, or the template itself. The run saves its text, and
    checkpoints carry it."""
    weights: Literal["load", "random"] = "load"
    """`load`: read the weights from the directory. `random`: draw them from `[run] seed`; the directory then needs only
    `config.json` and `tokenizer.json`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which engines serve the model. The trained weights (with [lora], the adapter) are float32 in the
    trainer in both cases, so float32 is served without rounding. `[training] compute_dtype` is the dtype of the
    trainer's passes, bfloat16 on a GPU; with another dtype here, ratios are not exactly 1 at lag 0."""


class TaskSection(Section, frozen=True, tag_field="kind"):
    """Keys that a task of any kind has."""

    weight: PositiveFloat = 1.0
    """This task's share of the prompts, relative to the weights of the run's other tasks (`[tasks.NAME]`)."""


class PromptsSection(TaskSection, frozen=True, kw_only=True):
    """Keys of a task whose prompts are the rows of a file, or of a dataset on the hub."""

    path: str
    """A file of rows, by the end of its name: `.jsonl`, `.json` (a list of objects), `.csv` or `.parquet`. Or the name
    of a dataset on the hub, such as "openai/gsm8k". Parquet and the hub need `pip install "headrace[data]"`. A row has
    a `prompt` (text or messages). Its other fields, except `id`, are for the reward function or the agent."""
    revision: str = ""
    """The branch, tag or commit of a dataset on the hub. By default its main branch. The run saves the commit that this
    was when the run began, and resumes with it."""
    subset: str | None = None
    """The subset (configuration) of a dataset on the hub, such as "main". By default the only one."""
    split: str = "train"
    """The split of a dataset on the hub to train on."""
    heldout_path: str | None = None
    """A second file or dataset, for evaluation. Without `heldout_path` and `heldout_split`, `[evaluate] prompts` rows
    are held out of `path`, chosen by a hash."""
    heldout_split: str | None = None
    """The split of a dataset on the hub for evaluation, such as "test". By default `split` of `heldout_path`."""
    fields: dict[str, str] = {}
    """The fields of a row under other names: `{prompt = "question", answer = "solution"}` takes the prompt from the
    field `question`, and gives the reward function the field `solution` as `answer` too."""
    system: str | None = None
    """A system message before every prompt that is given as text."""
    demonstration: str | None = "answer"
    """The field of each row that holds a correct answer, for a supervised warm start."""


class DatasetTaskConfig(PromptsSection, frozen=True, kw_only=True, tag="dataset"):
    """[task] kind = "dataset": prompts from a file or from the hub, judged by a reward function of yours."""

    format: Literal["chat", "text"] = "chat"
    """How a prompt that is text reaches the model. `chat`: as a user's message, by the chat template. `text`: as it is,
    after the token that the tokenizer puts before every text, if there is one (BOS). Base models without a chat
    template need `text`."""
    reward: str | list[str] | None = None
    """The reward function: `module:function`, or `path/to/file.py:function`. It is called with `completion` and with
    those fields of the line that its parameters name, such as `answer`. If a line lacks a field, the default of the
    parameter is used; without a default, the rollout fails. A list names several functions: each is recorded under the
    name of the function, and the reward is their weighted sum. Required unless there are `[scorers.NAME]`."""
    reward_weights: list[float] = []
    """The weights of the reward functions, in their order. By default each weighs 1."""

    @property
    def named_rewards(self) -> dict[str, str]:
        """The references to the reward functions by the names under which they are recorded."""
        if isinstance(self.reward, list):
            return {reference.rpartition(":")[2].rpartition(".")[2]: reference for reference in self.reward}
        return {} if self.reward is None else {"reward": self.reward}


class GymTaskConfig(TaskSection, frozen=True, kw_only=True, tag="gym"):
    """[task] kind = "gym": a reasoning-gym dataset with its own verifier."""

    name: str
    """The name of the reasoning-gym dataset."""
    config: dict[str, Any] = {}
    """The settings of the dataset itself."""
    size: Positive = 10_000
    """The number of training prompts to generate."""
    system: str | None = None
    """A system message before every question."""
    suffix: str = ""
    """Text that is appended to every question, for example how to format the answer."""
    answer_pattern: str | None = None
    """A regular expression that extracts the answer from a completion before it is judged: its first group, or else the
    whole match."""


class EnvironmentTaskConfig(TaskSection, frozen=True, kw_only=True, tag="environment"):
    """[task] kind = "environment": episodes of several turns, from an environment of yours."""

    factory: str
    """The factory of the task: `module:name`. `factory(**config, seed=..., heldout=...)` returns a `headrace.Task`."""
    config: dict[str, Any] = {}
    """The arguments of the factory."""


class AgentTaskConfig(PromptsSection, frozen=True, kw_only=True, tag="agent"):
    """[task] kind = "agent": agents that speak OpenAI's API work on prompts, through the gateway of the run."""

    agent: str | None = None
    """The agent: `module:function`, or `path/to/file.py:function`. The reward is what the function returns or posts.
    `headrace gateway` ignores `agent` and `command`: there agents connect from outside."""
    command: list[str] = []
    """A program that is started for every rollout, instead of `agent`. Without `agent` and `command`, agents connect
    from outside."""
    workers: Processes = 1
    """The number of processes in which agents run."""
    concurrency: Positive = 32
    """The number of agents that run at the same time in each process, in threads."""
    timeout: PositiveFloat = 120.0
    """Seconds in which an agent must have its reward, from the start of the agent. After that its rollout fails."""


TaskConfig = DatasetTaskConfig | GymTaskConfig | EnvironmentTaskConfig | AgentTaskConfig


class MixtureConfig(Section, frozen=True, kw_only=True, tag_field="kind", tag="mixture"):
    """Several tasks, by name. A file has a section `[tasks.NAME]` for each of them."""

    tasks: dict[str, TaskConfig]


class EngineRange(Section, frozen=True, kw_only=True):
    """The bounds between which a run chooses its number of engines."""

    least: Processes = 1
    most: Processes


class EngineConfig(Section, frozen=True):
    """[engine]: the engines, which generate tokens."""

    kind: Annotated[str, Names(("embedded", "vllm"))] = "embedded"
    """The kind of engine: Headrace's own (`embedded`), vLLM servers, or `module:factory` of an engine of yours."""
    count: Processes | EngineRange | None = None
    """The number of engine processes (vLLM: of servers to start). It follows from `gpus` where GPUs are used, and is
    otherwise 1. With `{least = 1, most = 4}` the run begins with `least` engines, and then chooses their number itself
    (`docs/cluster.md`)."""
    gpus: Gpus = "auto"
    """The GPUs of the engines: a number, a list of indices, or a text such as "0-5,7" or "host:0-3". A GPU that is
    listed twice serves two engines, and one that [training] lists too is shared with the trainer. `auto` takes what the
    trainer leaves, or shares a single GPU with it."""
    gpus_per_engine: Positive = 1
    """The number of GPUs of each engine. Embedded engines have one. A vLLM server divides the model over them (tensor
    parallelism); on a CPU it has this many worker processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device on which the model runs. `auto` takes a GPU if there is one."""
    memory_fraction: Share | None = None
    """GPU: the share of the GPU's memory that an engine may take (vLLM: with the weights that it stages). By default
    nearly all free memory; beside a trainer on the same GPU, what is left after an estimate of the trainer's need."""
    graphs: bool = True
    """GPU: capture decode steps as CUDA graphs."""
    compile: bool = True
    """GPU: compile the model's layers when the engine starts. `docs/performance.md` says how long this takes."""
    fuse_projections: bool = False
    """GPU, compiled layers: compute queries, keys and values in one matrix product, and gate and up in another. The
    parameters become views of one memory, under their own names. Layers with adapters stay as they are. It does not go
    together with adapters that are merged, or that train modules in full."""
    router_kernel: bool = False
    """GPU, compiled layers, mixtures of experts: let routers choose their experts by a kernel in place of torch's
    `topk`. The kernel was tested without a GPU only, and its gain is not measured yet."""
    expert_kernels: bool = False
    """GPU: decode mixtures of experts with Headrace's own kernels, where they fit the model. `false` leaves the experts
    to torch's grouped products."""
    threads: Processes = 1
    """The number of compute threads of each engine process (CPU)."""
    slots: Positive = 64
    """The number of sequences that decode together."""
    block_size: Positive = 16
    """The number of tokens in a block of the paged KV cache."""
    cache_tokens: NonNegative = 0
    """The number of tokens that the KV cache holds. 0 takes what `slots` sequences of the longest length need, or what
    fits on the GPU."""
    max_length: NonNegative = 0
    """The longest sequence in tokens, including its prompt. 0 takes the model's own limit, at most 4096."""
    prefill_chunk: NonNegative = 0
    """The number of prompt tokens that are computed in one step beside the decoding sequences. 0 takes 512 on a CPU and
    16384 on a GPU."""
    interrupt: Literal["never", "abort", "drain", "block"] = "never"
    """What happens to running requests when new weights arrive. `never`: they continue under the new weights. `abort`:
    they return what they have and are resumed from that prefix. `drain`: running requests finish before the change;
    requests that wait for a slot start after it. `block`: requests that wait for a slot finish before the change too;
    only requests that are sent later start after it."""
    kv: Literal["keep", "recompute"] = "recompute"
    """What happens to the KV cache of running sequences when new weights arrive: `keep` it, or `recompute` it under the
    new weights."""
    staging: Literal["auto", "device", "host", "none"] = "auto"
    """Where an embedded engine holds a new version until it is live. `device`: beside the live weights. `host`: in host
    memory. `none`: nowhere; while decoding is stopped, the version is copied straight over the live weights and proved
    before the next token. `auto`: `device`, or `none` on a GPU whose memory is needed for the KV cache; the run says
    which, and why ([details](engine.md#where-new-weights-are-staged))."""
    quantize: Literal["none", "fp8"] = "none"
    """Embedded engines: `fp8` serves the linear layers in FP8. Their weights are rounded as they arrive, with one scale
    for each output, and their inputs in every step, with one scale for each token. Sampled tokens carry the
    log-probabilities of the rounded model ([details](engine.md#linear-layers-in-fp8))."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Embedded engines: `fp8` stores keys and values in FP8, in half the memory of 16 bits; `auto` stores them in the
    dtype of the model."""
    python: str = ""
    """vLLM: the Python interpreter of vLLM's own environment (`make vllm` creates `.venv-vllm/bin/python`)."""
    urls: list[str] = []
    """vLLM: the URLs of servers that already run, instead of starting `count` servers. Their API key is read from
    `VLLM_API_KEY`."""
    port: NonNegative = 0
    """vLLM: the port of the first server on loopback; the other servers take the ports after it. 0 takes free ports."""
    arguments: list[str] = []
    """vLLM: further command-line arguments for every server that is started."""

    @property
    def processes(self) -> int:
        """The number of engine processes that the run has places for: those of [engine] count, or the most of them."""
        if isinstance(self.count, EngineRange):
            return self.count.most
        return len(self.urls) or self.count or 1

    @property
    def at_start(self) -> int:
        """The number of engine processes with which a new run begins."""
        return self.count.least if isinstance(self.count, EngineRange) else self.processes


class RolloutsConfig(Section, frozen=True):
    """[rollouts]: how answers are sampled."""

    group_size: Positive = 8
    """The number of answers to one prompt, which are compared with each other."""
    max_tokens: Positive = 256
    """The most tokens that are sampled in a rollout, over all its turns."""
    max_turns: Positive = 8
    """The most turns of the policy in one rollout."""
    temperature: PositiveFloat = 1.0
    """The sampling temperature. It is recorded with the tokens, and the loss computes its log-probabilities at the
    recorded temperature, also after a resume with another one."""
    top_k: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Sample among this many of the likeliest tokens; 0 samples among all. With any of `top_k`, `top_p` and `min_p`,
    the tokens left to sample from (at most the 1024 likeliest) are recorded, and the loss normalises over them."""
    top_p: Share = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: Fraction = 0.0
    """Exclude tokens whose probability is below this share of the likeliest token's probability."""
    keep_routing: bool = True
    """Mixture-of-experts models: record the experts of each sampled token (2 bytes for each expert in each layer), and
    use the same experts in training. Without this, the trainer's routers choose again. It does not apply to agents."""
    min_group: Positive | None = None
    """Close a group without its stragglers when this many of its answers have ended and `straggler_seconds` have
    passed. What is trained is then shorter than what is generated. By default a group waits for all its answers."""
    straggler_seconds: PositiveFloat = 60.0
    """Seconds from the start of a group after which `min_group` applies."""
    curriculum: bool = False
    """Choose prompts by difficulty. Prompts that were solved rest for some epochs; prompts that no answer solved come
    again sooner. An answer with a reward of at least 1 counts as solved."""
    stop: list[str] = []
    """Tokens that end a turn, in addition to the model's own end tokens. They are part of the turn's text."""

    @property
    def truncates(self) -> bool:
        """Whether sampling excludes some tokens."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


class ScoringConfig(Section, frozen=True):
    """[scoring]: how answers are judged, while others are generated."""

    workers: Processes = 1
    """The number of reward worker processes."""
    timeout: PositiveFloat = 30.0
    """Seconds that one judgement may take. After that its rollout fails."""
    judgements_per_worker: Positive = 10_000
    """A reward worker is replaced by a fresh one after this many judgements, or when its memory has grown by 1 GiB."""
    shuffle: bool = False
    """Control experiment: give every rollout the reward of another rollout of the same batch, chosen at random."""


class BufferConfig(Section, frozen=True):
    """[buffer]: how far generation may run ahead of training."""

    depth: NonNegative | Literal["unbounded"] = 1
    """How many versions of work may be under way beside the version in training. 0 is synchronous: generation waits
    until the engines have the new weights, and lag is 0. With depth K, most tokens are at most K versions old when they
    are trained, but a token of a slow group can be up to 2 x K + 1 versions old. Set `max_lag` for a smaller bound.
    With `"unbounded"` only `max_lag` limits generation, and `max_lag` is required."""
    max_lag: NonNegative | None = None
    """The largest lag: no token that is older than this many versions is trained. By default the bound that follows
    from `depth`, which is 2 x depth + 1 (0 at depth 0). `max_lag = depth` is the smallest value."""
    on_stale: Literal["wait", "drop", "salvage"] = "wait"
    """What happens when a slow group would exceed `max_lag`. `wait`: batches wait for it. `drop`: it is cancelled and
    dropped. `salvage`: it is cancelled, and its tokens become the untrained beginning of a new attempt under newer
    weights."""
    correct_above: NonNegative | None = None
    """The `corrections` of [algorithm] apply only to tokens older than this many versions. By default they apply to all
    tokens."""
    groups: Positive = 16
    """The number of groups in a batch (one optimizer step)."""
    filter: list[Literal["zero_variance", "overlong"]] = []
    """`zero_variance`: leave out groups whose rewards are all equal. `overlong`: leave out answers that were cut at
    their length limit, and groups in which fewer than two answers remain. Other groups are generated in their place."""
    oversample: Annotated[float, Meta(ge=1, le=8)] = 1.0
    """The most groups that may be under way, as a multiple of the slots that `depth` gives. The additional groups
    replace those that `filter` is expected to leave out, at the rate measured so far. If fewer are left out than
    expected, the surplus groups are dropped, so the lag bound holds."""


class TrainingConfig(Section, frozen=True):
    """[training]: how batches become new weights."""

    ranks: Processes | None = None
    """The number of trainer processes that share the model, its optimizer and the work of a step. It follows from
    `gpus` where GPUs are used, one GPU for each rank, and is otherwise 1."""
    gpus: Gpus = "auto"
    """The GPUs of the trainer, one for each rank: a number, a list of indices, or a text such as "6-7" or "host:0-3".
    `auto` divides the GPUs between trainer and engines by the estimate of `headrace check`, or shares a single one."""
    tensor_parallel: Positive = 1
    """The number of ranks that work together on one row of tokens, each with a slice of every matrix. It must divide
    `ranks`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device on which the model is trained. `auto` takes a GPU if there is one."""
    compile: bool = True
    """GPU: compile the model's layers, which takes about a minute once."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype of the passes. By default bfloat16 on a GPU and float32 on a CPU. The weights that are
    trained and the gradient sums are always float32. With [lora], one rank without `offload` holds the frozen base in
    this dtype; several ranks, or `offload`, hold it in float32, except what `[lora] base` holds in 4 bits."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer, and compute the rest again in the backward pass. This takes less memory and
    more time."""
    offload: bool = False
    """GPU: keep weights, gradients and optimizer in host memory, and move them to the device layer by layer."""
    threads: Processes = 1
    """The number of compute threads of each trainer process (CPU)."""
    learning_rate: PositiveFloat = 1e-6
    """The learning rate at its peak."""
    learning_rates: dict[str, PositiveFloat] = {}
    """Factors on the learning rate by part of a parameter's name, such as `{embed = 0.1}`. The first match applies."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """The optimizer. `adamw_8bit` is AdamW with states in 8 bits (torchao must be installed, or bitsandbytes on one
    GPU). `muon` is Muon for the matrices of hidden layers, at AdamW's learning rates, and AdamW for everything else."""
    warmup_steps: NonNegative = 0
    """The number of optimizer steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate changes after the warm-up, over the whole run."""
    weight_decay: NonNegativeFloat = 0.0
    """The weight decay of matrices. Vectors (norms, biases) do not decay."""
    beta1: BelowOne = 0.9
    """AdamW's decay rate of the first moment."""
    beta2: BelowOne = 0.99
    """AdamW's decay rate of the second moment."""
    clip_norm: PositiveFloat = 1.0
    """The largest global norm of a step's gradient. Larger gradients are scaled down."""
    max_skipped: Positive = 10
    """A step whose loss or gradients are not finite is skipped. The run ends after this many skipped steps in a row."""
    micro_batch_tokens: Positive = 8192
    """The number of tokens in one forward and backward pass."""
    share_prefixes: bool = True
    """Compute the prompt that a group's answers share only once. On a GPU this is done where the prompt is long enough
    to pay."""
    checkpoint_every: NonNegative = 20
    """The number of versions between checkpoints. A run that is killed trains at most so many versions again, from the
    answers in its journal; it generates none of them again. A checkpoint takes the time to write the weights and the
    optimizer once. 0 writes one checkpoint only, when the run finishes or after Ctrl-C."""
    checkpoint_directory: str = ""
    """The directory in which the run's checkpoints are, in a folder with the name of the run. It is a path, or a URL
    that fsspec can write, such as `s3://bucket/checkpoints`. With a URL, the trainer writes each checkpoint to its disk
    and then copies it there ([details](cluster.md#where-checkpoints-go)). By default, checkpoints are in the run
    directory. Trainer ranks on several hosts need a path that all of them share."""
    keep_checkpoints: Positive = 2
    """The number of newest checkpoints that stay on disk, and at the URL of `checkpoint_directory`."""

    @property
    def processes(self) -> int:
        """The number of trainer processes of the run."""
        return self.ranks or 1


class LoraConfig(Section, frozen=True):
    """[lora]: train a low-rank adapter instead of the weights. Without this section all weights are trained."""

    rank: Positive = 16
    """The rank of the adapter's matrices."""
    alpha: PositiveFloat = 32.0
    """The scale of the adapter: the product of its two matrices is multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """The dropout of the adapter's inputs, in training passes only. It must be 0 for stacked experts."""
    targets: Annotated[list[str], Meta(min_length=1)] = field(default_factory=lambda: ["all-linear"])
    """The layers to adapt, by the ends of their names: linear layers ("q_proj") or stacked experts
    ("experts.down_proj"). "all-linear" is every linear layer except the vocabulary projection."""
    modules: list[str] = []
    """The modules that are trained and delivered in full beside the adapter, by the ends of their names ("norm")."""
    base: Literal["full", "nf4"] = "full"
    """The frozen linear layers. `full`: as they are. `nf4`: rounded to 4 bits (NF4, blocks of 64), which is how the
    trainer holds them; engines serve the rounded weights."""
    serve: Literal["merged", "unmerged"] = "merged"
    """How engines apply the adapter. `merged`: they add it to their weights at every swap. `unmerged`: they compute it
    beside the weights in every pass."""
    share_base: bool = False
    """Hold the frozen weights once for the trainer and all engines of a host, in shared memory (on a CPU, with
    `serve = "unmerged"`; [details](lora.md#one-base-for-both))."""

    @property
    def scaling(self) -> float:
        """The factor on the product of the adapter's two matrices."""
        return self.alpha / self.rank


class WarmStartConfig(Section, frozen=True):
    """[warm_start]: supervised steps on the task's demonstrations, before the first version is published."""

    steps: NonNegative = 0
    """The number of supervised steps. 0 starts with the model as it is."""
    batch: Positive = 64
    """The number of demonstrations in a step."""
    learning_rate: PositiveFloat = 1e-3
    """The learning rate, constant over these steps."""


class DeliveryConfig(Section, frozen=True):
    """[delivery]: how new weights reach the engines."""

    transport: Annotated[str, Names(("auto", "shm", "file", "tcp", "cuda_ipc", "nccl"))] = "auto"
    """How weights travel. `shm`: shared memory of one host. `file`: files in a directory. `tcp`: sockets. `cuda_ipc`:
    memory that the GPUs of one host share. `nccl`: a broadcast. `auto`: the best of them, which the run prints."""
    directory: str | None = None
    """`file`: a directory that trainer and engines share. It is a path, or a URL such as `s3://bucket/folder` for
    fsspec. By default `weights/` in the run directory."""
    keep_files: Positive = 2
    """`file`: the number of newest versions that stay on disk. A version that is not acknowledged always stays."""
    bind: str = "127.0.0.1"
    """`tcp` and `nccl`: the address of this host on which the trainer listens. On an address other than loopback, `tcp`
    is encrypted, and only processes that can read the keys file of the run may connect. The run makes this file. `nccl`
    has no keys, so there it needs `[cluster] trusted_network`."""
    send: Literal["full", "delta"] = "full"
    """What is sent. `full`: all weights. `delta`: only the changes, without loss, where that is smaller. With [lora],
    only the adapter is sent."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype in which weights are sent. By default the dtype in which engines serve."""
    rolling: bool = False
    """Engines take a new version one after the other, so that the others serve meanwhile. Otherwise all take it at
    once."""
    patience: NonNegativeFloat = 10.0
    """Seconds that a version waits for slower engines after the first engine has proved it. Slower engines get no new
    groups meanwhile."""
    publish_every: Positive = 1
    """The number of optimizer steps that make one version."""
    canary_tokens: Positive = 16
    """The length of the canary, a fixed token sequence that trainer and engine must score alike."""
    canary_tolerance: PositiveFloat | None = None
    """The largest mean difference between trainer and engine in the canary's log-probabilities. By default four times
    the difference at the first version, and at least 1e-3."""
    deadline: PositiveFloat = 120.0
    """Seconds in which an engine must prove a version."""


class GatewayConfig(Section, frozen=True):
    """[gateway]: the OpenAI-compatible server in front of the engines. It always runs when the task is an agent."""

    serve: bool = False
    """Run the gateway with tasks of other kinds too."""
    bind: str = "127.0.0.1"
    """The address of this host on which the gateway listens. Every request needs the run's API key, on loopback too.
    The gateway never encrypts, so on another address the key and all texts can be read on the network."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port. 0 takes a free port, which the run prints."""
    connections: Positive = 1024
    """The most connections at the same time. Idle ones are closed first. The agents of the run itself always have room,
    and the limit is never above what the system's limit of open files allows."""
    max_body: Positive = 8_388_608
    """The most bytes that the body of a request may have. All bodies together may take eight times as much."""
    queue: Positive = 1024
    """The most answers that are sampled or wait for an engine at the same time. A request beyond this gets status 429.
    The agents of the run itself always have room."""


class PipelineConfig(Section, frozen=True):
    """[pipeline]: worker processes and deadlines."""

    launcher: Annotated[str, Names(("auto", "local", "forked", "ray"))] = "auto"
    """How worker processes start. `local`: on this host, each by itself. `forked`: on this host, forked from a process
    that has loaded their libraries, which is faster. `ray`: on the hosts of a Ray cluster (see `[cluster]`). `auto`
    stays on this host, and forks on Linux where no GPU is used."""
    stall_seconds: PositiveFloat = 120.0
    """Seconds without any progress after which the run ends, with a report of who waits for whom. After half of this
    time, an engine that has requests and sends no token is declared dead. The restart of a process has a limit of its
    own and does not count, nor does a question to a scorer for as long as the limits of the scorer allow."""
    start_seconds: PositiveFloat = 300.0
    """Seconds in which every process must become ready."""
    one_gpu: Literal["turns", "slices", "mps"] = "turns"
    """How trainer and engines share one GPU. `turns`: each has the GPU for itself in turn, the trainer for a whole
    step. `slices`: the driver slices the GPU's time. `mps`: they run side by side under NVIDIA's MPS, which is started
    for the run; if MPS cannot be started, they take turns, and the run says so and why."""
    restarts: NonNegative = 3
    """How often in a row an engine, a trainer or the gateway is restarted when it dies. After more deaths the run ends.
    The count starts anew when a process has served for a minute."""
    record: bool = False
    """Also record the schedule in the journal: admissions, completions, swaps and consumes, in their order."""


class ClusterConfig(Section, frozen=True):
    """[cluster]: the hosts of a run, and the network between them. A launcher for one host needs none of it."""

    hosts: list[str] = []
    """The hosts that have workers, by their names or addresses. The trainer takes the first ones. By default all that
    the launcher has, the controller's own first."""
    address: str = ""
    """The address of this host at which workers on other hosts reach the controller. By default the launcher's."""
    silence_seconds: PositiveFloat = 10.0
    """Seconds without a heartbeat after which a worker on another host is declared dead."""
    wait_seconds: PositiveFloat = 120.0
    """Seconds to wait until the hosts have what the run needs. The run then ends with what is missing."""
    trusted_network: bool = False
    """Whether nobody else can reach the network between the hosts. NCCL and gloo, which connect trainer ranks and the
    `nccl` transport, neither encrypt nor authenticate, so they leave a host only if this is true."""


class ObserveConfig(Section, frozen=True):
    """[observe]: what a run displays and keeps."""

    display: Literal["auto", "live", "plain", "none"] = "auto"
    """How progress is displayed: as a live panel, plain lines, or not at all. `auto` is live on a terminal and plain
    elsewhere."""
    timeline: bool = True
    """Write `timeline.json`."""
    keep_rollouts: bool = True
    """Keep every rollout's tokens in `segments/`."""
    trackers: list[str] = []
    """Trackers that follow the run: `wandb`, `tensorboard`, `mlflow`, `trackio`, or your own, as `module:attribute` or
    `path/to/file.py:attribute` of a factory. Each tracker gets every record of `metrics.jsonl`."""
    tracker_options: dict[str, dict[str, Any]] = {}
    """The options of each tracker, by its name in `trackers`, such as `[observe.tracker_options.wandb]` with
    `project = "my-project"`."""
    prometheus: str = ""
    """The address at which the newest numbers are served in the format of Prometheus, such as `127.0.0.1:9400`. Empty:
    they are not served."""


class ModelName(NamedTuple):
    """A model that is given by a directory or by its name on the hub."""

    path: str
    revision: str = ""


class Config(Section, frozen=True):
    """The configuration of a run in the short form: its task or tasks, and the sections of its one policy."""

    model: ModelConfig
    task: TaskConfig | MixtureConfig
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
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def tasks(self) -> dict[str, TaskConfig]:
        """The run's tasks by their sections: `task` if there is one task, otherwise `tasks.NAME` for each."""
        if isinstance(self.task, MixtureConfig):
            return {f"tasks.{name}": task for name, task in self.task.tasks.items()}
        return {"task": self.task}

    @property
    def longest_answers(self) -> dict[str, int]:
        """The `max_tokens` of training, and of each held-out set that has its own, by their sections."""
        own = {f"evaluate.sets.{name}": one.max_tokens for name, one in self.evaluate.sets.items() if one.max_tokens}
        return {"rollouts": self.rollouts.max_tokens} | own

    @property
    def teachers(self) -> dict[str, TeacherConfig]:
        """The teachers outside of the trainer, by their names among the scorers."""
        return {name: one for name, one in self._all_teachers.items() if not one.in_trainer}

    @property
    def trainer_teachers(self) -> dict[str, ModelName]:
        """The teachers that the trainer is to hold, by their keys. At most one is accepted."""
        short = self.algorithm.teacher
        given = {} if short is None else {"[algorithm] teacher": ModelName(short)}
        inside = {name: one for name, one in self._all_teachers.items() if one.in_trainer}
        return given | {f"[scorers.{name}] model": ModelName(one.model, one.revision) for name, one in inside.items()}

    @property
    def _all_teachers(self) -> dict[str, TeacherConfig]:
        return {name: one for name, one in self.scorers.items() if isinstance(one, TeacherConfig)}

    @property
    def scorer_models(self) -> dict[str, ModelScorerSection]:
        """The sections of the models that score in worker processes of their own. `scorer-0` is that of the first."""
        sections = {f"scorers.{name}": section for name, section in self.scorers.items()}
        return {name: one for name, one in sections.items() if isinstance(one, ModelScorerSection) and _has_model(one)}

    @property
    def moving_teachers(self) -> dict[str, TeacherConfig]:
        """The teachers that follow the policy, by their names among the scorers."""
        return {name: one for name, one in self.teachers.items() if one.policy != "none"}


def _has_model(section: ModelScorerSection) -> bool:
    """Return whether the section has a model in a worker process of its own."""
    if isinstance(section, TeacherConfig):
        return section.policy != "none" or (bool(section.model) and not section.in_trainer)
    return bool(section.model)


def as_engine(config: Config, scorer: ModelScorerSection) -> Config:
    """Return the configuration under which an engine of ours serves the model of a scorer."""
    return replace(
        config,
        # A teacher without a model of its own follows the policy, and has its model.
        model=ModelConfig(path=scorer.model, revision=scorer.revision, dtype=scorer.dtype)
        if scorer.model
        else config.model,
        engine=EngineConfig(
            device="cuda" if scorer.gpus else "cpu",
            memory_fraction=scorer.memory_fraction,
            threads=scorer.threads,
            slots=scorer.slots,
            max_length=scorer.max_length,
        ),
        lora=None,
    )
