"""A trainer of one table in a process of its own: publishes version 1, sends its manifest, and waits to be killed."""

import base64
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from bigram import CANARY, make_weights, score

from headrace.channel.codec import encode
from headrace.delivery import transports
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import nccl, nccl_group
from headrace.delivery.transports.base import Sender, SenderSettings
from headrace.delivery.transports.nccl import NcclSender
from headrace.delivery.transports.tcp_server import TcpSender


class Mortal(TcpSender):
    left = 1 << 60

    def respond(self, frames: list[bytes]) -> list[Any]:
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return super().respond(frames)


def mortal(transport: str, buckets: int) -> Sender:
    if transport == "tcp":
        sender = Mortal()
        sender.left = buckets
        return sender

    def pieces(*arguments: Any) -> Iterator[tuple[int, int]]:
        for number, piece in enumerate(nccl_group.pieces(*arguments)):
            if number == buckets:
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece

    nccl.pieces = pieces
    return NcclSender(bucket_bytes=256)


def serve(line: Connection, transport: str, run_id: str, directory: str, buckets: int | None = None) -> None:
    """With `buckets`, the process dies in the middle of a transfer: instead of serving one bucket more."""
    sender = (
        mortal(transport, buckets)
        if buckets
        else transports.sender(transport, SenderSettings(run_id=run_id, directory=directory))
    )
    weights = make_weights(1)
    publisher = Publisher(sender, "float32", 1e-5, CANARY)
    manifest = publisher.publish(1, -1, 1, weights, lambda ids: score(weights, ids)).result(30)
    line.send_bytes(json.dumps([base64.b64encode(frame).decode() for frame in encode(manifest)]).encode())
    with contextlib.suppress(EOFError):
        line.recv_bytes()
    publisher.close()
