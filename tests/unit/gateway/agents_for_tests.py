"""Agents that behave in every way; run in worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any


def ask(base_url: str, api_key: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    request = urllib.request.Request(base_url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def chat(base_url: str, api_key: str, messages: list[Any]) -> str:
    answer = ask(base_url, api_key, "/chat/completions", {"model": "tiny", "messages": messages})
    return answer["choices"][0]["message"]["content"]


def behave(base_url: str, api_key: str, session: str, messages: list[Any], way: str, data: dict[str, Any]) -> Any:
    print("an agent may print", flush=True)
    if way != "silent":
        chat(base_url, api_key, messages)
    match way:
        case "number" | "silent":
            return 0.25
        case "metrics":
            return {"reward": 0.5, "steps": 3}
        case "posts":
            ask(base_url, api_key, f"/sessions/{session}/reward", {"reward": 0.75})
            return None
        case "both":
            ask(base_url, api_key, f"/sessions/{session}/reward", {"reward": 0.75})
            return 1
        case "nothing":
            return None
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "raises":
            raise RuntimeError("no luck\nat all")
        case "cancels":
            raise asyncio.CancelledError("gave up")
        case "interrupts":
            raise KeyboardInterrupt
        case "hangs":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", data["mark"]])
            time.sleep(600)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "insists":
            while True:
                chat(base_url, api_key, messages)
    raise AssertionError(way)


async def slow(base_url: str, api_key: str, messages: list[Any], **rest: Any) -> float:
    await asyncio.sleep(0.01)
    await asyncio.to_thread(chat, base_url, api_key, messages)
    return 1.0


def wants_more(base_url: str, nowhere: int) -> float:
    return 1.0


def sleeps() -> float:
    time.sleep(600)
    return 1.0
