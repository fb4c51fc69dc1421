"""The `headrace` program: its commands and how they end. Commands that examine a run are in `review`.

Exit codes: 0 done, 1 the run failed, 2 a mistake of the user's (one line says which), 130 interrupted.

`headrace check` tells what is known about a run before it starts, without loading torch. `headrace doctor`, in
`cli/doctor.py`, examines this machine. `headrace generate` answers a file of prompts with the embedded engine, and
writes what training would record. `headrace bench` has measurements of Headrace beside a comparison, in one call. The
options of such a command are the fields of its class in `bench/options.py`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
import typer

from headrace.bench.options import Bench, DeliveryBench, EngineBench, JournalBench, LoopBench, TrainBench, lines
from headrace.cli import AsJson, ConfigPath, RunPath, Settings, doctor, examples, launch, review
from headrace.errors import (
    ConfigError,
    DataError,
    HeadraceError,
    ModelError,
    PeerDied,
    RunFinished,
    UserError,
    one_line,
)

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.config.model_dir import ModelFacts
    from headrace.engines.base import Delta, Request
    from headrace.pipeline.run_session import RunSession
    from headrace.pipeline.trial import Tried
    from headrace.tasks.chat import ChatFormat

BENCHES: dict[str, type[Bench]] = {
    "loop": LoopBench,
    "engine": EngineBench,
    "delivery": DeliveryBench,
    "train": TrainBench,
    "journal": JournalBench,
}
"""The command -> its options. The function `bench_NAME` of the module `headrace.bench.NAME` measures."""
LINE_LENGTH = 4000
"""The most characters of an error's line. A stall names every wait."""


def train(
    config: ConfigPath,
    settings: Settings = None,
    as_json: AsJson = False,
    or_resume: Annotated[bool, typer.Option("--resume", help="If the run exists, go on with it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="If the run exists, remove it first.")] = False,
) -> None:
    """Train a model as CONFIG says."""
    from headrace.config import load_config
    from headrace.run_dir import RunDir, with_name

    if or_resume and overwrite:
        raise UserError("headrace train: --resume goes on with a run and --overwrite removes it; give one of the two")
    loaded = with_name(load_config(config, settings or []), existing=or_resume or overwrite)
    run_dir = RunDir.of(loaded).path
    if or_resume and run_dir.exists():
        # What CONFIG says is in the run directory already. The settings may be new: a job gets other hosts.
        try:
            resume(str(run_dir), settings, as_json)
        except RunFinished as finished:  # A job that is started again has nothing left to do, which is no mistake.
            typer.echo(str(finished), err=as_json)
    else:
        _start(loaded, as_json, overwrite=overwrite)


def resume(run_dir: RunPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Continue a run from its newest checkpoint."""
    from rich.console import Console

    from headrace.observe.progress import make_progress
    from headrace.pipeline.launch import resume_run

    _report(resume_run(run_dir, make_progress("auto", Console(stderr=as_json)), settings or []), as_json)


def scale(
    run_dir: RunPath,
    engines: Annotated[int | None, typer.Option(help="The number of engines that the run should have.")] = None,
    add: Annotated[str | None, typer.Option(metavar="URL", help="Use this vLLM server too.")] = None,
    remove: Annotated[str | None, typer.Option(metavar="URL", help="Use this vLLM server no more.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the number of engines of a live run. The run begins the change at once, and goes on meanwhile."""
    from headrace.pipeline.commands import ask
    from headrace.pipeline.scaling import ScaleRequest

    if sum(given is not None for given in (engines, add, remove)) != 1:
        raise UserError("headrace scale needs one of --engines N, --add URL and --remove URL")
    found = ask(run_dir, ScaleRequest(engines=engines, add=add, remove=remove))
    numbers = {"before": found.before, "after": found.after}
    typer.echo(json.dumps(numbers) if as_json else "engines {before} -> {after}".format(**numbers))


def gateway(config: ConfigPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Train with agents from outside, as CONFIG says: serve OpenAI's API and offer sessions at POST /v1/sessions."""
    from headrace.config import AgentTaskConfig, load_config

    loaded = load_config(config, settings or [])
    if not isinstance(loaded.task, AgentTaskConfig):
        kind = type(loaded.task).__struct_config__.tag
        raise UserError(f'headrace gateway needs [task] kind = "agent", not "{kind}"')
    task = msgspec.structs.replace(loaded.task, agent=None, command=[])
    _start(msgspec.structs.replace(loaded, task=task), as_json)


def _start(config: Config, as_json: bool, *, overwrite: bool = False) -> None:
    from rich.console import Console

    from headrace.observe.progress import make_progress
    from headrace.pipeline.launch import start_run
    from headrace.run_dir import RunDir, with_name

    config = with_name(config)
    progress = make_progress(config.observe.display, Console(stderr=as_json), title=config.run.name)
    try:
        outcome = start_run(config, progress, overwrite=overwrite)
    except KeyboardInterrupt:
        left = RunDir.of(config).path
        after = (
            f"; go on with: headrace resume {left}" if left.is_dir() else " before the run began; nothing is left of it"
        )
        typer.echo(f"headrace: interrupted{after}", err=True)
        raise typer.Exit(130) from None
    _report(outcome, as_json)


def _report(outcome: RunSession, as_json: bool) -> None:
    from headrace.observe.summary import describe

    typer.echo(json.dumps(outcome.summary, indent=2) if as_json else describe(outcome.summary))
    if not as_json:
        typer.echo(f"report: {outcome.run_dir.report}")
    if outcome.outcome == "interrupted":
        typer.echo(f"interrupted; go on with: headrace resume {outcome.run_dir.path}", err=True)
        raise typer.Exit(130)


def check(
    config: ConfigPath,
    settings: Settings = None,
    full: Annotated[bool, typer.Option("--full", help="Print every key with its value too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Try what CONFIG says on one prompt. Print what would run where, the lag bound, the memory, and what is odd."""
    from headrace.buffer.admission import capacity, lag_bound
    from headrace.config import dump_config, load_config
    from headrace.config.hub import model_dir, pinned
    from headrace.config.memory import estimate
    from headrace.config.model_dir import model_facts
    from headrace.config.remarks import dtypes, remarks
    from headrace.pipeline.trial import try_inputs
    from headrace.run_dir import with_name
    from headrace.training.checkpoints.remote_store import check_store

    loaded, placed = _placed(pinned(load_config(config, settings or [])).config)
    check_store(with_name(loaded))
    facts = model_facts(model_dir(loaded.model), loaded.model.weights)
    tried = try_inputs(loaded, facts)
    buffer, every = loaded.buffer, loaded.delivery.publish_every
    found: dict[str, Any] = {
        "lag_bound": lag_bound(buffer.depth, buffer.groups, every, buffer.max_lag),
        "slots": capacity(buffer.depth, buffer.groups, every, buffer.max_lag),
        "on_stale": buffer.on_stale if buffer.max_lag is not None else None,
        "train_prompts": tried.train_prompts,
        "heldout_prompts": tried.heldout_prompts,
        "prompt": tried.prompt,
        "prompt_tokens": tried.prompt_tokens,
        **({"tasks": _tried_tasks(loaded, tried.tasks)} if tried.tasks else {}),
        "dtypes": dtypes(loaded),
        **estimate(loaded, facts),
        "placement": placed(facts),
        "remarks": [*remarks(loaded, facts), *tried.notes],
    }
    if as_json:
        typer.echo(json.dumps({"config": msgspec.to_builtins(loaded), **found}, indent=2))
        return
    if full:
        typer.echo(dump_config(loaded))
    for line in _check_lines(found):
        typer.echo(line)


def _tried_tasks(config: Config, tried: Mapping[str, Tried]) -> dict[str, dict[str, Any]]:
    """Return what the trial found for each of several tasks, with the task's share of the prompts."""
    weights = {name: config.tasks[f"tasks.{name}"].weight for name in tried}
    return {
        name: {
            "share": weights[name] / sum(weights.values()),
            "train_prompts": task.train_prompts,
            "heldout_prompts": task.heldout_prompts,
            "prompt": task.prompt,
            "prompt_tokens": task.prompt_tokens,
        }
        for name, task in tried.items()
    }


def _placed(config: Config) -> tuple[Config, Callable[[ModelFacts], list[str]]]:
    """Place a run on its hosts. Without GPUs there, a configuration for GPUs is not refused, and its line is told."""
    from headrace.cluster.inventory import describe, memory_needs, place_run
    from headrace.cluster.launchers.local import hosts_of

    hosts = hosts_of(config)
    try:
        placed, placement = place_run(config, hosts)
    except ConfigError as error:
        if any(host.gpus for host in hosts):
            raise
        line = f"not on this host: {error}"
        return config, lambda facts: [line]

    def places(facts: ModelFacts) -> list[str]:
        return [f"{name:<11} {where}" for name, where in describe(placement, memory_needs(placed, facts)).items()]

    return placed, places


def _check_lines(found: dict[str, Any]) -> list[str]:
    size = {name: f"{number / 1e9:.2f} GB" for name, number in found["memory_bytes"].items()}
    trainer = "trainer" if found["trainer_ranks"] == 1 else f"each of {found['trainer_ranks']} trainer ranks"
    offloaded = f" and {size['offloaded']} offloaded" if found["memory_bytes"]["offloaded"] else ""
    slow = {
        None: "",
        "wait": "; batches wait for slow groups",
        "drop": "; slow groups are dropped",
        "salvage": "; slow groups are started again and keep their tokens",
    }[found["on_stale"]]
    return [
        f"model       {found['architecture']}, {found['parameters'] / 1e6:.1f}M parameters",
        f"prompts     {found['train_prompts']} to train on, {found['heldout_prompts']} held out",
        *_prompt_lines(found),
        f"lag         at most {found['lag_bound']} versions; {found['slots']} groups under way{slow}",
        "dtypes      engines serve in {engine}, the trainer computes in {trainer}".format(**found["dtypes"]),
        f"memory      {trainer} {size['trainer']}{offloaded}, each engine {size['engine']}, shared {size['shared']}",
        f"bottleneck  {found['bottleneck']} (an estimate: generation {found['generation_seconds']:.2g} s, "
        f"training {found['training_seconds']:.2g} s a version)",
        *(f"places      {line}" for line in found["placement"]),
        *(f"note        {remark}" for remark in found["remarks"]),
    ]


def _prompt_lines(found: dict[str, Any]) -> list[str]:
    """Return the first prompt of each task as the policy sees it, on one line. The prompts of agents are not known."""
    lines = []
    for name, task in found.get("tasks", {}).items():
        counts = f"{task['train_prompts']} to train on, {task['heldout_prompts']} held out"
        lines += [f"task        {name}: {task['share']:.1%} of the prompts; {counts}", *_prompt_lines(task)]
    if found["prompt"]:
        text = json.dumps(found["prompt"], ensure_ascii=False)
        lines.append(f"prompt      {one_line(text, 300)} ({found['prompt_tokens']} tokens, the first one)")
    return lines


_INT32 = 2**31 - 1
"""The largest number that an engine can read. A larger token id would become another token."""


class InputLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of the input."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=_INT32)]] | None = None
    text: str | None = None
    """Text that is continued as it is."""
    prompt: str | list[dict[str, str]] | None = None
    """The same as in datasets: a question, or messages, which the chat template renders."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=_INT32)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=_INT32)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=_INT32)] = 1


class DatasetLine(InputLine, forbid_unknown_fields=False, kw_only=True):
    """A line of a dataset. Its further fields, such as the answer, are for a reward function."""


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face directory, or owner/name.")],
    input_: Annotated[
        str, typer.Option("--input", help="JSON lines: prompt, text or token_ids, max_tokens, temperature, ...")
    ],
    output: Annotated[str, typer.Option("--output", help="JSON lines: token_ids, logprobs, versions, finish_reason.")],
    slots: Annotated[int, typer.Option(help="Sequences that decode together.", min=1)] = 64,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 takes torch's default.", min=0)] = 0,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Use the config alone.")] = False,
) -> None:
    """Continue every prompt of a file. Each answer is one line, in the order of the input."""
    from headrace.config.file_digests import check_digests
    from headrace.config.hub import given_model
    from headrace.config.model_dir import check_model_dir, text_config
    from headrace.tasks.chat import ChatFormat

    weights = "random" if random_weights else "load"
    path = given_model(model, "MODEL_DIR", weights=weights)
    config = check_model_dir(path, weights, key="MODEL_DIR")
    check_digests(path, "MODEL_DIR")
    chat = ChatFormat.load(path) if (path / "tokenizer.json").is_file() else None
    vocabulary = text_config(config).get("vocab_size") or _INT32
    requests = list(_requests(Path(input_), chat, vocabulary))
    try:
        with Path(output).open("w") as out:
            answers = _answers(path, weights, requests, slots, threads)
            for request, answer in zip(requests, answers, strict=True):
                out.write(json.dumps(_record(request, answer, chat)) + "\n")
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from error


def _requests(path: Path, chat: ChatFormat | None, vocabulary: int) -> Iterator[Request]:
    import numpy as np

    from headrace.engines.base import Request, Sampling
    from headrace.rollouts.base import derive_seed

    if not path.is_file():
        raise DataError(f"--input {path}: there is no such file")
    lines = path.read_bytes().splitlines()
    if not lines:
        raise DataError(f"--input {path} is empty")
    for number, text in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            fields = msgspec.json.decode(text)
            of_dataset = isinstance(fields, dict) and "prompt" in fields
            line = msgspec.json.decode(text, type=DatasetLine if of_dataset else InputLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{where}: {error}") from error
        if sum(given is not None for given in (line.token_ids, line.text, line.prompt)) != 1:
            raise DataError(f'{where}: give one of "prompt", "text" and "token_ids"')
        if line.token_ids is None and chat is None:
            raise DataError(f'{where}: the model has no tokenizer.json, so "token_ids" is needed')
        if line.token_ids and max(line.token_ids) >= vocabulary:
            raise DataError(f"{where}: token id {max(line.token_ids)} is not in the model's vocabulary of {vocabulary}")
        tokens = np.array(line.token_ids if line.token_ids is not None else _opened(line, chat, where))
        for sample in range(line.n):
            yield Request(
                id=f"{number}/{sample}",
                token_ids=tokens.astype(np.int32),
                sampling=Sampling(
                    max_tokens=line.max_tokens,
                    temperature=line.temperature,
                    top_p=line.top_p,
                    top_k=line.top_k,
                    seed=line.seed if line.n == 1 else derive_seed(line.seed, number, sample),
                    stop_token_ids=chat.stop_token_ids if chat else (),
                ),
                group=str(number),
            )


def _opened(line: InputLine, chat: ChatFormat | None, where: str) -> Any:
    """Return the tokens of a line that is given as text or as a prompt."""
    assert chat is not None
    if line.prompt is None:
        return chat.encode(line.text or "")
    messages = [{"role": "user", "content": line.prompt}] if isinstance(line.prompt, str) else line.prompt
    try:
        return chat.open(messages)
    except ModelError as error:
        raise DataError(f"{where}: {error}") from error


def _answers(path: Path, weights: str, requests: list[Request], slots: int, threads: int) -> list[list[Delta]]:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from headrace.config import EngineConfig
    from headrace.config.memory import longest_sequence
    from headrace.engines.embedded.core import EngineCore
    from headrace.models.attention import check_model
    from headrace.models.loading import choose_device, load_model

    if threads:
        torch.set_num_threads(threads)
    model = load_model(path, weights=weights, device=choose_device("auto", "engine"))
    longest = longest_sequence(0, getattr(model.config, "max_position_embeddings", 0))
    check_model(model, longest)
    core = EngineCore(model, EngineConfig(slots=slots), name="engine-0", max_length=longest, version=0)
    core.submit(requests)
    answers: dict[str, list[Delta]] = {request.id: [] for request in requests}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("generating", total=len(requests))
        while core.has_work:
            for delta in core.step():
                answers[delta.id].append(delta)
                progress.advance(bar, delta.finish is not None)
    return list(answers.values())


def _record(request: Request, deltas: list[Delta], chat: ChatFormat | None) -> dict[str, Any]:
    number, sample = request.id.split("/")
    tokens = [int(token) for delta in deltas for token in delta.token_ids]
    record: dict[str, Any] = {
        "line": int(number),
        "sample": int(sample),
        "token_ids": tokens,
        "logprobs": [float(logprob) for delta in deltas for logprob in delta.logprobs],
        "versions": [int(version) for delta in deltas for version in delta.versions],
        "finish_reason": deltas[-1].finish,
    }
    if deltas[-1].error:
        record["error"] = deltas[-1].error
    if chat is not None:
        record["text"] = chat.decode(tokens)
    return record


def _measuring(name: str, kind: type[Bench]) -> Callable[..., None]:
    def command(as_json: bool, **given: Any) -> None:
        options = kind(**given)
        # Checked before torch is loaded, so that a mistake is reported at once.
        options.check()
        measure = getattr(import_module(f"headrace.bench.{name}"), f"bench_{name}")
        found = measure(options, lambda line: typer.echo(line, err=True))
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))

    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name], default=_default(field)
        )
        for field in msgspec.structs.fields(kind)
    ]
    parameters.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, annotation=AsJson, default=False))
    command.__doc__ = kind.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return inspect.Parameter.empty
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


app = typer.Typer(
    help="Asynchronous RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from headrace import __version__

        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None: ...


app.command()(train)
app.command()(resume)
app.command()(scale)
app.command()(check)
app.command()(launch.launch)
app.command()(gateway)
app.command()(generate)
benches = typer.Typer(help="Measure, side by side, in one call.", no_args_is_help=True)
for name, kind in BENCHES.items():
    benches.command(name)(_measuring(name, kind))
app.add_typer(benches, name="bench")
app.command()(review.report)
app.command()(review.ledger)
app.command()(review.rollouts)
app.command()(review.audit)
app.command()(review.replay)
app.command()(review.stall)
app.command()(review.export)
app.command()(review.convert)
app.command()(doctor.doctor)
app.command()(examples.examples)


def main() -> None:
    """Run the program. Headrace's own errors become one line."""
    try:
        app()
    except UserError as error:
        _end(_line(error), 2)
    except PeerDied as death:
        _end(_line(death) + "".join(f"\n  | {one_line(line)}" for line in death.last_lines.splitlines()), 1)
    except HeadraceError as error:
        _end(_line(error), 1)
    except KeyboardInterrupt:
        _end("headrace: interrupted", 130)


def _line(error: HeadraceError) -> str:
    return one_line(f"headrace: {error}", LINE_LENGTH)


def _end(text: str, code: int) -> None:
    sys.stderr.write(text + "\n")
    sys.exit(code)
