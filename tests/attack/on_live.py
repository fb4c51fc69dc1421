"""Attacks on a live run: requests to its gateway, and frames to its hub. The run must go on undisturbed."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlparse

import msgspec
import numpy as np
import zmq
from mutations import Case, as_json, damaged, mutated_json, nasty
from targets import AGENT, Targets

from headrace.channel.codec import pack
from headrace.channel.heartbeats import Heartbeat, Hello, Ready
from headrace.engines.base import Delta
from headrace.engines.serving import Deltas
from victims import ROOT, set_all

SETTINGS = (
    "run.name=live", "run.versions=100000", "warm_start.steps=0", "rollouts.group_size=2", "buffer.groups=2",
    "evaluate.prompts=0", "observe.display=plain", "task.timeout=3600", "pipeline.stall_seconds=3600",
)  # fmt: skip
OUTCOMES = {0: "closed", -1: "no answer"}
START_SECONDS, ANSWER_SECONDS, REST_SECONDS = 120.0, 30.0, 0.5
KEYS = (b"", b" ", b"none", b"\xff\xfe", b"a" * 10_000, b"\x00", b"..", "é🙂".encode(), b"x.y", b"Bearer x")
HEADERS = (
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999\r\n", b"Content-Length: 1e3\r\n", b"X: \xff\xfe\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Transfer-Encoding: chunked\r\n", b"X: " + b"a" * 100_000 + b"\r\n",
    b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n", b"Content-Type: text/plain; charset=utf-16\r\n",
    b"Content-Type: application/json; charset=nothing\r\n", b"X: y\r\n" * 2_000, b"Upgrade: websocket\r\n",
    b"Host: x\r\n", b": empty\r\n", b"no colon\r\n",
)  # fmt: skip
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "cab"}],
    "max_tokens": 2,
    "temperature": 1.0,
    "top_p": 0.9,
    "n": 1,
    "stop": ["x"],
    "seed": 3,
    "logprobs": True,
}
PLAIN = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 1.0}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PLAIN,
    "/v1/sessions": {"wait": 0.0},
    "/v1/sessions/x/reward": {"reward": 1.0},
}
INTS = np.arange(2, dtype=np.int32)
MESSAGES = (
    Hello(),
    Ready(facts={"a": 1}),
    Heartbeat(phase="ready", time=0.0),
    Deltas(deltas=[Delta(id="nobody", token_ids=INTS, logprobs=np.zeros(2, np.float32), versions=INTS)]),
)


class LiveRun:
    """A run whose gateway waits for agents. It is started at the first attack and ended at the last."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._read = 0
        """How much of the log was judged."""

    @cached_property
    def process(self) -> subprocess.Popen[bytes]:
        """The run's controller, once its gateway listens."""
        settings = [*SETTINGS, f"run.directory={self._targets.directory}"]
        command = [sys.executable, "-m", "headrace", "gateway", str(AGENT)]
        command += set_all(*settings)
        log = (self._targets.directory / "live.log").open("wb")
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while not self._where.is_file() or not self._where.read_text():
            assert process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.05)
        return process

    @property
    def _where(self) -> Path:
        return self._targets.directory / "live" / "gateway.json"

    @property
    def log(self) -> str:
        """What the run has printed."""
        return (self._targets.directory / "live.log").read_text(errors="replace")

    @cached_property
    def gateway(self) -> tuple[str, int, str]:
        """The host, port and key of the gateway."""
        assert self.process.poll() is None
        told = json.loads(self._where.read_text())
        url = urlparse(told["base_url"])
        return str(url.hostname), int(url.port or 0), told["api_key"]

    @cached_property
    def hub(self) -> str:
        """The address of the hub, which is in the command lines of the run's workers."""
        assert self.process.poll() is None
        run = str(self._targets.directory / "live")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().decode().split("\0")
                if "--address" in words and run in words:
                    return words[words.index("--address") + 1]
        raise AssertionError("no worker of the run was found")

    def problem(self) -> str | None:
        """Return what is wrong with the run now, or None: it must live, and answer a plain request."""
        if self.process.poll() is not None:
            return f"the run ended with exit code {self.process.returncode}: {self.log[-500:]}"
        new, self._read = self.log[self._read :], len(self.log)
        if "Traceback" in new:
            return f"a traceback in the run's log: ... {new[-300:]}"
        host, port, key = self.gateway
        plain = request("/v1/chat/completions", json.dumps(CHAT).encode(), key.encode())
        try:
            status, answer = ask(host, port, plain)
        except TimeoutError:
            return f"a plain request was not answered within {ANSWER_SECONDS:g} s"
        return None if status == 200 else f"a plain request was answered {status}: {answer[-300:]!r}"

    def play(self, session: dict[str, Any]) -> str | None:
        """Be the agent of a session to its end. Return what is wrong, or None."""
        host, port, _ = self.gateway
        steps = {"/v1/chat/completions": CHAT, f"/v1/sessions/{session['id']}/reward": {"reward": 1.0}}
        for path, body in steps.items():
            status, answer = ask(host, port, request(path, json.dumps(body).encode(), session["api_key"].encode()))
            if status != 200:
                return f"a session's own {path} was answered {status}: {answer[-300:]!r}"
        return None

    def close(self) -> None:
        """End the run, if it was started."""
        if "process" in self.__dict__:
            self.process.kill()
            self.process.wait()


def request(path: str, body: bytes, key: bytes, *, method: str = "POST", more: bytes = b"") -> bytes:
    """Return the bytes of an HTTP request. `more` are further lines of its header."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n".encode()
    if b"Content-Length" not in more and b"Transfer-Encoding" not in more:
        more += f"Content-Length: {len(body)}\r\n".encode()
    return head + b"Authorization: Bearer " + key + b"\r\n" + more + b"\r\n" + body


def ask(host: str, port: int, text: bytes, *, whole: bool = True) -> tuple[int, bytes]:
    """Send these bytes and return the status and all that was answered; status 0 if the connection was closed.

    A request that is not whole may be waited for by the server; then this end says that nothing more follows.
    """
    with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(text)
            if not whole:
                if select.select([connection], [], [], REST_SECONDS)[0]:
                    answer = connection.recv(1 << 16)
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                answer += piece
    words = answer.split(b" ", 2)
    return (int(words[1]) if len(words) > 2 and words[1].isdigit() else 0), answer


def attack_gateway(random: Random, live: LiveRun) -> Case:
    """Send a mutated request. It is answered below 500 and soon, and a plain request still works."""
    host, port, known = live.gateway
    path = random.choice(list(BODIES))
    body, how, whole = json.dumps(BODIES[path]).encode(), "a header: ", True
    key, more = known.encode(), b""
    method = random.choice(("POST",) * 9 + ("GET",))
    match random.choice(("value", "value", "value", "bytes", "key", "header", "text")):
        case "value":
            body, how = as_json(mutated_json(BODIES[path], random)), "another value: "
        case "bytes":
            body, how = damaged(body, random)
        case "key":
            key, how = random.choice(KEYS), "another key: "
        case "header":
            more, whole = random.choice(HEADERS), False
        case _:
            whole = False
    text = request(path, body, key, method=method, more=more)
    if not whole and not more:
        text, how = damaged(text, random)
    status = -1
    try:
        status, answer = ask(host, port, text, whole=whole)
        problem = f"answered {status}: {answer[-300:]!r}" if status >= 500 and b"no_session" not in answer else None
        if path == "/v1/sessions" and status == 200:
            problem = live.play(json.loads(answer.partition(b"\r\n\r\n")[2]))
    except TimeoutError:
        # A client may ask to wait for a session.
        problem = None if path == "/v1/sessions" else f"not answered within {ANSWER_SECONDS:g} s"
    if problem is None and random.random() < 0.05:
        problem = live.problem()
    done = f"{method} {path} {how} {text[:30]!r} ... {text[-90:]!r}"
    return Case(done, problem, OUTCOMES.get(status, f"answered {status}"))


def attack_connections(random: Random, live: LiveRun) -> Case:
    """Hold many connections that say nothing, or half a header, while a plain request is answered."""
    host, port, _ = live.gateway
    number, words = random.choice((50, 200, 500)), random.choice((b"", b"POST /v1/chat", b"POST / HTTP/1.1\r\nHost: x"))
    with contextlib.ExitStack() as held:
        refused = 0
        for _ in range(number):
            try:
                connection = held.enter_context(socket.create_connection((host, port), timeout=ANSWER_SECONDS))
                connection.sendall(words)
            except OSError:
                refused += 1
        problem = live.problem()
    return Case(f"{number} connections that say {words!r}, {refused} refused", problem, "held")


def attack_hub(random: Random, live: LiveRun) -> Case:
    """Send frames that no worker sends, under a strange name. The run goes on."""
    frames = [bytes(frame) for frame in pack("event", random.choice((0, 1, 2**40)), random.choice(MESSAGES))]
    at = random.randrange(len(frames))
    match random.choice(("damage", "damage", "lose", "repeat", "header", "empty")):
        case "damage":
            frames[at], how = damaged(frames[at], random)
        case "lose":
            how = f"frame {at} is missing"
            del frames[at]
        case "repeat":
            how = f"frame {at} sent 100 times"
            frames[at:at] = [frames[at]] * 100
        case "header":
            how = "another header"
            kind = str(nasty(random))[:50].encode(errors="replace").decode()
            frames[0] = msgspec.msgpack.encode([kind, 0, "Hello"])
        case _:
            how = "no frame at all"
            frames = [b""]
    name = random.choice((b"stranger", b"engine-7", b"\xff\xfe", random.randbytes(8)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.IDENTITY, name.lstrip(b"\0") or b"x")
        peer.setsockopt(zmq.LINGER, 1000)
        peer.connect(live.hub)
        peer.send_multipart(frames or [b""])
    problem = live.problem() if random.random() < 0.05 else None
    return Case(f"{name!r}: {how}", problem, "sent")


KINDS = {"gateway": attack_gateway, "connections": attack_connections, "hub": attack_hub}
