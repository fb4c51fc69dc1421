"""Starts a vLLM server with the interpreter of vLLM's environment, on loopback, with a key of the run, and watches it.

The server's progress is reported while it starts. The server ends with the process that started it, and its log stays.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.channel.worker_side import die_with_parent
from headrace.config.memory import runs_on_gpu
from headrace.config.model_dir import model_facts
from headrace.config.schema import EngineConfig
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.memory import Budget
from headrace.errors import ChannelError, DeadlineError, HttpError, PeerDied, UserError
from headrace_vllm_plugin import ORPHANS

EXTENSION = "headrace_vllm_plugin.worker.HeadraceWorker"
TRANSFER = '{"backend": "headrace"}'
NOISE = "headrace_vllm_plugin.noise:PositionNoise"
KEPT = "--return-sampling-mask"
EXPERTS = "--enable-return-routed-experts"
KEY_VARIABLE = "VLLM_API_KEY"
HOST = "127.0.0.1"
MODEL_NAME = "policy"
TOKENS_PER_MESSAGE = 16
"""The tokens of an answer that a server on a GPU sends at a time. The first and the last ones are sent at once."""
POLL_SECONDS = 0.25
STOP_SECONDS = 5.0
"""How long a server may take to end. It is less than a run gives its processes to end."""
PORT_SECONDS = 3.0
WATCH_SECONDS = 1.0
AGAIN_SECONDS = 0.3
"""The time between two checks, which must both fail before a server counts as lost."""
ANSWER_SECONDS = 5.0
ENDING_SECONDS = 5.0
"""How long to wait for the process of a broken server to end, because its end tells the reason."""
CPU_BLOCK = 32
"""On a CPU, the number of tokens in a block of vLLM's cache must be a multiple of this."""
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
UNBOUND = "nobind"
SPLIT = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""The variable that says whether a single worker on a CPU has its own process. The HTTP server and the scheduler are
separate processes in any case."""

_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\] )?")
_WARNING = re.compile(r"^(\(\w+ pid=\d+\) )?(DEBUG|INFO|WARNING) ")
"""Such lines may hold the traceback of a harmless error, such as an optional library that is not installed."""
_ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception|Exit)\b.*: \S|error: \S|^Value error, \S")
_FATAL = b"EngineCore encountered a fatal error"
_EMPTY = re.compile(r"See root cause above|\d+ validation errors? for")
"""Errors that only refer to other errors."""
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


@dataclass(kw_only=True)
class VllmServer:
    """One server process and the processes that it starts. Call `start`, then `ready`. `stop` ends all of them."""

    model: Path
    config: EngineConfig
    log: Path
    key: str
    max_length: int
    weights: str = "load"
    dtype: str = "float32"
    seed: int = 0
    rank: int = 0
    record_kept: bool = False
    """Whether the server must say which tokens truncation kept."""
    record_experts: bool = False
    """Whether the server must say which experts produced each token."""
    budget: Budget | None = None
    """The GPU memory of the server; None leaves it to vLLM."""
    url: str = field(default="", init=False)
    """The URL of the server, after `start`."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process. Its output goes to the log."""
        python = check_interpreter(self.config.python)
        # The previous server may still be ending, so wait a little for its port.
        port = choose_port(self.config.port + self.rank if self.config.port else 0, PORT_SECONDS)
        self.url = f"http://{HOST}:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.is_file():  # The log of the previous server.
            self.log.replace(self.log.with_suffix(".before.log"))
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self.arguments(str(python), port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    async def ready(self, deadline: float, progress: Callable[[str], None] = lambda stage: None) -> None:
        """Wait until the server answers. Raises `UserError` with the server's own error if it dies before.

        Raises `DeadlineError` after `deadline` seconds.
        """
        began = time.monotonic()
        async with VllmClient(self.url) as client:
            while True:
                progress(f"vLLM {_stage(self.log)}")
                self.check()
                with contextlib.suppress(ChannelError):
                    await client.call("GET", "/health", timeout=5.0)
                    return
                if time.monotonic() - began > deadline:
                    raise DeadlineError(f"vLLM was not ready within {deadline:g} s: {_stage(self.log)} ({self.log})")
                await asyncio.sleep(POLL_SECONDS)

    def arguments(self, python: str, port: int) -> list[str]:
        """Return the command line of a server."""
        config = self.config
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model.absolute())]
        command += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port), "--seed", str(self.seed)]
        command += ["--runner", "generate", "--dtype", self.dtype, "--skip-tokenizer-init"]
        command += ["--max-model-len", str(self.max_length)]
        command += ["--max-num-seqs", str(config.slots), "--enable-scale-out", "--enable-prompt-tokens-details"]
        command += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", TRANSFER]
        command += ["--worker-extension-cls", EXTENSION, "--middleware", "headrace_vllm_plugin.guard.Guard"]
        command += ["--disable-uvicorn-access-log"]
        if self.weights == "random":
            command += ["--load-format", "dummy"]
        if on_cpu(config):
            # On a CPU, vLLM has only the older of its two implementations of the model runner. There this processor
            # makes the random numbers of a token depend on its position alone. The newer one, for GPUs, does so itself.
            command += ["--logits-processors", NOISE, "--block-size", str(self._block())]
        else:
            # With a message for each token, client and server would be busier with messages than the GPU with tokens.
            command += ["--stream-interval", str(TOKENS_PER_MESSAGE)]
        if self.record_kept:
            command += [KEPT]
        if self.record_experts:
            command += [EXPERTS]
        if config.gpus_per_engine > 1:
            command += ["--tensor-parallel-size", str(config.gpus_per_engine)]
        if self.budget is not None:
            command += ["--gpu-memory-utilization", f"{self.budget.share:.4f}"]
        if self.budget is not None and self.budget.cache_bytes:
            command += ["--kv-cache-memory-bytes", str(self.budget.cache_bytes)]
        elif on_cpu(config) or config.cache_tokens:
            command += ["--kv-cache-memory-bytes", str(self._cache_bytes())]
        if config.prefill_chunk:
            command += ["--max-num-batched-tokens", str(max(config.prefill_chunk, config.slots))]
        return [*command, *config.arguments]

    def environment(self) -> dict[str, str]:
        """Return the environment of a server. The key is in it, not on the command line, which every user can read."""
        ours = {
            KEY_VARIABLE: self.key,
            ORPHANS: "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # FlashInfer would draw with a generator of its own, so a request's seed would not decide its tokens.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        # The package paths of this interpreter must not reach the interpreter of another environment.
        theirs = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        if on_cpu(self.config):
            ours["OMP_NUM_THREADS"] = str(self.config.threads)
            # By default, vLLM would bind every server of a fleet to the same cores and use all of them.
            ours[BINDING] = os.environ.get(BINDING, UNBOUND)
            if ours[BINDING] == UNBOUND and self.config.gpus_per_engine == 1:
                # A worker needs its own process only to be bound to cores. Without it, one process less is started.
                ours[SPLIT] = os.environ.get(SPLIT, "0")
        return {**theirs, **ours}

    def _cache_bytes(self) -> int:
        """Return the bytes of the KV cache: of the configured tokens, or of `slots` sequences of the longest length."""
        config = self.config
        tokens = config.cache_tokens or config.slots * self.max_length
        # One more block for each sequence, because a sequence rarely ends at the end of a block.
        width = {"float32": 4}.get(self.dtype, 2)
        per_token = model_facts(self.model, self.weights).kv_bytes_per_token * width // 4
        return (tokens + self._block() * (config.slots + 1)) * per_token

    def _block(self) -> int:
        return -(-self.config.block_size // CPU_BLOCK) * CPU_BLOCK

    def check(self) -> None:
        """Raise `UserError` if the process has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            # A process that is killed by SIGKILL writes no reason. Errors in its log have other causes.
            why = "" if code == -signal.SIGKILL else f": {last_word(self.log)}"
            raise UserError(f"the vLLM server ended ({how}){why} ({self.log})")

    @property
    def pid(self) -> int:
        """The process id of the server's first process, which leads its process group."""
        assert self._process is not None
        return self._process.pid

    async def stop(self) -> None:
        """End the process and all processes that it started. Idempotent."""
        if self._process is None:
            return
        _signal(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        # Also end the processes that the first process left behind.
        _signal(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait, STOP_SECONDS)


async def check_server(client: VllmClient, check_process: Callable[[], None] | None = None) -> None:
    """Raise `PeerDied` if the server of an engine is lost. The engine is then lost too.

    A server is lost if its process has ended, or if it twice in a row refuses connections or reports that it is broken.
    A server that is only slow to answer is not lost: its progress is checked by the deadlines for tokens.
    `check_process`, given for a server that this process started, raises `UserError` if the server has ended.
    """
    try:
        if check_process is not None:
            check_process()
        if not await _trouble(client, may_be_slow=True):
            return
        await asyncio.sleep(AGAIN_SECONDS)
        if not (trouble := await _trouble(client, may_be_slow=True)):
            return
        deadline = time.monotonic() + ENDING_SECONDS
        while check_process is not None and time.monotonic() < deadline:
            check_process()
            await asyncio.sleep(AGAIN_SECONDS)
    except UserError as error:
        raise PeerDied("vLLM", str(error)) from error
    raise PeerDied("vLLM", trouble)


async def until_there(client: VllmClient, deadline: float) -> None:
    """Wait for a server that somebody else starts or restarts. Raises `UserError` if it is not there in time."""
    began = time.monotonic()
    while trouble := await _trouble(client, may_be_slow=False):
        if time.monotonic() - began > deadline:
            raise UserError(f"{trouble} (waited for {deadline:g} s)" if deadline else trouble)
        await asyncio.sleep(WATCH_SECONDS)


async def _trouble(client: VllmClient, *, may_be_slow: bool) -> str:
    """Return the sign that a server is lost, or an empty string."""
    try:
        await client.call("GET", "/health", timeout=ANSWER_SECONDS)
    except DeadlineError as error:
        return "" if may_be_slow else str(error)
    except HttpError as error:
        return str(error) if error.status >= 500 else ""
    except ChannelError as error:
        return str(error)
    return ""


def on_cpu(config: EngineConfig) -> bool:
    """Return whether vLLM will compute on a CPU. `auto` looks for an NVIDIA driver, because torch is not loaded."""
    return not runs_on_gpu(config.device)


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


def choose_port(wanted: int = 0, patience: float = 0.0) -> int:
    """Return a free port on loopback (`wanted` = 0) or the wanted port.

    Raises `UserError` if the port is still taken after `patience` seconds.
    """
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
    """Return the line of a log that says why its process ended: the first error of its end, else the last line."""
    lines = _end_of(log).splitlines()
    failures = [_PREFIX.sub("", line).strip() for line in lines if not _WARNING.match(line)]
    errors = [line for line in failures if _ERROR.search(line) and not _EMPTY.search(line)]
    word = errors[0] if errors else next((line for line in reversed(lines) if line.strip()), "it left no word")
    return _PREFIX.sub("", word).strip()[:400]


def _stage(log: Path) -> str:
    text = _end_of(log)
    found = [(text.rfind(mark), stage) for mark, stage in _STAGES]
    return max(found)[1] if max(found)[0] >= 0 else "starting"


def _end_of(log: Path, size: int = 1 << 16) -> str:
    """Return the last part of a log or, if the engine had a fatal error, the log from that error on.

    Later tracebacks are of requests that ended with the engine, and there may be too many of them for the last part.
    """
    text = log.read_bytes() if log.is_file() else b""
    found = text.rfind(_FATAL)
    start = found if found >= 0 else max(0, len(text) - size)
    return text[start : start + size].decode(errors="replace")


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
