"""A vLLM server of ours: started with the interpreter of vLLM's environment, on loopback, with a key of the run.

It says how far it has come while it starts, dies with the process that started it, and leaves its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.config.model_dir import model_facts
from headrace.config.schema import EngineConfig
from headrace.engines.vllm.checks import EXTENSION, KEY_VARIABLE, NOISE, TRANSFER, check_interpreter
from headrace.engines.vllm.http import Http
from headrace.errors import ChannelError, DeadlineError, UserError
from headrace_vllm_plugin import ORPHANS

HOST = "127.0.0.1"
MODEL_NAME = "policy"
POLL_SECONDS = 0.25
STOP_SECONDS = 5.0
"""Less than a run gives its processes to end."""
PORT_SECONDS = 3.0
CPU_BLOCK = 32
"""vLLM's attention on a CPU takes multiples of this many tokens in a block."""
PR_SET_PDEATHSIG = 1
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
UNBOUND = "nobind"
SPLIT = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Whether a single worker has a process of its own on a CPU; the HTTP front and the scheduler are apart either way."""

_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\] )?")
_ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception|Exit)\b.*: \S|error: \S|^Value error, \S")
_FATAL = b"EngineCore encountered a fatal error"
_EMPTY = re.compile(r"See root cause above|\d+ validation errors? for")
"""Errors that only say that there are others."""
_STAGES = (
    ("Application startup complete", "ready"),
    ("Started server process", "opening"),
    ("Warming up model", "compiling"),
    ("Capturing", "capturing"),
    ("torch.compile", "compiling"),
    ("KV cache", "making the cache"),
    ("Loading weights took", "loaded"),
    ("Starting to load model", "loading"),
)


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """Everything a server is started from."""

    model: Path
    config: EngineConfig
    log: Path
    key: str
    max_length: int
    weights: str = "load"
    dtype: str = "float32"
    seed: int = 0
    rank: int = 0


class VllmServer:
    """One process (and those that it starts). `start`, then `ready`; `stop` ends all of them."""

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._python = check_interpreter(plan.config.python)
        # A server that this one replaces may be in its last moments.
        self.port = choose_port(plan.config.port + plan.rank if plan.config.port else 0, PORT_SECONDS)
        self.url = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; its output goes to the log."""
        plan = self._plan
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        if plan.log.is_file():  # Of the server that this one replaces.
            plan.log.replace(plan.log.with_suffix(".before.log"))
        with plan.log.open("wb") as output:
            self._process = subprocess.Popen(
                arguments(plan, str(self._python), self.port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(plan),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    async def ready(self, deadline: float, progress: Callable[[str], None] = lambda stage: None) -> None:
        """Wait until it answers; raises `UserError` with its own last word if it dies before."""
        http = Http(self.url)
        try:
            await self._answering(http, deadline, progress)
        finally:
            await http.close()

    async def _answering(self, http: Http, deadline: float, progress: Callable[[str], None]) -> None:
        began = time.monotonic()
        while True:
            progress(f"vLLM {_stage(self._plan.log)}")
            self.check()
            with contextlib.suppress(ChannelError):
                await http.call("GET", "/health", timeout=5.0)
                return
            if time.monotonic() - began > deadline:
                raise DeadlineError(
                    f"vLLM was not ready within {deadline:g} s: {_stage(self._plan.log)} ({self._plan.log})"
                )
            await asyncio.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise `UserError` if the process has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            # Who is killed like this says nothing: errors in its log are of other things.
            why = "" if code == -signal.SIGKILL else f": {last_word(self._plan.log)}"
            raise UserError(f"the vLLM server ended ({how}){why} ({self._plan.log})")

    @property
    def pid(self) -> int:
        """Of the server's first process, which leads its group."""
        assert self._process is not None
        return self._process.pid

    async def stop(self) -> None:
        """End the process and all that it started. Idempotent."""
        if self._process is None:
            return
        _signal(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        # Whatever the first process left behind, too.
        _signal(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait, STOP_SECONDS)


def arguments(plan: ServerPlan, python: str, port: int) -> list[str]:
    """The command line of a server."""
    config = plan.config
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.model.absolute())]
    command += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port), "--seed", str(plan.seed)]
    command += ["--dtype", plan.dtype, "--skip-tokenizer-init", "--max-model-len", str(plan.max_length)]
    command += ["--max-num-seqs", str(config.slots), "--enable-scale-out", "--enable-prompt-tokens-details"]
    command += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", TRANSFER]
    command += ["--worker-extension-cls", EXTENSION, "--middleware", "headrace_vllm_plugin.guard.Guard"]
    command += ["--disable-uvicorn-access-log"]
    if plan.weights == "random":
        command += ["--load-format", "dummy"]
    if on_cpu(config):
        # vLLM's second model runner, which needs a GPU, has such noise by itself and takes no processors of this kind.
        command += ["--logits-processors", NOISE, "--block-size", str(-(-config.block_size // CPU_BLOCK) * CPU_BLOCK)]
    if on_cpu(config) or config.cache_tokens:
        command += ["--kv-cache-memory-bytes", str(cache_bytes(plan))]
    if config.prefill_chunk:
        command += ["--max-num-batched-tokens", str(max(config.prefill_chunk, config.slots))]
    return [*command, *config.arguments]


def on_cpu(config: EngineConfig) -> bool:
    """Whether vLLM will compute on a CPU here; `auto` looks for an NVIDIA driver, because torch is not loaded."""
    return config.device == "cpu" or (config.device == "auto" and not Path("/proc/driver/nvidia/version").is_file())


def cache_bytes(plan: ServerPlan) -> int:
    """What the KV cache takes: the configured tokens, or `slots` sequences of the longest length."""
    config = plan.config
    tokens = config.cache_tokens or config.slots * plan.max_length
    block = -(-config.block_size // CPU_BLOCK) * CPU_BLOCK
    # A block more for each sequence, which rarely ends where a block does.
    width = {"float32": 4}.get(plan.dtype, 2)
    per_token = model_facts(plan.model, plan.weights).kv_bytes_per_token * width // 4
    return (tokens + block * (config.slots + 1)) * per_token


def environment(plan: ServerPlan) -> dict[str, str]:
    """The environment of a server: the key is here and not on the command line, which every user can read."""
    ours = {
        KEY_VARIABLE: plan.key,
        ORPHANS: "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    # What this interpreter was told about its own packages is not for another environment's.
    theirs = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if on_cpu(plan.config):
        ours["OMP_NUM_THREADS"] = str(plan.config.threads)
        # By itself it would bind every server of a fleet to the same cores, and take as many threads as there are.
        ours[BINDING] = os.environ.get(BINDING, UNBOUND)
        if ours[BINDING] == UNBOUND:
            # A worker's own process serves to bind it. Without, it is one process less to start and to talk to.
            ours[SPLIT] = os.environ.get(SPLIT, "0")
    return {**theirs, **ours}


def choose_port(wanted: int = 0, patience: float = 0.0) -> int:
    """A free port of loopback; the wanted one, or a one-line error that it is taken, after `patience` seconds."""
    began = time.monotonic()
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, wanted))
                return int(probe.getsockname()[1])
            except OSError as error:
                if time.monotonic() - began >= patience:
                    raise UserError(
                        f"[engine] port: {wanted} on {HOST} is taken ({error.strerror}); 0 takes free ones"
                    ) from error
        time.sleep(POLL_SECONDS)


def last_word(log: Path) -> str:
    """The line of a log that says why its process ended: the first error of the last traceback, else the last line."""
    lines = [_PREFIX.sub("", line).strip() for line in (_fatal(log) or _tail(log)).splitlines()]
    errors = [line for line in lines if _ERROR.search(line) and not _EMPTY.search(line)]
    word = errors[0] if errors else next((line for line in reversed(lines) if line), "it left no word")
    return word[:400]


def _stage(log: Path) -> str:
    text = _tail(log)
    found = [(text.rfind(mark), stage) for mark, stage in _STAGES]
    return max(found)[1] if max(found)[0] >= 0 else "starting"


def _tail(log: Path, size: int = 1 << 16) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - size))
        return stream.read().decode(errors="replace")


def _fatal(log: Path, size: int = 1 << 16) -> str:
    """What follows the engine's own end: every request that ended with it has left its traceback after that."""
    if not log.is_file() or not log.stat().st_size:
        return ""
    with log.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        found = text.rfind(_FATAL)
        return text[found : found + size].decode(errors="replace") if found >= 0 else ""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
