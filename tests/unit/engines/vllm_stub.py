"""A server that speaks vLLM's protocol over a real socket and computes nothing: token n of a sequence is n mod 50.

As a process of its own, `python vllm_stub.py PORT SECONDS_A_TOKEN`; SIGUSR1 makes it draw no more tokens while it
answers everything else, and SIGUSR2 makes it draw again.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from headrace_vllm_plugin.wire import BACKEND, PROTOCOL, Facts

FACTS = Facts(
    protocol=PROTOCOL, vllm="0.32.0", backend=BACKEND, model="stub", dtype="float32", vocabulary=64, max_length=4096,
    logprobs_mode="processed_logprobs", slots=8, blocks=100, block_size=32,
    position_noise=True, truncation=True,
)  # fmt: skip


class Stub:
    """What is served and how it misbehaves."""

    def __init__(self) -> None:
        self.version = "default"
        self.paused = False
        self.step_seconds = 0.002
        self.stuck = False
        """Answers, and draws no tokens."""
        self.under_way = 0
        """Streams that have sent a token and not their last."""
        self.running: dict[str, asyncio.Event] = {}
        self.begun: set[str] = set()
        """The running streams that have sent a token."""
        self.calls: list[str] = []
        self.prompts: list[list[int]] = []
        self.salts: list[str] = []
        self.faults: deque[str] = deque()
        """For the next generations: "500", "400", or "break:N" (the connection breaks after N tokens)."""
        self.staging_error = ""
        self.second: dict[str, dict[str, Any]] = {}
        """By method, how the answer of a second worker differs from that of the first."""
        self.may_score = asyncio.Event()
        """Scores are answered only while this is set."""
        self.may_score.set()
        self.may_begin = asyncio.Event()
        """Requests reach the scheduler only while this is set."""
        self.may_begin.set()
        self.expert_layers = 0
        """The number of layers whose experts come with the last message of a stream: (position, layer) of a token."""
        self.lost_experts = 0
        """The number of tokens at the end of the next stream whose experts are missing."""
        self.statuses: dict[str, tuple[int, Any]] = {}
        """Answers of paths that are not what they should be."""
        self.url = ""
        self.handling: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.handling.add(task)
        try:
            await self.converse(reader, writer)
        finally:
            self.handling.discard(task)
            writer.close()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
            body = json.loads(await reader.readexactly(length) or b"null")
            path = head.split()[1].decode()
            await self.answer(path, body, writer)
            await writer.drain()

    async def answer(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        name = path.partition("?")[0]
        self.calls.append(path)
        if name in self.statuses:
            status, answer = self.statuses[name]
            _reply(writer, answer, status)
        elif name == "/inference/v1/generate" and body.get("stream"):
            await self.generate(body, writer)
        elif name == "/inference/v1/generate":
            await self.may_score.wait()
            scores = [None, *({str(token): {"logprob": -1.0}} for token in body["token_ids"][1:])]
            _reply(writer, {"prompt_logprobs": scores})
        elif name == "/inference/v1/abort_requests":
            for request_id in body["request_ids"]:
                if request_id in self.running:
                    self.running[request_id].set()
            _reply(writer, {})
        elif name == "/prompts":
            _reply(writer, {"prompts": self.prompts, "under_way": self.under_way})
        elif name == "/collective_rpc":
            answer = self.rpc(body["method"], body["kwargs"])
            second = [{**answer, **self.second[body["method"]]}] if body["method"] in self.second else []
            _reply(writer, {"results": [answer, *second]})
        else:
            await self.control(path, body)
            _reply(writer, {})

    async def control(self, path: str, body: Any) -> None:
        if path.startswith("/pause"):
            self.paused = True
            if "mode=abort" in path:
                for aborted in self.running.values():
                    aborted.set()
                while self.under_way:  # noqa: ASYNC110
                    await asyncio.sleep(self.step_seconds)
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]

    def rpc(self, method: str, arguments: Any) -> Any:
        if method == "headrace_hello":
            return {name: getattr(FACTS, name) for name in FACTS.__struct_fields__}
        if method == "headrace_stage":
            return {"version": 0, "error": ""}
        if method == "headrace_staged":
            return {"version": 0, "done": True, "error": self.staging_error, "digest": 5, "seconds": 0.0}
        assert method == "headrace_load" and self.paused, "nothing is drawn meanwhile"
        assert all(self.running[each].is_set() for each in self.begun), "what was drawn before has ended"
        return {"visible": 0, "hidden": 1, "digest": 0, "wrong": [], "missing": []}

    def experts(self, body: Any, sent: int) -> str:
        start = body["sampling_params"]["routed_experts_prompt_start"]
        places = np.arange(start, len(body["token_ids"]) + sent - 1 - self.lost_experts)
        self.lost_experts = 0
        rows = np.stack([np.stack([places, np.full_like(places, layer)], -1) for layer in range(self.expert_layers)], 1)
        file = io.BytesIO()
        np.save(file, rows.astype(np.uint8))
        return base64.b64encode(file.getvalue()).decode()

    async def generate(self, body: Any, writer: asyncio.StreamWriter) -> None:
        await self.may_begin.wait()
        fault = self.faults.popleft() if self.faults else ""
        if fault in ("500", "400"):
            _reply(writer, {"error": {"message": f"fault {fault}"}}, int(fault))
            return
        self.prompts.append(body["token_ids"])
        self.salts.append(body["cache_salt"])
        limit = int(fault.partition(":")[2]) if fault else None
        request_id = "generate-tokens-" + body["request_id"]
        aborted = self.running[request_id] = asyncio.Event()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0
        try:
            finish = None
            while finish is None:
                await asyncio.sleep(self.step_seconds)
                if sent == limit:
                    return
                finish = "abort" if aborted.is_set() else None
                tokens = [] if finish or self.paused or self.stuck else [(len(body["token_ids"]) + sent) % 50]
                self.under_way += bool(tokens) and not sent
                sent += len(tokens)
                if tokens:
                    self.begun.add(request_id)
                if sent == body["sampling_params"]["max_tokens"]:
                    finish = "length"
                if tokens or finish:
                    choice = _choice(tokens, finish, self.version, sent)
                    if finish and sent and self.expert_layers:
                        choice["choices"][0]["routed_experts"] = self.experts(body, sent)
                    _event(writer, choice)
                    await writer.drain()
            _event(writer, {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}})
            _chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
        finally:
            self.under_way -= bool(sent)
            self.begun.discard(request_id)
            del self.running[request_id]


def _choice(tokens: list[int], finish: str | None, version: str, sent: int) -> dict[str, Any]:
    logprobs = {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]}
    spans = [{"version": version, "start": 0, "end": sent}] if finish and sent else None
    choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": finish, "weight_versions": spans}
    return {"choices": [choice]}


def _event(writer: asyncio.StreamWriter, data: Any) -> None:
    _chunk(writer, b"data: " + json.dumps(data).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _reply(writer: asyncio.StreamWriter, answer: Any, status: int = 200) -> None:
    body = json.dumps(answer).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)


@asynccontextmanager
async def serving(stub: Stub, port: int = 0) -> AsyncIterator[Stub]:
    server = await asyncio.start_server(stub.handle, "127.0.0.1", port)
    async with server:
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield stub
        for task in list(stub.handling):
            task.cancel()
        await asyncio.gather(*stub.handling, return_exceptions=True)


async def main(port: int, step_seconds: float) -> None:
    stub = Stub()
    stub.step_seconds = step_seconds
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, setattr, stub, "stuck", True)
    loop.add_signal_handler(signal.SIGUSR2, setattr, stub, "stuck", False)
    async with serving(stub, port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
