"""Trainers and engines in processes of their own, for the delivery suite: forked from one that has loaded everything.

    a line on stdin (JSON: what to run, with what) -> a process id on stdout

Each speaks with the test over a ZeroMQ pair. Told to `die` at a step, it kills itself with SIGKILL when it gets there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from delivery_parts import BUCKET_BYTES, Publishing, Serving

from headrace.channel.codec import decode, encode
from headrace.delivery import receiver
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.copying import copy_all
from headrace.delivery.live import DeviceCopies
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports import file, nccl, nccl_group, shm, tcp, tcp_server
from headrace.delivery.transports.base import Sender
from headrace.delivery.transports.cuda_ipc import CudaIpcSource
from headrace.delivery.transports.nccl_group import pieces
from headrace.delivery.transports.shm import ShmSource
from headrace.delivery.transports.storage import Directory
from headrace.delivery.transports.tcp_paths import PlainConnection
from headrace.delivery.transports.tcp_server import Relay, TcpSender


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def after(real: Callable[..., Any], calls: int = 1) -> Callable[..., Any]:
    """`real`, so many times; then death."""
    left = [calls]

    def mortal(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        left[0] -= 1
        return result if left[0] else die()

    return mortal


def reading(real: Callable[..., Any], then: Callable[[], Any]) -> Callable[..., Any]:
    """`storage.opened`; once the first bytes of a tensor are read, `then` is called."""

    @contextmanager
    def opened(location: str) -> Iterator[Any]:
        with real(location) as (file, size, stamp):
            yield Interrupted(file, then), size, stamp

    return opened


class Interrupted:
    """A file that calls `then` after its first `readinto`."""

    def __init__(self, file: Any, then: Callable[[], Any]) -> None:
        self._file, self._then = file, then
        self.read = file.read

    def readinto(self, target: memoryview) -> int:
        count = int(self._file.readinto(target))
        then, self._then = self._then, lambda: None
        then()
        return count


def first_chunk(real: Callable[..., None]) -> Callable[..., None]:
    """`Directory.write`, which dies when the header and the first tensor are written."""

    def chunks(given: Any) -> Iterator[memoryview]:
        yield from given[:2]
        die()

    def write(self: Directory, location: str, given: Any) -> None:
        real(self, location, chunks(given))

    return write


def half_packed(real: Callable[..., None]) -> Callable[..., None]:
    def pack(packed: Any, *arguments: Any) -> None:
        real(packed, *arguments)
        packed[len(packed) // 2 :] = 0
        die()

    return pack


def half_copied(real: Callable[..., None]) -> Callable[..., None]:
    def copy_all(target: dict[str, Any], source: Any, **options: Any) -> None:
        if options:  # into the staging buffer
            real(target, source, **options)
            return
        some = dict(list(target.items())[: len(target) // 2])
        real(some, source)
        die()

    return copy_all


def half_replayed(self: DeviceCopies, plan: int, targets: Any, sources: Any) -> None:
    copy_all(dict(list(targets.items())[: len(targets) // 2]), sources)
    torch.cuda.synchronize()
    die()


def one_piece(*arguments: Any) -> Any:
    yield pieces(*arguments)[0]
    die()


def arm_engine(step: str, transport: str) -> None:
    match step, transport:
        case "mid-fetch", "shm":
            ShmSource.verify = die  # type: ignore[method-assign]
        case "mid-fetch", "file":
            file.opened = reading(file.opened, then=die)
        case "mid-fetch", "tcp":
            PlainConnection.receive = after(PlainConnection.receive)  # type: ignore[method-assign]
        case "mid-fetch", "nccl":
            nccl_group.pieces = one_piece
        case "mid-fetch", "cuda_ipc":
            CudaIpcSource.verify = die  # type: ignore[method-assign]
        case "mid-swap", "cuda_ipc":
            DeviceCopies.copy = half_replayed  # type: ignore[method-assign]
        case "mid-relay", "tcp":
            # Who asks for the fifth bucket has got the first: four are asked for at a time.
            Relay.respond = after(Relay.respond, 5)  # type: ignore[method-assign]
        case "after stage", _:
            Receiver.stage = after(Receiver.stage)  # type: ignore[method-assign]
        case "mid-swap", _:
            receiver.copy_all = half_copied(receiver.copy_all)
        case "before acknowledge", _:
            Receiver.prove = after(Receiver.prove)  # type: ignore[method-assign]
        case _:
            raise ValueError(step)


def arm_trainer(step: str, sender: Sender) -> None:
    match step, sender.name:
        case "before write", _:
            sender.write = die  # type: ignore[method-assign]
        case "mid-write", "file":
            Directory.write = first_chunk(Directory.write)  # type: ignore[method-assign]
        case "mid-write", "cuda_ipc":
            DeviceCopies.copy = half_replayed  # type: ignore[method-assign]
        case "mid-write", name:
            module: Any = {"shm": shm, "tcp": tcp_server, "nccl": nccl}[name]
            if name in ("shm", "tcp"):
                module.copy_all = half_copied(module.copy_all)
            else:
                module.pack = half_packed(module.pack)
        case "mid-fetch", "tcp":
            assert isinstance(sender, TcpSender)
            sender.respond = after(sender.respond, 2)  # type: ignore[method-assign]
        case "mid-fetch", "nccl":
            nccl.pieces = one_piece
        case _:
            raise ValueError(step)


def engine(line: zmq.Socket[bytes], transport: str, kind: str, device: str) -> None:
    serving = Serving(kind, device=device)
    serving.submit("r", 4000)
    while True:
        command, *frames = line.recv_multipart()
        match command.decode().split("|"):
            case ["load", *step]:
                if step:
                    arm_engine(step[0], transport)
                manifest = decode(Manifest, frames)
                proof = serving.load(manifest)
                holds = serving.holds(proof.version) if proof.accepted else False
                line.send_multipart([msgspec.json.encode(proof), b"bit for bit" if holds else b""])
            case ["check"]:
                serving.go_on(serving.loop.counters().version)
                serving.loop.abort().result(30)
                serving.check_answers()
                served = {int(v) for delta in serving.answers().values() for v in delta.versions}
                line.send(json.dumps(sorted(served)).encode())


def trainer(line: zmq.Socket[bytes], transport: str, kind: str, run_id: str, directory: str, device: str) -> None:
    publishing = Publishing(transport, kind, run_id, Path(directory), device=device)
    while True:
        match line.recv().decode().split("|"):
            case ["publish", version, *step]:
                if step and step[0] != "before announce":
                    arm_trainer(step[0], publishing.sender)
                manifest = publishing.publish(int(version))
                if step and step[0] == "before announce":
                    die()
                line.send_multipart(encode(manifest))
            case ["acknowledge", version]:
                publishing.acknowledge(int(version))
            case ["close"]:
                publishing.close()
                line.send(b"closed")


class Child:
    """The test's end of such a process."""

    def __init__(self, zygote: Any, context: zmq.Context[Any], directory: Path, role: str, *arguments: str) -> None:
        self._line = context.socket(zmq.PAIR)
        self._line.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{directory}/line"
        self._line.bind(address)
        zygote.stdin.write(json.dumps([role, address, *arguments]) + "\n")
        zygote.stdin.flush()
        self.pid = int(zygote.stdout.readline())

    def tell(self, command: str, manifest: Manifest | None = None) -> None:
        self._line.send_multipart([command.encode(), *(encode(manifest) if manifest is not None else [])])

    def hear(self, seconds: float = 30.0) -> list[bytes]:
        assert self._line.poll(round(1000 * seconds)), "the process says nothing"
        return self._line.recv_multipart()

    def published(self, version: int) -> Manifest:
        self.tell(f"publish|{version}")
        return decode(Manifest, self.hear())

    def loaded(self, manifest: Manifest) -> tuple[Proof, bool]:
        self.tell("load", manifest)
        proof, holds = self.hear()
        return msgspec.json.decode(proof, type=Proof), bool(holds)

    def await_death(self, seconds: float = 30.0) -> None:
        assert dead(self.pid, seconds), (
            f"process {self.pid} lives, and says {self.hear(0) if self._line.poll(0) else ''}"
        )

    def kill(self) -> None:
        if not dead(self.pid, 0):
            os.kill(self.pid, signal.SIGKILL)
            self.await_death()

    def close(self) -> None:
        self.kill()
        self._line.close()


def dead(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    for request in sys.stdin:
        role, address, *arguments = json.loads(request)
        pid = os.fork()
        if pid:
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        tcp.BUCKET_BYTES = BUCKET_BYTES
        line = zmq.Context().socket(zmq.PAIR)
        line.connect(address)
        {"engine": engine, "trainer": trainer}[role](line, *arguments)


if __name__ == "__main__":
    main()
