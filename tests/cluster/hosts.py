"""Several hosts on one machine, made of Linux namespaces: `with Hosts(3) as hosts`.

A host has its own network, host name, process ids, `/dev/shm` and `/tmp`. The rest of the file system is shared. Hosts
reach each other, and nothing else. The bridge between them is in a network namespace of its own, so its name and its
addresses cannot collide with others: several tests may have hosts at the same time.

Nothing outlives the process that made the hosts, even if that process is killed. The first process of a host reads a
pipe from it, and ends when the pipe is closed. The kernel then kills every process of the host, and removes the
mounts and links, which belong to no file and to no other process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
"""The programs that hosts are made with, and the Debian packages that have them."""
END_SECONDS = 60.0
CLONE_NEWPID = 0x20000000

READY = "ready\n"
SWITCH = "echo ready; exec cat > /dev/null"
# `$1` is the name, `$2` the checkout, `$3` the content of /etc/hosts. A checkout under /tmp stays visible: the working
# directory still is the one that the new /tmp hides. The first process inherits the processes that others leave behind,
# and ignores the signal of their end, so that they leave no zombies.
HOST = """
set -e
cd "$2"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /tmp
case "$2" in /tmp/*) mkdir -p "$2"; mount --no-canonicalize --bind . "$2";; esac
echo "$3" > /tmp/.hosts
mount --bind /tmp/.hosts /etc/hosts
echo "$1" > /proc/sys/kernel/hostname
mount -t proc proc /proc
cd /
echo ready
trap '' CHLD
exec cat > /dev/null
"""


def missing() -> str:
    """Return one line that says what this machine lacks for hosts, or an empty text."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "hosts of network namespaces need root, on Linux"
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"hosts of network namespaces need the program `{tool}`: apt-get install {package}"
    return ""


class Host:
    """One host. Its processes are children of this process, and can be signalled and waited for like any other."""

    def __init__(self, name: str, address: str, names: str, switch: int) -> None:
        """Make a host with a link to the switch, a process in a network namespace. `names` is its `/etc/hosts`."""
        self.name = name
        self.address = address
        self._switch = switch
        self._started: list[subprocess.Popen[Any]] = []
        options = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        self._unshare = _begin(["unshare", *options, "sh", "-c", HOST, "sh", name, str(ROOT), names])
        self._proc = Path(f"/proc/{self._unshare.pid}")
        link = f"link add {name} type veth peer name eth0 netns {self._unshare.pid}"
        _ip(self._switch, link, f"link set {name} master switch up")
        _ip(self._unshare.pid, f"address add {address}/24 dev eth0", "link set eth0 up", "link set lo up")

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | Path = ROOT, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command here. `env` is added to this process's environment, `options` are those of `Popen`."""
        enter = ["nsenter", f"--target={self._unshare.pid}", "--net", "--mount", "--uts", "--ipc"]
        environment = {**os.environ, "TMPDIR": "/tmp", **(env or {})}
        with _children_in(self._proc / "ns/pid_for_children"):
            process = subprocess.Popen([*enter, "env", f"--chdir={cwd}", *command], env=environment, **options)
        self._started.append(process)
        return process

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end, and return what it printed. Raises `CalledProcessError` if it fails."""
        process = self.start(command, env, stdout=PIPE, stderr=PIPE, text=True)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if check and process.returncode:
            raise subprocess.CalledProcessError(process.returncode, f"{command} on {self.name}", out, err)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def path(self, path: str | Path) -> Path:
        """Return the path under which this process sees a file of the host, such as one in the host's `/tmp`."""
        return self._proc / "root" / str(path).lstrip("/")

    def processes(self) -> dict[int, list[str]]:
        """Return the command lines of the processes that run here, by their ids as this process sees them."""
        namespace = (self._proc / "ns/pid_for_children").readlink()
        first = (self._proc / f"task/{self._unshare.pid}/children").read_text().strip()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "ns/pid").readlink() == namespace and process.name != first:
                    found[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0")
        # A zombie has no command line.
        return {pid: line.split("\0") for pid, line in found.items() if line}

    @property
    def sent_bytes(self) -> int:
        """The bytes that have left this host since it was made, as the kernel counts them, with all headers."""
        return self._link_figures()[8]

    @property
    def received_bytes(self) -> int:
        """The bytes that have reached this host since it was made."""
        return self._link_figures()[0]

    def _link_figures(self) -> list[int]:
        lines = (self._proc / "net/dev").read_text().splitlines()
        [figures] = [line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:")]
        return [int(figure) for figure in figures]

    def cut(self) -> None:
        """Cut the link of this host, as if its cable was pulled out. Its processes go on."""
        _ip(self._switch, f"link set {self.name} down")

    def heal(self) -> None:
        """Undo `cut`."""
        _ip(self._switch, f"link set {self.name} up")

    def end(self) -> None:
        """Kill all processes of this host, and remove it."""
        _close(self._unshare)
        # The namespace of process ids ends when all its processes have been waited for.
        for process in self._started:
            process.wait(END_SECONDS)
        self._unshare.wait(END_SECONDS)


class Hosts:
    """The hosts `host1`, `host2`, ..., from `__enter__` to `__exit__`. They know each other by name."""

    def __init__(self, count: int = 3) -> None:
        self._count = count
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> list[Host]:
        """Make the hosts. Raises `RuntimeError`, with one line, if this machine cannot."""
        if lacks := missing():
            raise RuntimeError(lacks)
        addresses = {f"host{number}": f"{NETWORK}.{number}" for number in range(1, self._count + 1)}
        names = "\n".join(["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())])
        with contextlib.ExitStack() as ends:
            switch = _begin(["unshare", "--net", "sh", "-c", SWITCH])
            ends.callback(switch.wait, END_SECONDS)
            ends.callback(_close, switch)
            _ip(switch.pid, "link add switch type bridge", "link set switch up")
            hosts = []
            for name, address in addresses.items():
                hosts.append(Host(name, address, names, switch.pid))
                ends.callback(hosts[-1].end)
            self._ends = ends.pop_all()
        return hosts

    def __exit__(self, *error: object) -> None:
        """End the hosts and all their processes."""
        self._ends.close()


def _begin(command: list[str]) -> subprocess.Popen[str]:
    """Start a process that holds namespaces until its standard input is closed, and wait until they are ready."""
    process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as output:
        said = output.readline()
    if said != READY:
        _close(process)
        process.wait(END_SECONDS)
        raise RuntimeError(f"this machine cannot make hosts of namespaces: {said.strip()}")
    return process


def _close(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def _ip(target: int, *commands: str) -> None:
    """Give these commands to `ip`, in the network namespace of a process."""
    enter = ["nsenter", f"--target={target}", "--net", "ip", "-batch", "-"]
    done = subprocess.run(enter, input="\n".join(commands), text=True, capture_output=True, timeout=END_SECONDS)
    if done.returncode:
        raise RuntimeError(f"ip {'; '.join(commands)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _children_in(namespace: Path) -> Iterator[None]:
    """Have the processes that this thread starts in the meantime belong to this namespace of process ids.

    `nsenter` could do this only by a fork, and a signal to it would not reach the command.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(file: TextIO) -> None:
        if libc.setns(file.fileno(), CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), f"cannot enter {file.name}")

    with namespace.open() as theirs, Path("/proc/thread-self/ns/pid").open() as ours:
        enter(theirs)
        try:
            yield
        finally:
            enter(ours)
