"""The sections `[scorers.NAME]`: a scorer of each kind. A section without `kind` is a scorer of kind "function"."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from headrace.config.base import (
    BelowOne,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Processes,
    Section,
    Share,
)
from headrace.errors import ConfigError

OWN_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG")
"""The environment variables that every program gets."""
FUNCTION = "function"
"""The kind of a section that names none."""


class ScorerSection(Section, frozen=True, tag_field="kind"):
    """Keys that a scorer of any kind has."""

    weight: float = 1.0
    """The weight of this scorer's values in a rollout's reward."""


class FunctionScorerConfig(ScorerSection, frozen=True, kw_only=True, tag=FUNCTION):
    """[scorers.NAME]: a scorer that judges rollouts. Without any, the task's own reward is the only scorer."""

    scorer: str
    """The scorer: `module:attribute`, or `path/to/file.py:attribute`."""
    config: dict[str, Any] = {}
    """The arguments of the scorer."""


class ServedScorerSection(ScorerSection, frozen=True):
    """Keys of a scorer that asks something outside of the controller, and keeps its own deadlines."""

    concurrency: Positive = 32
    """The most questions to this scorer that are under way at the same time. Further rollouts wait for a place."""
    timeout: PositiveFloat = 30.0
    """Seconds that one attempt at a question may take."""
    retries: NonNegative = 1
    """How often a question is asked again after an attempt that failed. Then the rollout fails, with the reason of the
    last attempt."""
    patience: NonNegativeFloat = 60.0
    """Seconds that a question waits while nothing can be reached that would answer it. After that, such an attempt
    counts as failed too."""


class ProgramConfig(ServedScorerSection, frozen=True, kw_only=True, tag="program"):
    """[scorers.NAME] kind = "program": a program that is run for every answer, in a sandbox."""

    command: Annotated[list[str], Meta(min_length=1)]
    """The program and its arguments. It reads a JSON object with `prompt`, `completion` and the fields of the prompt.
    The last line that it prints is a number, or a JSON object with `reward` and further numbers to record. A word that
    is a file beside the TOML file becomes its path."""
    memory: Annotated[int, Meta(ge=16, le=1 << 30)] = 1024
    """The most memory of each process of the program, in MiB of its address space."""
    processes: Positive = 1
    """The most processes that the program may have, itself included."""
    network: bool = False
    """Whether the program may use the network. Otherwise every socket is refused."""
    environment: dict[str, str] = {}
    """The environment variables of the program, beside `PATH`, `HOME`, `TMPDIR` and `LANG`. It inherits none."""
    concurrency: Positive = 2
    """The most answers that are judged at the same time, each by a process of its own. Further rollouts wait."""


class ModelScorerSection(ServedScorerSection, frozen=True):
    """Keys of a scorer whose model runs in a worker process of its own."""

    model: str = ""
    """The model: a directory, or a name on the hub. It runs in a worker process of its own."""
    revision: str = ""
    """The branch, tag or commit of a model on the hub. By default its main branch. The run saves the commit that this
    was when the run began, and resumes with it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which the model runs."""
    gpus: list[NonNegative] | str = []
    """The GPU of the model: a list of its index, or a text such as "0" or "host:0". By default the model runs on the
    CPU. Engines and trainer leave this GPU alone, unless their own `gpus` name it too, or there is no other GPU."""
    memory_fraction: Share = 0.2
    """GPU: the share of the GPU's memory that the model may take, with its cache."""
    threads: Processes = 1
    """The number of compute threads of the process (CPU)."""
    cores: list[NonNegative] = []
    """The CPU cores that the process may use. By default all cores of the run."""
    slots: Positive = 64
    """The number of sequences that the model computes together."""
    max_length: NonNegative = 0
    """The longest sequence in tokens. 0 takes the model's own limit, at most 4096."""


class JudgeConfig(ModelScorerSection, frozen=True, kw_only=True, tag="judge"):
    """[scorers.NAME] kind = "judge": a language model that is asked about every answer, and whose reply is a number."""

    template: str
    """The question to the judge, or a file that holds it. `{prompt}`, `{completion}` and `{FIELD}`, for any field of
    the prompt, are replaced. `{{` and `}}` stand for braces."""
    system: str | None = None
    """A system message before the question."""
    url: str = ""
    """The base URL of an OpenAI-compatible server, such as "https://api.example.com/v1". Give this or `model`."""
    served_model: str = ""
    """The name under which the server at `url` knows the model."""
    api_key: str = ""
    """The environment variable that holds the API key of the server at `url`. Without one, no key is sent."""
    pattern: str = ""
    """A regular expression that finds the number in a reply: its first group, or else the whole match. Upper and lower
    case are the same, and the last match counts. By default the last number of the reply, or the last of `words`."""
    field: str = ""
    """The field of a JSON object in the reply that holds the number, such as "score". Give this or `pattern`."""
    words: dict[str, float] = {}
    """The values of replies that are words, such as `{yes = 1, no = 0}`: `pattern` or `field` may find one of them."""
    samples: Positive = 1
    """The number of replies that are sampled for one answer. Replies without a number are left out; at least half of
    the replies must have one."""
    combine: Literal["mean", "majority"] = "mean"
    """How the numbers of several replies become one: their mean, or the most frequent one."""
    temperature: NonNegativeFloat = 0.0
    """The sampling temperature of replies. Several samples need a temperature above 0."""
    max_tokens: Positive = 256
    """The most tokens of a reply."""
    cache: NonNegative = 10_000
    """How many judgements are remembered. The same question is then not asked twice. 0 remembers none."""


class ProcessRewardConfig(ModelScorerSection, frozen=True, kw_only=True, tag="process_reward"):
    """[scorers.NAME] kind = "process_reward": a model that scores every step of an answer while the next is sampled.

    `concurrency` is here the number of messages under way to the model. Each has the steps of any number of answers.
    """

    markers: list[str]
    """The texts that end a step, such as `["\\n\\n"]`. A token that contains one of them is the last of its step."""
    tag: str = ""
    """A token that the model reads after every step, and at which its verdict stands. The policy does not sample it. By
    default the verdict stands at the last token of the step."""
    good: str = ""
    """What says that a step is good: a label of a token classifier, by default its last one, or a token of a causal
    language model. The score is its probability."""
    bad: str = ""
    """Causal language models: the token that says that a step is bad. The score is then the probability of `good` among
    these two tokens."""
    whole: Literal["none", "last", "min", "mean", "product"] = "none"
    """How the scores of the steps become a score of the whole answer, which adds to its reward. `none`: there is none,
    and the steps alone are scored."""
    cancel_below: Fraction = 0.0
    """An answer is ended, and dropped with the reason `low_score`, when a step of it scores less than this while the
    answer is still being sampled. If too few answers of a group remain, the group is dropped. Held-out answers are
    never ended."""
    when: Literal["step", "end"] = "step"
    """When steps are scored: each step as soon as it ends, or all of them after the last token of the answer."""


class TeacherConfig(ModelScorerSection, frozen=True, kw_only=True, tag="teacher"):
    """[scorers.NAME] kind = "teacher": a model that scores every token of an answer, for a loss that learns from it."""

    in_trainer: bool = False
    """Whether the trainer holds the model beside the policy, on every rank. Otherwise it runs in a worker process of
    its own. `[algorithm] teacher` is the short form of such a section."""
    policy: Literal["none", "ema", "earlier"] = "none"
    """A teacher that follows the policy, in place of `model` or `url`. `ema`: an exponential moving average of the
    policy's weights. `earlier`: the policy's version of `versions_ago` versions before."""
    decay: BelowOne = 0.99
    """`ema`: the share of the average that stays after every optimizer step."""
    versions_ago: Positive = 8
    """`earlier`: how many versions the teacher is behind the policy. The trainer keeps a copy of each of them."""
    every: Positive = 1
    """A teacher that follows the policy is refreshed after so many versions."""
    url: str = ""
    """The base URL of a vLLM server, such as "http://127.0.0.1:8000/v1", which is asked for `prompt_logprobs`. Give
    this or `model`."""
    served_model: str = ""
    """The name under which the server at `url` knows the model."""
    api_key: str = ""
    """The environment variable that holds the API key of the server at `url`. Without one, no key is sent."""
    tokenizer: str = ""
    """The directory, or the name on the hub, of the model at `url`. Its tokenizer is compared with that of the trained
    model."""


ScorerConfig = FunctionScorerConfig | ProgramConfig | JudgeConfig | ProcessRewardConfig | TeacherConfig


def check_scorer(place: str, scorer: ScorerConfig) -> None:
    """Raise `ConfigError` if keys of the section at this place contradict each other."""
    if isinstance(scorer, ProgramConfig):
        _check_program(place, scorer)
    if isinstance(scorer, JudgeConfig):
        _check_judge(place, scorer)
    if isinstance(scorer, ProcessRewardConfig):
        _check_process_reward(place, scorer)
    if isinstance(scorer, TeacherConfig):
        _check_teacher(place, scorer)


IN_TRAINER = ("in_trainer", "model", "revision")
"""The keys of a teacher in the trainer. What else a section has says how a worker process or a server is asked."""


def _check_teacher(place: str, teacher: TeacherConfig) -> None:
    if [bool(teacher.model), bool(teacher.url), teacher.policy != "none"].count(True) != 1:
        raise ConfigError(
            f"[{place}] model: give the model of the teacher, the url of a server, or policy (one of them)"
        )
    if teacher.in_trainer:
        if not teacher.model:
            raise ConfigError(f"[{place}] in_trainer: the trainer can hold a model, and no other teacher")
        for key in teacher.__struct_fields__:
            if key not in IN_TRAINER and getattr(teacher, key) != getattr(TeacherConfig(), key):
                raise ConfigError(f"[{place}] {key}: with in_trainer = true nothing looks at it")
    readers = {"decay": ("ema",), "versions_ago": ("earlier",), "every": ("ema", "earlier")}
    for key, kinds in readers.items():
        if teacher.policy not in kinds and getattr(teacher, key) != getattr(TeacherConfig(), key):
            raise ConfigError(f"[{place}] {key}: only policy = {' or '.join(map(repr, kinds))} looks at it")
    if teacher.policy != "none" and teacher.dtype != "float32":
        raise ConfigError(f"[{place}] dtype: a teacher that follows the policy has its dtype, [model] dtype")
    _check_url(place, teacher.url)
    for key in ("served_model", "tokenizer"):
        if bool(teacher.url) != bool(getattr(teacher, key)):
            raise ConfigError(f"[{place}] {key}: it is given with url, and only with url")
    if teacher.weight != 1.0:
        raise ConfigError(f"[{place}] weight: a teacher has no part in a reward (see [algorithm] teacher_weight)")


def _check_judge(place: str, judge: JudgeConfig) -> None:
    if bool(judge.model) == bool(judge.url):
        raise ConfigError(f"[{place}] model: give the model of the judge, or the url of a server (one of the two)")
    _check_url(place, judge.url)
    if judge.url and not judge.served_model:
        raise ConfigError(f"[{place}] served_model is required with url: the name that the server gives the model")
    if judge.pattern and judge.field:
        raise ConfigError(f"[{place}] field: pattern is given too; give one of the two")
    try:
        re.compile(judge.pattern)
    except re.error as error:
        raise ConfigError(f"[{place}] pattern: {judge.pattern!r} is not a regular expression: {error}") from error
    if judge.samples > 1 and not judge.temperature:
        raise ConfigError(f"[{place}] samples: {judge.samples} replies are all the same at temperature 0 (raise it)")


def _check_url(place: str, url: str) -> None:
    if not url:
        return
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        raise ConfigError(f"[{place}] url: {url!r} is not a URL such as http://127.0.0.1:8000/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        # It is not shown: it would be written to the log.
        raise ConfigError(f"[{place}] url: it holds more than an address; a key goes into the variable of api_key")


def _check_program(place: str, program: ProgramConfig) -> None:
    for name, value in program.environment.items():
        if name in OWN_VARIABLES:
            raise ConfigError(f"[{place}] environment: {name} is set by the sandbox")
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(f"[{place}] environment: {name!r} cannot be a variable with this value")
    if "\0" in "".join(program.command):
        raise ConfigError(f"[{place}] command: it holds a zero byte")


def _check_process_reward(place: str, scorer: ProcessRewardConfig) -> None:
    if not scorer.model:
        raise ConfigError(f"[{place}] model: give the directory of the process-reward model, or its name on the hub")
    if not scorer.markers or not all(scorer.markers):
        raise ConfigError(f"[{place}] markers: give at least one text that ends a step, and no empty one")
    if scorer.bad and not scorer.good:
        raise ConfigError(f"[{place}] bad: {scorer.bad!r} is compared with `good`, which is not given")
    if scorer.cancel_below and scorer.when == "end":
        raise ConfigError(f'[{place}] cancel_below: with when = "end" an answer has ended before it is scored')
