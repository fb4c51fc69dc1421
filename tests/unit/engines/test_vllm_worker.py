"""The messages of a vLLM server's worker, on their way from the wire to its event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

from headrace.channel.beats import Stop
from headrace.channel.spoke import Incoming
from headrace.engines.vllm.worker import receive


class Wire:
    """Has `Desk.next_message`, which waits for what is put."""

    def __init__(self) -> None:
        self.arriving: queue.Queue[Incoming] = queue.Queue()

    def next_message(self) -> Incoming | None:
        try:
            return self.arriving.get(timeout=0.05)
        except queue.Empty:
            return None


def test_a_message_for_a_loop_that_has_ended_is_nobodys_and_says_nothing(monkeypatch: Any) -> None:
    # What a thread ends with is the last line of a process's log, by which its death is explained.
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    wire, inbox, loop = Wire(), asyncio.Queue[Incoming](), asyncio.new_event_loop()
    receiver = threading.Thread(target=receive, args=(wire, loop, inbox, threading.Event()), daemon=True)
    receiver.start()
    wire.arriving.put(Incoming(request_id=1, message=Stop()))
    arrived = asyncio.wait_for(inbox.get(), 5)
    assert isinstance(loop.run_until_complete(arrived).message, Stop)
    loop.close()
    wire.arriving.put(Incoming(request_id=2, message=Stop()))
    receiver.join(timeout=5)
    assert not receiver.is_alive() and failures == []
