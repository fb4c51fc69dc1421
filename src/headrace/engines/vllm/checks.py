"""Checks a vLLM server before the first request. Each missing requirement is one line that names the flag to set.

A server that passes these checks answers with correct log-probabilities and versions, and takes the run's weights.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from headrace.config.declared import transport_facts
from headrace.engines.vllm.client import VllmClient
from headrace.errors import ChannelError, HttpError, UserError
from headrace_vllm_plugin.wire import BACKEND, PROTOCOL, Facts

EXTENSION = "headrace_vllm_plugin.worker.HeadraceWorker"
TRANSFER = '{"backend": "headrace"}'
NOISE = "headrace_vllm_plugin.noise:PositionNoise"
KEY_VARIABLE = "VLLM_API_KEY"
OLDEST = (0, 32)
"""The first version of vLLM that has token-in/token-out, spans of weight versions and pluggable weight transfer."""


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


def check_hosts(urls: list[str], transport: str) -> None:
    """Raise `UserError` if one of these servers is on another host that the transport does not reach."""
    far = [url for url in urls if (urlsplit(url).hostname or "") not in ("localhost", "127.0.0.1", "::1")]
    if far and not transport_facts(transport).crosses_hosts:
        raise UserError(
            f'[delivery] transport: {far[0]} is on another host, which "{transport}" does not reach: '
            'set "tcp" with [delivery] bind, or "file" with a shared [delivery] directory'
        )


def check_interpreter(python: str) -> Path:
    """Return the path of the interpreter of the vLLM environment. Raises `UserError` if it is not there."""
    if not python:
        raise UserError(
            '[engine] python: engine kind "vllm" needs the interpreter of an environment with vLLM '
            "(`make vllm` creates .venv-vllm/bin/python), or [engine] urls"
        )
    path = Path(python).expanduser()
    if not path.is_file():
        raise UserError(f"[engine] python: {path} is not there (`make vllm` creates .venv-vllm/bin/python)")
    # Links are not resolved, because the link to an interpreter decides which environment it uses.
    return path.absolute()


async def _hello(client: VllmClient) -> Facts:
    url = client.url
    try:
        return (await client.hello())[0]
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
    """Generate one token through the endpoint that a run uses.

    This checks that the endpoint exists, and that its answer says which weights drew the token.
    """
    url = client.url
    params = {"max_tokens": 1, "logprobs": 0, "detokenize": False, "ignore_eos": True}
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
