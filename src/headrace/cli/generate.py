"""`headrace generate`: answers a file of prompts with the embedded engine, and writes what training would record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headrace.errors import DataError, UserError

if TYPE_CHECKING:
    from headrace.engines.base import Delta, Request
    from headrace.tasks.chat import ChatFormat


class InputLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of the input."""

    token_ids: list[int] | None = None
    text: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    n: Annotated[int, msgspec.Meta(ge=1)] = 1


def generate(
    model_dir: Annotated[str, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face directory.")],
    input_: Annotated[str, typer.Option("--input", help="JSON lines: token_ids or text, max_tokens, temperature, ...")],
    output: Annotated[str, typer.Option("--output", help="JSON lines: token_ids, logprobs, versions, finish_reason.")],
    slots: Annotated[int, typer.Option(help="Sequences that decode together.", min=1)] = 64,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 takes torch's default.", min=0)] = 0,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Use the config alone.")] = False,
) -> None:
    """Continue every prompt of a file. Each answer is one line, in the order of the input."""
    from headrace.config.model_dir import check_model_dir
    from headrace.tasks.chat import ChatFormat

    weights = "random" if random_weights else "load"
    check_model_dir(Path(model_dir), weights)
    chat = ChatFormat.load(model_dir) if (Path(model_dir) / "tokenizer.json").is_file() else None
    requests = list(_requests(Path(input_), chat))
    try:
        with Path(output).open("w") as out:
            answers = _answers(model_dir, weights, requests, slots, threads)
            for request, answer in zip(requests, answers, strict=True):
                out.write(json.dumps(_record(request, answer, chat)) + "\n")
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from error


def _requests(path: Path, chat: ChatFormat | None) -> Iterator[Request]:
    import numpy as np

    from headrace.engines.base import Request, Sampling
    from headrace.rollouts.base import derive_seed

    if not path.is_file():
        raise DataError(f"--input {path}: there is no such file")
    lines = path.read_text().splitlines()
    if not lines:
        raise DataError(f"--input {path} is empty")
    for number, text in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            line = msgspec.json.decode(text.encode(), type=InputLine)
        except msgspec.DecodeError as error:
            raise DataError(f"{where}: {error}") from error
        if (line.token_ids is None) == (line.text is None):
            raise DataError(f'{where}: give either "token_ids" or "text"')
        if line.text is not None and chat is None:
            raise DataError(f'{where}: the model has no tokenizer.json, so "token_ids" is needed')
        tokens = np.array(line.token_ids if line.token_ids is not None else chat and chat.encode(line.text or ""))
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


def _answers(model_dir: str, weights: str, requests: list[Request], slots: int, threads: int) -> list[list[Delta]]:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from headrace.config import EngineConfig
    from headrace.engines.embedded.building import longest_sequence
    from headrace.engines.embedded.core import EngineCore
    from headrace.engines.embedded.setup import choose_device
    from headrace.models.loading import load_model
    from headrace.models.selfcheck import check_model

    if threads:
        torch.set_num_threads(threads)
    model = load_model(model_dir, weights=weights, device=choose_device("auto"))
    longest = longest_sequence(0, model)
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
