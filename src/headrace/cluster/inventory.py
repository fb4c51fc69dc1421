"""What this host has: its cores, and the GPUs that a run may see. Nothing here loads torch."""

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.cluster.placement import VISIBLE, Gpu, Host, Placement, check_memory, place
from headrace.config.hub import model_dir
from headrace.config.memory import estimate, least_engine_bytes, teacher_facts, trainer_memory
from headrace.config.model_dir import ModelFacts, model_facts
from headrace.config.schema import Config
from headrace.errors import ConfigError

THIS_HOST = "localhost"
TEXT_BYTES = 96
"""The length that the driver's library asks for in a buffer for a text."""


class Device(msgspec.Struct, frozen=True):
    """A GPU of this host as its driver reports it. All fields are empty if the driver's library cannot answer."""

    uuid: str = ""
    memory: int = 0
    name: str = ""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def this_host(environment: Mapping[str, str] = os.environ) -> Host:
    """Return this host with the GPUs that a scheduler, or the user, has made visible by `CUDA_VISIBLE_DEVICES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(THIS_HOST, visible(devices(), environment.get(VISIBLE)), cores)


def visible(present: list[Device], variable: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show with this value of `CUDA_VISIBLE_DEVICES`, in its order."""
    if variable is None:
        return tuple(Gpu(str(index), device.memory, device.name) for index, device in enumerate(present))
    found: list[Gpu] = []
    for word in (word.strip() for word in variable.split(",")):
        if word.isdecimal():
            device = present[int(word)] if int(word) < len(present) else None
        else:
            # A prefix of a UUID is enough for CUDA. The parts of a divided GPU (MIG) are not listed by the driver.
            device = next((known for known in present if word and known.uuid.startswith(word)), None)
            device = Device(word) if device is None and word.startswith("MIG-") and present else device
        if device is None:
            break  # CUDA stops at the first name that it does not know, such as -1.
        found.append(Gpu(word, device.memory, device.name))
    return tuple(found)


def devices() -> list[Device]:
    """Return the GPUs of this host, from the driver's library, or else one for each device file."""
    try:
        return _ask_driver(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        files = Path("/dev").glob("nvidia*")
        return [Device() for file in files if re.fullmatch(r"nvidia\d+", file.name)]


def _ask_driver(library: ctypes.CDLL) -> list[Device]:
    def call(name: str, *arguments: object) -> None:
        if code := getattr(library, name)(*arguments):
            raise OSError(f"{name}: error {code}")

    call("nvmlInit_v2")
    try:
        count, found = ctypes.c_uint(), []
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            handle, memory = ctypes.c_void_p(), _Memory()
            uuid, name = ctypes.create_string_buffer(TEXT_BYTES), ctypes.create_string_buffer(TEXT_BYTES)
            call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(TEXT_BYTES))
            call("nvmlDeviceGetName", handle, name, ctypes.c_uint(TEXT_BYTES))
            call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            found.append(Device(uuid.value.decode(), memory.total, name.value.decode()))
        return found
    finally:
        library.nvmlShutdown()


def place_run(config: Config, hosts: Sequence[Host]) -> tuple[Config, Placement]:
    """Place a run on these hosts, and return its configuration with the numbers of workers.

    `[cluster] hosts` says which of them are used, and in which order. How many GPUs the engines and the trainer get
    follows from the estimate of `headrace check`. Raises `ConfigError` if workers do not fit on their GPUs.
    """
    hosts = chosen_hosts(config, hosts)
    if not any(host.gpus for host in hosts):
        placement = place(config, hosts)
        return placement.applied(config), placement
    facts = model_facts(model_dir(config.model), config.model.weights)

    def rates() -> tuple[float, float]:
        found = estimate(config, facts)
        return found["generation_seconds"], found["training_seconds"]

    placement = place(config, hosts, rates)
    placed = placement.applied(config)
    check_memory(placement, hosts, memory_needs(placed, facts))
    return placed, placement


def chosen_hosts(config: Config, hosts: Sequence[Host]) -> list[Host]:
    """Return those of the hosts that `[cluster] hosts` names, in its order; all of them if it names none."""
    return [_named(name, hosts) for name in config.cluster.hosts] or list(hosts)


def _named(name: str, hosts: Sequence[Host]) -> Host:
    for host in hosts:
        if name in (host.name, host.address):
            return host
    known = ", ".join(f"{host.name} ({host.address})" if host.address else host.name for host in hosts)
    raise ConfigError(f"[cluster] hosts: there is no host {name!r} (only {known})")


def memory_needs(config: Config, facts: ModelFacts) -> dict[str, int]:
    """Return the estimated least GPU memory of a trainer rank and of an engine, in bytes."""
    trainer = trainer_memory(config, facts, teacher_facts(config))
    return {"trainer": trainer.total, "engine": least_engine_bytes(config, facts)}


def describe(placement: Placement, needs: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return the map of a placement: worker -> its host, its GPUs and, with `needs`, the memory that it needs."""
    found = {}
    for worker in placement.places:
        where = f"GPU {', '.join(worker.gpus)}" if worker.gpus else f"CPU, {worker.threads} compute threads"
        need = needs.get(worker.role, 0) if worker.gpus and needs is not None else 0
        memory = f", at least {need / 2**30:.1f} GiB" if need else ""
        beside = f", shared with {', '.join(worker.neighbours)}" if worker.neighbours else ""
        found[worker.name] = f"{worker.host}, {where}{memory}{beside}"
    return found
