"""Hosts of namespaces: each is as apart from the others as a machine is, and none outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Host, Hosts

from waiting import alive, until

pytestmark = pytest.mark.cluster

SECONDS = 60.0
PORT = 7000
# Answers every connection with the name of the host.
SERVE = f"""
import socket
server = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    with server.accept()[0] as connection:
        connection.sendall(socket.gethostname().encode())
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as connection:
    print(connection.recv(99).decode())
"""
# Sends its input to one connection, line by line, and prints the lines that come.
LISTEN = f"""
import socket
server = socket.create_server(("", {PORT + 1}))
print("ready", flush=True)
for line in server.accept()[0].makefile():
    print(line, end="", flush=True)
"""
SEND = f"""
import socket, sys
with socket.create_connection((sys.argv[1], {PORT + 1})) as connection:
    for line in sys.stdin:
        connection.sendall(line.encode())
        print("sent", flush=True)
"""
# A process that has left its session and its parent, as a daemon does.
DAEMON = "setsid sleep 1000 > /dev/null 2>&1 &"
# Starts a program, and collects every process that the program leaves behind, as the first process of a system does.
COLLECTOR = """
import ctypes, os, subprocess, sys

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
print(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]).pid, flush=True)
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""
OWNER = """
import sys, time
from hosts import Hosts
with Hosts(2) as hosts:
    for host in hosts:
        host.start(["sleep", "1000"])
        host.run(["sh", "-c", sys.argv[1]])
        print(host.run(["readlink", "/proc/self/ns/net"]).stdout, end="", flush=True)
    print("made", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with Hosts(3) as made:
        yield made


@contextlib.contextmanager
def running(host: Host, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that runs on a host, from the line that says that it is ready."""
    command = [sys.executable, "-c", program, *arguments]
    with host.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if arguments == ():
                assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def ask(host: Host, address: str, seconds: float = SECONDS, port: int = PORT) -> str:
    """Return what a server answers to a host, or the last line of the error."""
    done = host.run([sys.executable, "-c", ASK, address, str(port), str(seconds)], check=False)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def network(host: Host) -> str:
    return host.run(["readlink", "/proc/self/ns/net"]).stdout.strip()


def members(networks: set[str]) -> set[int]:
    """Return the processes of the whole machine that are in one of these network namespaces."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((process / "ns/net").readlink()) in networks and alive(process.name):
                found.add(int(process.name))
    return found


def wait_for(holds: Callable[[], object]) -> None:
    asyncio.run(until(holds, SECONDS))


def test_hosts_have_names_and_reach_each_other(hosts: list[Host]) -> None:
    assert [host.name for host in hosts] == ["host1", "host2", "host3"]
    assert len({host.address for host in hosts}) == 3
    with contextlib.ExitStack() as servers:
        # All bind the same port.
        for host in hosts:
            servers.enter_context(running(host, SERVE))
        for host in hosts:
            assert [ask(host, other.address) for other in hosts] == ["host1", "host2", "host3"]
            assert [ask(host, other.name) for other in hosts] == ["host1", "host2", "host3"]
            assert ask(host, "localhost") == host.name


def test_hosts_reach_nothing_else(hosts: list[Host]) -> None:
    interfaces = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout
    own = [line.split()[3].partition("/")[0] for line in interfaces.splitlines()]
    assert "127.0.0.1" in own
    with socket.create_server(("", 0)) as server:
        for address in [*own, "198.51.100.1"]:
            answer = ask(hosts[0], address, port=server.getsockname()[1])
            assert "unreachable" in answer or ("refused" in answer and address.startswith("127.")), address
    # The other way round: this machine has no route to the hosts, and does not see their links.
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert not any(name in links for name in ("switch", *(host.name for host in hosts)))


def test_files_of_a_host_are_its_own(hosts: list[Host]) -> None:
    one, two, _ = hosts
    for directory in ("/tmp", "/dev/shm"):
        file = f"{directory}/of-host1-{os.getpid()}"
        one.run(["sh", "-c", f"echo text > {file}"])
        assert not two.path(file).exists()
        assert not Path(file).exists()
        assert one.path(file).read_text() == "text\n"
    # The rest is shared, and is where commands start.
    assert one.run(["pwd"]).stdout.strip() == str(Path(__file__).parents[2])
    assert Path(__file__).samefile(one.path(__file__))
    assert one.run(["sh", "-c", "echo $TMPDIR $ADDED"], env={"ADDED": "too"}).stdout == "/tmp too\n"


def test_processes_of_a_host_are_its_own(hosts: list[Host]) -> None:
    one, two, _ = hosts
    process = one.start(["sleep", "1001"])
    wait_for(lambda: one.processes().get(process.pid) == ["sleep", "1001"])
    assert process.pid not in two.processes()
    assert "sleep 1001" in one.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).stdout
    assert "sleep 1001" not in two.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == -signal.SIGTERM
    assert process.pid not in one.processes()
    with pytest.raises(subprocess.CalledProcessError, match="on host1"):
        one.run(["false"])
    with pytest.raises(subprocess.TimeoutExpired):
        one.run(["sleep", "1002"], timeout=0.1)
    assert ["sleep", "1002"] not in one.processes().values()


def test_a_cut_link_heals(hosts: list[Host]) -> None:
    one, two, three = hosts
    with running(two, SERVE), running(three, SERVE), running(three, LISTEN) as listener:
        with running(one, SEND, three.address) as sender:
            say(sender, "before")
            assert listener.stdout.readline() == "before\n"
            three.cut()
            assert "timed out" in ask(one, three.address, 1.0)
            assert "timed out" in ask(three, one.address, 1.0)
            assert ask(one, two.address) == "host2"
            assert ask(three, "localhost") == "host3"
            # Nobody is told of the cut: what is sent arrives later.
            say(sender, "during")
            three.heal()
            assert listener.stdout.readline() == "during\n"
        assert ask(one, three.address) == "host3"
        assert ask(three, two.address) == "host2"


def say(sender: subprocess.Popen[str], text: str) -> None:
    sender.stdin.write(f"{text}\n")
    sender.stdin.flush()
    assert sender.stdout.readline() == "sent\n"


def test_nothing_stays(hosts: list[Host]) -> None:
    # Others exist at the same time, with the same names and addresses.
    with Hosts(2) as others, running(others[1], SERVE):
        assert ask(others[0], others[1].address) == "host2"
        assert "refused" in ask(hosts[0], others[1].address)
        networks = {network(host) for host in others}
        assert len(networks | {network(host) for host in hosts}) == 5
        for host in others:
            host.run(["sh", "-c", DAEMON])
            wait_for(lambda host=host: ["sleep", "1000"] in host.processes().values())
        assert len(members(networks)) >= 4
    assert not members(networks)


def test_nothing_stays_of_an_owner_that_was_killed() -> None:
    command = [sys.executable, "-c", COLLECTOR, OWNER, DAEMON]
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True) as collector:
        owner = int(collector.stdout.readline())
        networks = {collector.stdout.readline().strip() for _ in range(2)}
        assert collector.stdout.readline() == "made\n"
        assert len(members(networks)) >= 8
        os.kill(owner, signal.SIGKILL)
    with Hosts(2) as others, running(others[1], SERVE):
        assert ask(others[0], others[1].address) == "host2"
    wait_for(lambda: not members(networks))


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["env", "PATH=/nowhere"], "need the program `ip`: apt-get install iproute2"),
        (["setpriv", "--reuid=65534", "--clear-groups"], "need root, on Linux"),
    ],
)
def test_a_machine_that_cannot_make_hosts_gets_one_line(command: list[str], line: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import hosts; print(hosts.missing())"
    done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"hosts of network namespaces {line}\n"
