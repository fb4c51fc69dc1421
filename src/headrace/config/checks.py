"""Checks of a configuration beyond the types and ranges of single keys: values that contradict each other.

The [algorithm] is also checked against what its loss, advantage and corrections declare about themselves in their own
files (see `headrace.config.declared`). The file of a user's own loss, advantage or transport is read only when a run is
checked or started. So a run directory can be examined on a machine that does not have the file.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headrace.config.algorithm import MOST_ENTROPY_WEIGHT
from headrace.config.declared import (
    LossFacts,
    compares_answers,
    correction_facts,
    loss_facts,
    losses_that_read,
    needs,
    transport_facts,
)
from headrace.config.evaluate import check_measures
from headrace.config.memory import runs_on_gpu
from headrace.config.schema import (
    LOSSES,
    AgentTaskConfig,
    AlgorithmConfig,
    Config,
    DatasetTaskConfig,
    EngineRange,
    LoraConfig,
    MixtureConfig,
    PromptsSection,
    RolloutsConfig,
    is_reference,
    names_of,
)
from headrace.config.scorers import ProcessRewardConfig, ScorerConfig, TeacherConfig
from headrace.config.staging import needs_second_copy
from headrace.errors import ConfigError, UserError, one_line

REFERENCES = "or module:attribute, or file.py:attribute"


LONGEST_NAME = 200
"""The most bytes of a run's name. The names of its files and segments are longer."""


def check_together(config: Config) -> None:
    """Raise `ConfigError` if the value of a key that takes names is none of them, or values contradict each other.

    What the user's own loss, advantage or transport declares is left to `check_references` and `check_transport`.
    """
    for name in Config.__struct_fields__:
        section = getattr(config, name)
        for key in getattr(section, "__struct_fields__", ()):
            names, value = names_of(type(section), key), getattr(section, key)
            if names is not None and value not in names and not is_reference(value):
                allowed = ", ".join([*names, REFERENCES])
                raise ConfigError(f"[{name}] {key}: invalid enum value {value!r} (one of: {allowed})")
    _check_run_name(config.run.name)
    _check_algorithm(config.algorithm, config.rollouts)
    if not is_reference(config.algorithm.loss):
        check_teachers(config)
    _check_engine(config)
    _check_buffer(config)
    if config.lora is not None:
        _check_lora(config.lora)
        if config.lora.share_base:
            _check_shared_base(config, config.lora)
    _check_bind("delivery", config.delivery.bind)
    _check_bind("gateway", config.gateway.bind)
    for section, task in config.tasks.items():
        if isinstance(task, DatasetTaskConfig):
            with in_section(section):
                _check_rewards(task, _scorers_of_rollouts(config))
    if isinstance(config.task, AgentTaskConfig) and config.task.agent is not None and config.task.command:
        raise ConfigError("[task] command: give an agent or a command, not both")
    if isinstance(config.task, AgentTaskConfig) and config.rollouts.truncates:
        raise ConfigError("[rollouts] top_k, top_p, min_p: agents' answers are drawn without truncation")
    _check_shuffle(config)
    _check_ranks(config)
    if not is_reference(config.delivery.transport):
        check_transport(config)
    whole_file = config.evaluate.prompts is None and any(
        isinstance(task, PromptsSection) and bool(task.heldout_path or task.heldout_split)
        for task in config.tasks.values()
    )
    if config.evaluate.every and not (config.evaluate.prompts or whole_file or config.evaluate.sets):
        raise ConfigError("[evaluate] every: needs prompts > 0")
    _check_sets(config)


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """Let the lines of mistakes in a task name its own section, such as `tasks.NAME`, where they say `[task]`."""
    try:
        yield
    except UserError as error:
        raise type(error)(str(error).replace("[task]", f"[{section}]")) from error


def _check_run_name(name: str) -> None:
    """Refuse a name that is not one folder of `[run] directory`. Processes and shared memory have the name too."""
    blank = bool(name) and not name.strip()
    if blank or name in (".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise ConfigError(
            f"[run] name: {one_line(name, 80)!r} is not the name of one folder ([run] directory is its path)"
        )


def _check_sets(config: Config) -> None:
    """Raise `ConfigError` if a set of held-out prompts has no task that can judge it, or its figures cannot be had."""
    check_measures("evaluate", config.evaluate)
    for name, each in config.evaluate.sets.items():
        place = f"evaluate.sets.{name}"
        check_measures(place, each)
        tasks = config.task.tasks if isinstance(config.task, MixtureConfig) else {"": config.task}
        if each.task not in tasks:
            known = f"one of {', '.join(tasks)}" if isinstance(config.task, MixtureConfig) else "left out"
            raise ConfigError(f"[{place}] task: {each.task!r} is not a task of this run (it must be {known})")
        if not isinstance(tasks[each.task], PromptsSection):
            raise ConfigError(f"[{place}]: its prompts are rows, and only tasks of kind dataset or agent judge rows")


def _scorers_of_rollouts(config: Config) -> dict[str, ScorerConfig]:
    """Return the scorers that can give a reward. A teacher inside the trainer sees batches, not rollouts."""
    inside = {name for name, one in config.scorers.items() if isinstance(one, TeacherConfig) and one.in_trainer}
    return {name: one for name, one in config.scorers.items() if name not in inside}


def _check_rewards(task: DatasetTaskConfig, scorers: Mapping[str, ScorerConfig]) -> None:
    rewards = task.named_rewards
    if not rewards and not scorers:
        raise ConfigError("[task] reward is required, or a scorer in its place ([scorers.NAME])")
    judges = {name: one for name, one in scorers.items() if not isinstance(one, TeacherConfig)}
    of_steps = [name for name, one in judges.items() if isinstance(one, ProcessRewardConfig) and one.whole == "none"]
    if not rewards and of_steps and len(of_steps) == len(judges):
        raise ConfigError(f"[task] reward is required, or [scorers.{of_steps[0]}] whole: it scores steps, not answers")
    if isinstance(task.reward, list) and len(rewards) < len(task.reward):
        raise ConfigError("[task] reward: two functions have the same name; name one of them by [scorers.NAME] instead")
    if task.reward_weights and len(task.reward_weights) != len(rewards):
        raise ConfigError(f"[task] reward_weights: {len(task.reward_weights)} for {len(rewards)} reward functions")


def _check_buffer(config: Config) -> None:
    buffer, rollouts = config.buffer, config.rollouts
    depth, max_lag = buffer.depth, buffer.max_lag
    if depth == "unbounded" and max_lag is None:
        raise ConfigError("[buffer] max_lag: required with depth = 'unbounded', which nothing else holds back")
    if depth != "unbounded" and max_lag is not None and max_lag < depth:
        raise ConfigError(
            f"[buffer] max_lag: {max_lag} is below depth {depth}, so the deeper work could never be "
            f"trained (set depth = {max_lag}, or a larger max_lag)"
        )
    if buffer.on_stale != "wait" and max_lag is None:
        raise ConfigError(f"[buffer] on_stale: {buffer.on_stale!r} needs max_lag; without it nothing is too old")
    if buffer.correct_above is not None and not config.algorithm.corrections:
        raise ConfigError("[buffer] correct_above: says where [algorithm] corrections apply, and there are none")
    if "zero_variance" in buffer.filter and rollouts.group_size < 2:
        raise ConfigError("[buffer] filter: 'zero_variance' compares answers and needs [rollouts] group_size >= 2")
    if "overlong" in buffer.filter and config.algorithm.mask_overlong:
        raise ConfigError("[algorithm] mask_overlong: [buffer] filter 'overlong' leaves these answers out already")
    if config.algorithm.minibatches > buffer.groups:
        raise ConfigError(
            f"[algorithm] minibatches: {config.algorithm.minibatches} is above [buffer] groups = {buffer.groups}, "
            "and groups are not divided"
        )
    if buffer.oversample > 1 and not buffer.filter:
        raise ConfigError("[buffer] oversample: makes up for groups that are filtered, and filter is empty")
    if rollouts.min_group is not None and not min(2, rollouts.group_size) <= rollouts.min_group <= rollouts.group_size:
        raise ConfigError(
            f"[rollouts] min_group: {rollouts.min_group} is not between {min(2, rollouts.group_size)} and group_size "
            f"{rollouts.group_size}"
        )


def _check_shuffle(config: Config) -> None:
    algorithm = config.algorithm
    if config.scoring.shuffle and (algorithm.credit != "rollout" or algorithm.critic):
        learner = "a critic" if algorithm.critic else f"credit = {algorithm.credit!r}"
        raise ConfigError(
            f"[scoring] shuffle: only the rewards of rollouts are shuffled, and {learner} learns from finer scores too"
        )


def _check_ranks(config: Config) -> None:
    ranks, tensor = config.training.processes, config.training.tensor_parallel
    if config.training.ranks is not None and ranks % tensor:
        raise ConfigError(f"[training] tensor_parallel: {tensor} does not divide ranks = {ranks}")


def check_transport(config: Config) -> None:
    """Check what the transport, built in or the user's own, declares against ranks, engines and the network."""
    what, facts = f'[delivery] transport = "{config.delivery.transport}"', transport_facts(config.delivery.transport)
    if (config.training.processes > 1 or config.training.offload) and not facts.for_ranks:
        raise ConfigError(f"[training] ranks: {what} needs one rank without offload")
    if config.engine.kind == "vllm" and not facts.for_servers:
        raise ConfigError(f'[engine] kind = "vllm" does not go together with {what}')
    if facts.needs_trust and not ipaddress.ip_address(config.delivery.bind).is_loopback:
        check_trusted(config.cluster.trusted_network, f"{what} would listen on {config.delivery.bind}")


def check_trusted(trusted: bool, what: str) -> None:
    """Raise `ConfigError` unless the network is trusted. `what` says which traffic without keys would use it."""
    if not trusted:
        raise ConfigError(
            f"[cluster] trusted_network: {what}, and that traffic is neither encrypted nor authenticated; set it to "
            "true only if nobody else can reach the network between the hosts"
        )


def _check_lora(lora: LoraConfig) -> None:
    for key in ("targets", "modules"):
        if not all(name.strip(".") for name in getattr(lora, key)):
            raise ConfigError(f"[lora] {key}: a name is empty; name the ends of modules, such as q_proj")
    if both := sorted(set(lora.targets) & set(lora.modules)):
        raise ConfigError(f"[lora] modules: {both[0]} is one of targets too; a module is adapted or trained in full")
    if lora.dropout and any(target.rpartition(".")[0].endswith("experts") for target in lora.targets):
        raise ConfigError("[lora] dropout: stacked experts take none; set dropout = 0 or leave them out of targets")


def _check_shared_base(config: Config, lora: LoraConfig) -> None:
    training = config.training
    wrong = {
        '[lora] serve = "unmerged"': lora.serve != "unmerged",
        '[lora] base = "full"': lora.base != "full",
        "[lora] modules = []": bool(lora.modules),
        'engine kind "embedded"': config.engine.kind != "embedded",
        "one trainer rank without offload": training.processes > 1 or training.offload,
        "trainer and engines on a CPU": runs_on_gpu(training.device) or runs_on_gpu(config.engine.device),
        "trainer and engines on one host": config.pipeline.launcher not in ("auto", "local", "forked"),
        "float32 on both sides": config.model.dtype != "float32" or training.compute_dtype not in (None, "float32"),
    }
    for needed, missing in wrong.items():
        if missing:
            raise ConfigError(f"[lora] share_base: needs {needed}")


def _check_engine(config: Config) -> None:
    engine, lora = config.engine, config.lora
    for section, longest in config.longest_answers.items():
        if engine.cache_tokens and engine.cache_tokens < longest + engine.block_size:
            raise ConfigError(
                f"[engine] cache_tokens: {engine.cache_tokens} cannot hold one answer of "
                f"[{section}] max_tokens = {longest} with its prompt"
            )
    if isinstance(engine.count, EngineRange):
        if engine.count.least > engine.count.most:
            raise ConfigError(f"[engine] count: least = {engine.count.least} is above most = {engine.count.most}")
        if engine.urls:
            raise ConfigError("[engine] count: urls name the servers; `headrace scale RUN_DIR --add URL` adds one")
    if engine.kind == "embedded":
        for key in ("python", "urls", "port", "arguments"):
            if getattr(engine, key):
                raise ConfigError(f'[engine] {key}: only engine kind "vllm" has it')
    if engine.staging != "auto" and engine.kind != "embedded":
        raise ConfigError('[engine] staging: only engine kind "embedded" has it')
    if engine.staging == "none" and (needed := needs_second_copy(config)):
        raise ConfigError(f'[engine] staging = "none" does not go together with {needed}, which needs a second copy')
    if engine.fuse_projections and lora is not None and (lora.serve == "merged" or lora.modules):
        # Fused parameters move to other addresses, and an adapter writes to the old ones.
        raise ConfigError(
            '[engine] fuse_projections does not go together with [lora], except with serve = "unmerged" and no modules'
        )
    if engine.quantize != "none":
        _check_quantized(config)
    if engine.kv_dtype != "auto" and engine.kind != "embedded":
        raise ConfigError('[engine] kv_dtype: only engine kind "embedded" has it')
    if engine.kind != "vllm":
        if engine.gpus_per_engine > 1:
            which = "an embedded engine" if engine.kind == "embedded" else "an engine of your own"
            raise ConfigError(f"[engine] gpus_per_engine: {which} runs on one GPU")
        return
    if engine.kv == "keep":
        raise ConfigError(
            '[engine] kv: "keep" is not for vLLM: a sequence kept over a swap would go on before the new weights are '
            'proved; use "recompute"'
        )
    if not engine.python and not engine.urls:
        raise ConfigError(
            '[engine] python: engine kind "vllm" needs the interpreter of an environment with vLLM '
            "(`make vllm` creates .venv-vllm/bin/python), or [engine] urls"
        )
    unsupported = {
        '[lora] serve = "unmerged"': lora is not None and lora.serve == "unmerged",
        '[lora] on [model] weights = "random"': lora is not None and config.model.weights == "random",
        '[lora] base = "nf4"': lora is not None and lora.base == "nf4",
        '[delivery] send = "delta"': config.delivery.send == "delta",
        "[rollouts] top_k, top_p or min_p on a CPU": (
            config.rollouts.truncates and not engine.urls and not runs_on_gpu(engine.device)
        ),
    }
    for what, used in unsupported.items():
        if used:
            raise ConfigError(f'[engine] kind = "vllm" does not go together with {what}')


def _check_quantized(config: Config) -> None:
    unsupported = {
        f'kind = "{config.engine.kind}"': config.engine.kind != "embedded",
        "[lora]": config.lora is not None,
        '[delivery] send = "delta"': config.delivery.send == "delta",
        'staging = "none"': config.engine.staging == "none",
    }
    for what, used in unsupported.items():
        if used:
            raise ConfigError(f'[engine] quantize = "{config.engine.quantize}" does not go together with {what}')


def _check_bind(section: str, bind: str) -> None:
    try:
        address = ipaddress.ip_address(bind)
    except ValueError as error:
        raise ConfigError(f"[{section}] bind: {bind!r} is not an IP address, such as 127.0.0.1") from error
    if address.is_unspecified:
        peers = "engines" if section == "delivery" else "agents"
        raise ConfigError(f"[{section}] bind: {bind} is every interface; name the one address that {peers} can reach")


def _check_algorithm(algorithm: AlgorithmConfig, rollouts: RolloutsConfig) -> None:
    if algorithm.proximal == "recomputed" and algorithm.proximal_mix is not None:
        raise ConfigError("[algorithm] proximal_mix: a proximal policy that is recomputed has no mix (remove one)")
    for name in ("sequence_tis", "icepop", "mis"):
        low, high = getattr(algorithm, f"{name}_low"), getattr(algorithm, f"{name}_high")
        if low > high:
            raise ConfigError(f"[algorithm] {name}_low: {low} is above {name}_high {high}")
    buffer, longest = algorithm.overlong_buffer, rollouts.max_tokens
    if buffer > longest:
        raise ConfigError(f"[algorithm] overlong_buffer: {buffer} is above [rollouts] max_tokens {longest}")
    if rollouts.truncates and algorithm.teacher_divergence != "sampled":
        raise ConfigError(
            f"[algorithm] teacher_divergence: {algorithm.teacher_divergence!r} compares whole distributions, and "
            "[rollouts] top_k, top_p or min_p cut what is sampled from (remove them)"
        )
    if not is_reference(algorithm.loss):
        if not is_reference(algorithm.advantage):
            _check_group(algorithm, rollouts)
        _check_loss(algorithm, loss_facts(algorithm.loss))
    _check_ignored(algorithm)


def check_references(algorithm: AlgorithmConfig, rollouts: RolloutsConfig) -> None:
    """Raise `ConfigError` if values contradict what the user's own loss or advantage declares in its file."""
    if is_reference(algorithm.loss):
        _check_loss(algorithm, loss_facts(algorithm.loss))
    if is_reference(algorithm.loss) or is_reference(algorithm.advantage):
        _check_group(algorithm, rollouts)


def _check_group(algorithm: AlgorithmConfig, rollouts: RolloutsConfig) -> None:
    """Raise `ConfigError` if an advantage that compares answers has only one, unless the loss uses no advantages."""
    compares = not algorithm.critic and compares_answers(algorithm.advantage)
    if rollouts.group_size < 2 and loss_facts(algorithm.loss).uses_rewards and compares:
        raise ConfigError(
            f"[rollouts] group_size: advantage {algorithm.advantage!r} compares answers and needs at least 2"
        )


def _check_loss(algorithm: AlgorithmConfig, facts: LossFacts) -> None:
    """Raise `ConfigError` if the loss contradicts the teacher, the corrections, or a key that is not at its default."""
    loss, corrections = algorithm.loss, correction_facts()
    for name in algorithm.corrections:
        if name in corrections.goes_by_rewards and not facts.uses_rewards:
            raise ConfigError(f"[algorithm] corrections: {name!r} goes by rewards, which loss {loss!r} does not")
        if name in corrections.caps_weights and loss == "distillation" and algorithm.teacher_divergence != "sampled":
            raise ConfigError(
                f"[algorithm] corrections: {name!r} limits importance weights, and teacher_divergence "
                f"{algorithm.teacher_divergence!r} has none"
            )
        if name in corrections.caps_weights and not facts.caps_weights:
            raise ConfigError(
                f"[algorithm] corrections: {name!r} limits importance weights, and loss {loss!r} does not declare "
                "that it limits any (CAPS_WEIGHTS)"
            )
    if algorithm.critic and not facts.uses_rewards:
        raise ConfigError(f"[algorithm] critic: it judges by rewards, which loss {loss!r} does not use (remove it)")
    if algorithm.reward_kl != "none" and not facts.uses_rewards:
        raise ConfigError(f"[algorithm] reward_kl: it is paid from rewards, which loss {loss!r} does not use (set kl)")
    taught = loss_facts("distillation").reads or () if algorithm.teacher_weight is not None else ()
    for key in _changed(algorithm):
        if facts.reads is not None and key not in (*facts.reads, *taught) and (readers := losses_that_read(key)):
            raise ConfigError(f"[algorithm] {key}: loss {loss!r} does not look at it (only {', '.join(readers)})")


def check_teachers(config: Config) -> None:
    """Raise `ConfigError` if there is no teacher for a loss that needs one, or if nothing learns from a teacher."""
    algorithm, facts, outside = config.algorithm, loss_facts(config.algorithm.loss), config.teachers
    loss, learns, inside = algorithm.loss, needs(algorithm).teacher, list(config.trainer_teachers)
    if learns and not inside and not outside:
        wants = f"loss {loss!r}" if "teacher" in facts.needed(algorithm) else "teacher_weight"
        raise ConfigError(
            f"[algorithm] teacher: {wants} needs the directory of a model to learn from, or [scorers.NAME] kind = "
            '"teacher"'
        )
    if len(inside) > 1:
        raise ConfigError(f"{inside[0]}: {inside[1]} is held by the trainer too; give one of the two")
    for name, teacher in outside.items():
        if inside:
            raise ConfigError(f"{inside[0]}: [scorers.{name}] is a teacher too; give one of the two")
        if not learns:
            raise ConfigError(
                f"[scorers.{name}]: nothing learns from a teacher (loss 'distillation', or teacher_weight)"
            )
        if config.rollouts.truncates:
            raise ConfigError(
                f"[scorers.{name}]: a teacher outside of the trainer knows no [rollouts] top_k, top_p, min_p"
            )
        if teacher.url and config.rollouts.temperature != 1.0:
            raise ConfigError(
                f"[scorers.{name}] url: a server scores at temperature 1, and [rollouts] temperature is not"
            )
        if teacher.url and len(outside) == len(config.scorers):
            _check_heldout_temperatures(name, config)
    if config.moving_teachers and (config.training.processes > 1 or config.training.offload or config.lora):
        name = next(iter(config.moving_teachers))
        raise ConfigError(f"[scorers.{name}] policy: not with several [training] ranks, offload or [lora]")
    if "teacher_field" in _changed(algorithm) and len(outside) < 2:
        raise ConfigError("[algorithm] teacher_field: there are no several teachers to choose from")
    if loss == "distillation" and algorithm.teacher_weight is not None:
        raise ConfigError("[algorithm] teacher_weight: loss 'distillation' learns from the teacher alone (remove it)")
    if inside and not learns:
        learners = " or ".join(repr(name) for name in LOSSES if "teacher" in loss_facts(name).needs)
        raise ConfigError(f"{inside[0]}: only loss {learners} learns from one, or any loss with teacher_weight")
    if "teacher_top_k" in _changed(algorithm) and not needs(algorithm).top_k:
        raise ConfigError("[algorithm] teacher_top_k: only teacher_divergence 'forward' and 'reverse' compare them")


def _check_heldout_temperatures(teacher: str, config: Config) -> None:
    """Raise `ConfigError` if only this teacher's server scores held-out answers, and cannot at their temperature."""
    if not any(isinstance(task, DatasetTaskConfig) and not task.named_rewards for task in config.tasks.values()):
        return
    sets = {f"evaluate.sets.{name}": one for name, one in config.evaluate.sets.items()}
    for place, one in {"evaluate": config.evaluate, **sets}.items():
        if one.temperature not in (0.0, 1.0):
            raise ConfigError(
                f"[{place}] temperature: {one.temperature:g} is neither 0 nor 1, and nothing but the server of "
                f"[scorers.{teacher}] scores these answers (a server scores at temperature 1)"
            )


def _check_ignored(algorithm: AlgorithmConfig) -> None:
    """Raise `ConfigError` if a key was changed from its default but no correction or addition reads it."""
    changed = _changed(algorithm)
    for correction, keys in correction_facts().reads.items():
        for key in changed:
            if key in keys and correction not in algorithm.corrections:
                raise ConfigError(f"[algorithm] {key}: only {correction!r} looks at it, which is not in corrections")
    if "kl_weight" in changed and algorithm.kl == "none":
        raise ConfigError("[algorithm] kl_weight: kl is 'none', so nothing has this weight (set kl)")
    if "reward_kl_weight" in changed and algorithm.reward_kl == "none":
        raise ConfigError(
            "[algorithm] reward_kl_weight: reward_kl is 'none', so nothing has this price (set reward_kl)"
        )
    if "entropy_rate" in changed and algorithm.entropy_target is None:
        raise ConfigError("[algorithm] entropy_rate: there is no entropy_target to follow (set it)")
    if algorithm.entropy_target is not None and (algorithm.entropy_weight or 0.0) > MOST_ENTROPY_WEIGHT:
        raise ConfigError(
            f"[algorithm] entropy_weight: {algorithm.entropy_weight:g} is above {MOST_ENTROPY_WEIGHT:g}, the largest "
            "weight of a bonus with an entropy_target"
        )
    if algorithm.critic:
        for key in ("advantage", "credit"):
            if key in changed:
                raise ConfigError(f"[algorithm] {key}: the critic gives every token its advantage (remove one of them)")
    for key in ("gae_lambda", "critic_learning_rate", "value_weight"):
        if key in changed and not algorithm.critic:
            raise ConfigError(f"[algorithm] {key}: there is no critic (set critic = true)")
    if algorithm.credit == "rollout":
        for key in ("baseline", "outcome_weight", *(() if algorithm.critic else ("discount",))):
            if key in changed:
                raise ConfigError(f"[algorithm] {key}: credit is 'rollout', so nothing finer is compared (set credit)")
    elif algorithm.baseline == "state" and algorithm.credit != "turn":
        raise ConfigError("[algorithm] baseline: 'state' is what precedes a turn (set credit = 'turn', or 'prefix')")
    if "overlong_penalty" in changed and not algorithm.overlong_buffer:
        raise ConfigError("[algorithm] overlong_penalty: overlong_buffer is 0, so no answer is punished (set it)")


def _changed(algorithm: AlgorithmConfig) -> list[str]:
    default = AlgorithmConfig()
    return sorted(key for key in AlgorithmConfig.__struct_fields__ if getattr(algorithm, key) != getattr(default, key))
