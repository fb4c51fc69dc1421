"""A trainer of one table in a process of its own: publishes version 1, prints its manifest, and waits to be killed.

    trainer_process.py TRANSPORT RUN_ID DIRECTORY [BUCKETS]

With BUCKETS, the process dies in the middle of a transfer: instead of serving one bucket more.
"""

import base64
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from bigram import CANARY, make_weights, score

from headrace.channel.codec import encode
from headrace.delivery import transports
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import nccl_sessions, nccl_wire
from headrace.delivery.transports.base import Sender
from headrace.delivery.transports.nccl import NcclSender
from headrace.delivery.transports.tcp import TcpSender


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
        for number, piece in enumerate(nccl_wire.pieces(*arguments)):
            if number == buckets:
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece

    nccl_sessions.pieces = pieces
    return NcclSender(bucket_bytes=256)


def main() -> None:
    transport, run_id, directory, *buckets = sys.argv[1:]
    sender = (
        mortal(transport, int(buckets[0])) if buckets else transports.sender(transport, run_id, directory=directory)
    )
    weights = make_weights(1)
    publisher = Publisher(sender, "float32", 1e-5, CANARY)
    manifest = publisher.publish(1, -1, 1, weights, lambda ids: score(weights, ids)).result(30)
    print(json.dumps([base64.b64encode(frame).decode() for frame in encode(manifest)]), flush=True)
    sys.stdin.read()
    publisher.close()


main()
