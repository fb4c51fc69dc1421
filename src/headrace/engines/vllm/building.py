"""Builds the engine of a worker process that drives one vLLM server, and checks that the server fits the run.

The vLLM server is a process that is started here (`VllmServer`) and ends with this process, or a server that runs
already at one of `[engine] urls`. An `EventLoopServer` answers the controller's messages in this process. Torch is not
imported.

`examine` checks a server before the first request. Each missing requirement is one line that names the flag to set. A
server that passes these checks answers with correct log-probabilities and versions, and takes the run's weights.
"""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

from headrace.channel.worker_link import WorkerLink
from headrace.config import Config
from headrace.config.declared import transport_facts
from headrace.config.hub import model_dir
from headrace.config.memory import longest_sequence
from headrace.config.model_dir import model_facts
from headrace.config.schema import AgentTaskConfig, RolloutsConfig
from headrace.delivery.setup import choose
from headrace.delivery.transports.tcp_wire import KEYS
from headrace.engines.serving import EventLoopServer, Opened
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.memory import budget
from headrace.engines.vllm.sampling import KEPT_HINT
from headrace.engines.vllm.server import (
    EXTENSION,
    KEY_VARIABLE,
    NOISE,
    TRANSFER,
    VllmServer,
    check_server,
    on_cpu,
    until_there,
)
from headrace.errors import ChannelError, HttpError, UserError
from headrace_vllm_plugin.wire import BACKEND, PROTOCOL, Facts

OLDEST = (0, 32)
"""The first version of vLLM that has token-in/token-out, spans of weight versions and pluggable weight transfer."""


def serve(link: WorkerLink, config: Config, gpu_memory: int = 0) -> None:
    """Start this rank's vLLM server or attach to it, and serve it until the controller sends `Stop`.

    `gpu_memory` is the memory of each of its GPUs in bytes; 0 if it has none, or the memory is not known.
    """
    EventLoopServer(link, lambda: _opened(link, config, gpu_memory)).run()


@asynccontextmanager
async def _opened(link: WorkerLink, config: Config, gpu_memory: int) -> AsyncIterator[Opened]:
    rank = int(link.name.rpartition("-")[2])  # The name of a worker process ends in its rank: engine-0.
    model = model_facts(model_dir(config.model), config.model.weights)
    max_length = longest_sequence(config.engine.max_length, model.max_positions)
    server: VllmServer | None = None
    try:
        if config.engine.urls:
            check_hosts(config.engine.urls, choose(config.delivery).transport)
            url, key = config.engine.urls[rank], os.environ.get(KEY_VARIABLE, "")
        else:
            key = secrets.token_urlsafe(32)
            server = VllmServer(
                model=model_dir(config.model),
                config=config.engine,
                log=link.run_dir / "logs" / f"vllm-{rank}.log",
                key=key,
                max_length=max_length,
                weights=config.model.weights,
                dtype=config.model.dtype,
                seed=config.run.seed,
                rank=rank,
                record_kept=config.rollouts.truncates,
                record_experts=records_experts(config, model.experts) and not on_cpu(config.engine),
                budget=None if on_cpu(config.engine) else budget(config, gpu_memory, link.neighbours),
            )
            with link.spans.span("load"):
                server.start()
                await server.ready(config.pipeline.start_seconds, lambda stage: setattr(link, "phase", stage))
            url = server.url
        deadline, slots = config.pipeline.stall_seconds, config.engine.slots
        async with VllmClient(url, key, deadline=deadline, slots=slots) as client:
            if server is None:
                link.phase = f"waiting for {url}"
                # If the run has begun before, the server was there once, so wait for it to come back. If the run is
                # new, a missing server is a mistake.
                begun = (link.run_dir / "journal.db").is_file()
                await until_there(client, config.pipeline.start_seconds if begun else 0.0)
            link.phase = "examining vLLM"
            facts = await examine(client, vocabulary=model.vocabulary, dtype=config.model.dtype, max_length=max_length)
            if reason := truncation_refusal(config.rollouts, facts):
                raise UserError(f"{url}: {reason}")
            engine = VllmEngine(
                client,
                facts,
                name=link.name,
                slots=slots,
                max_length=max_length,
                interrupt=config.engine.interrupt,
                deadline=config.delivery.deadline,
                keys=str((link.run_dir / KEYS).absolute()),
                spans=link.spans,
                scaling=None if config.lora is None else config.lora.scaling,
                record_experts=records_experts(config, model.experts),
            )
            link.ready(parameters=model.parameters, **described(facts))
            yield Opened(engine, partial(check_server, client, None if server is None else server.check))
    finally:
        if server is not None:
            await server.stop()


def records_experts(config: Config, experts: int) -> bool:
    """Return whether a run wants the experts of every token. The tokens of agents are recorded without them."""
    return bool(experts) and config.rollouts.keep_routing and not isinstance(config.task, AgentTaskConfig)


def described(facts: Facts) -> dict[str, str | int]:
    """Return what the record of a run says about a server."""
    found: dict[str, str | int] = {"vllm": facts.vllm, "device": facts.device, "workers": facts.workers}
    if facts.quantization:
        found["quantization"] = facts.quantization
    if facts.cache_dtype != "auto":
        found["cache_dtype"] = facts.cache_dtype
    return found


async def examine(client: VllmClient, *, vocabulary: int, dtype: str, max_length: int) -> Facts:
    """Return the server's facts if it can serve a run. Raises `UserError` with one line otherwise."""
    facts = await _hello(client)
    url = client.url
    for reason in refusals(facts, vocabulary=vocabulary, dtype=dtype, max_length=max_length):
        raise UserError(f"{url}: {reason}")
    # An engine process that died in the middle of a swap leaves its server paused.
    await client.resume()
    await _check_tokens(client)
    return facts


def refusals(facts: Facts, *, vocabulary: int, dtype: str, max_length: int) -> list[str]:
    """Return the reasons why a server with these facts cannot serve a run, the most useful one first."""
    found = []
    if facts.protocol != PROTOCOL:
        found.append(f"its Headrace plugin speaks protocol {facts.protocol}, not {PROTOCOL}: install the same Headrace")
    if _version(facts.vllm) < OLDEST:
        found.append(f"vLLM {facts.vllm} is too old: {'.'.join(map(str, OLDEST))} or newer is needed")
    if facts.vocabulary != vocabulary:
        found.append(
            f"it serves another model than [model] path: {facts.model} has a vocabulary of {facts.vocabulary}, "
            f"not {vocabulary}"
        )
    if facts.dtype != dtype:
        found.append(f"it serves in {facts.dtype}, not in [model] dtype: start it with --dtype {dtype}")
    if facts.quantized_checkpoint:
        found.append(
            f"the files of its model hold weights that are quantised already ({facts.quantization}), and a trainer "
            "publishes plain ones: serve a directory of plain weights, which --quantization lets the server quantise"
        )
    if facts.logprobs_mode.split(".")[-1].lower() != "processed_logprobs":
        found.append(
            f"its log-probabilities are {facts.logprobs_mode.split('.')[-1].lower()}, not of the distribution that "
            "tokens are drawn from: start it with --logprobs-mode processed_logprobs"
        )
    if facts.backend != BACKEND:
        found.append(
            f"it takes no weights from Headrace (weight transfer: {facts.backend or 'none'}): "
            f"start it with --weight-transfer-config '{TRANSFER}'"
        )
    if not facts.position_noise:
        found.append(
            "its noise depends on where an answer was interrupted: start it with "
            f"--logits-processors {NOISE}, or with vLLM's second model runner"
        )
    if facts.max_length < max_length:
        found.append(f"its sequences end at {facts.max_length}: start it with --max-model-len {max_length}")
    return found


def truncation_refusal(rollouts: RolloutsConfig, facts: Facts) -> str:
    """Return why a server with these facts cannot draw the answers of a run, or an empty string if it can."""
    if not rollouts.truncates:
        return ""
    if not facts.kept:
        return f"[rollouts] top_k, top_p, min_p: it cannot say which tokens truncation kept ({KEPT_HINT})"
    if rollouts.min_p > 0 and rollouts.top_p < 1:
        return "[rollouts] min_p together with top_p: vLLM's second model runner applies them in another order"
    return ""


def check_hosts(urls: list[str], transport: str) -> None:
    """Raise `UserError` if one of these servers is on another host that the transport does not reach."""
    far = [url for url in urls if (urlsplit(url).hostname or "") not in ("localhost", "127.0.0.1", "::1")]
    if far and not transport_facts(transport).crosses_hosts:
        raise UserError(
            f'[delivery] transport: {far[0]} is on another host, which "{transport}" does not reach: '
            'set "tcp" with [delivery] bind, or "file" with a shared [delivery] directory'
        )


async def _hello(client: VllmClient) -> Facts:
    url = client.url
    try:
        # Workers of one server differ in nothing but the slices of the weights that they hold.
        return (await client.rpc("headrace_hello", Facts))[0]
    except HttpError as error:
        if error.status in (401, 403):
            raise _wrong_key(url) from error
        if error.status == 404:
            raise UserError(
                f"{url}: it cannot be controlled (no /collective_rpc): start vLLM with VLLM_SERVER_DEV_MODE=1 in its "
                "environment"
            ) from error
        if "headrace_hello" in error.reason:
            raise UserError(
                f"{url}: it runs without Headrace's plugin: start it with --worker-extension-cls {EXTENSION}"
            ) from error
        raise UserError(f"{url}: it cannot be asked what it is: {error.reason}") from error
    except ChannelError as error:
        raise UserError(str(error)) from error


async def _check_tokens(client: VllmClient) -> None:
    """Generate one token as a run does. The endpoint must exist, and must say which weights drew the token."""
    url = client.url
    params = {"max_tokens": 1, "top_k": 1, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    try:
        pieces = [piece async for piece in client.generate("headrace-check", [0], params, salt="headrace-check")]
    except HttpError as error:
        if error.status == 401:
            raise _wrong_key(url) from error
        if error.status in (403, 404):
            raise UserError(
                f"{url}: it has no token-in/token-out endpoint: start it with --enable-scale-out"
            ) from error
        raise UserError(f"{url}: it does not generate: {error.reason}") from error
    if not pieces or not pieces[-1].spans:
        raise UserError(f"{url}: it does not say which weights drew a token: vLLM 0.32 or newer is needed")


def _wrong_key(url: str) -> UserError:
    return UserError(f"{url}: it does not take our key: put its --api-key into {KEY_VARIABLE}")


def _version(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:2] if part.isdigit())
