"""One end of a group, as a process of one host: `sender BIND BUCKET`, `source` or `rank NUMBER OWN [FIRST PORT]`.

A sender and a source read commands from standard input, and answer each with one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from headrace.delivery.plan import plan_weights
from headrace.delivery.transports.collectives import listen
from headrace.delivery.transports.nccl import NcclSender
from headrace.delivery.transports.nccl_group import NcclSource
from headrace.errors import DeliveryError
from headrace.training.ranks import join

PATIENCE = 5.0
TENSORS = 64
TENSOR_BYTES = 1 << 20


def weights_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"w{number:02}": torch.randn(TENSOR_BYTES // 4, generator=generator) for number in range(TENSORS)}


PLAN = plan_weights(weights_of(0), "float32")


def send(bind: str, bucket: str) -> None:
    sender = NcclSender(bind=bind, trusted_network=True, receivers=2, bucket_bytes=int(bucket), patience=PATIENCE)
    for version in commands("sending"):
        location = sender.write(int(version), PLAN, weights_of(int(version)))
        sender.finish(location)
        say(location=location)
        next(sys.stdin)  # Until the engines have it.
        sender.release(location)
    sender.close()


def receive() -> None:
    source = NcclSource(patience=PATIENCE)
    for command in commands("receiving"):
        location, version = command.split()
        began = time.monotonic()
        try:
            found = source.open(location, int(version), PLAN.entries)
            source.verify(location, int(version))
        except DeliveryError as error:
            say(error=str(error), seconds=time.monotonic() - began)
            continue
        seconds, wanted = time.monotonic() - began, weights_of(int(version))
        say(holds=all(torch.equal(tensor, wanted[name]) for name, tensor in found.items()), seconds=seconds)
    source.close()


def meet(rank: int, own: str, first: str = "", port: str = "") -> None:
    if rank:
        wait = timedelta(seconds=60)
        store = TCPStore(first, int(port), is_master=False, wait_for_workers=False, timeout=wait)
    else:
        store = listen(own, 60)
        say(port=store.port)
    ranks = join(store, rank, 2, tensor_parallel=1, device="cpu", timeout=60, address=own)
    say(total=ranks.sum_over_all([10.0**rank])[0])
    next(sys.stdin)  # What listens meanwhile is looked at.
    ranks.leave()


def commands(phase: str) -> Any:
    say(phase=phase)
    return (line.strip() for line in sys.stdin)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, *arguments = sys.argv[1:]
    if role == "sender":
        send(*arguments)
    elif role == "source":
        receive()
    else:
        meet(int(arguments[0]), *arguments[1:])
