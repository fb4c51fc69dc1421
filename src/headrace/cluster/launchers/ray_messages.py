"""The messages between the launcher for Ray and its driver, as lines of JSON on a socket."""

import msgspec


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster that is alive: what it has, and how much of that is free."""

    address: str
    hostname: str
    cpus: int
    gpus: int
    free_cpus: int
    free_gpus: int


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs on one host."""

    address: str
    cpus: int
    gpus: tuple[str, ...]
    """Its GPUs by their indices in the placement. Ray chooses which GPUs of the host they are."""


class ListNodes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A question for the nodes of the cluster."""

    id: int


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to reserve these bundles, all or none."""

    id: int
    bundles: list[Bundle]
    seconds: float


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to start Python with these arguments, as a worker in a bundle that is reserved."""

    id: int
    name: str
    group: int
    bundle: int
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    prints_key: bool


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to kill this worker, if it still runs."""

    name: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the request of this id."""

    id: int
    nodes: list[Node] = []
    own_address: str = ""
    """The address of the driver's own node."""
    group: int | None = None
    """The number of the group that was reserved. None if it could not be reserved in time."""
    key: str = ""


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """News of the end of a worker, as in `Exit`."""

    name: str
    code: int
    last_lines: str


Request = ListNodes | Reserve | Start | Kill
"""What the launcher sends."""
News = Answer | WorkerEnded
"""What the driver sends."""

LINE_BYTES = 1 << 24
"""The longest message."""
KILL_SECONDS = 3.0
"""Seconds in which a killed worker must end. Then it is reported as ended, whatever became of its host."""
