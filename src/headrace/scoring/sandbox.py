"""Runs one program in a sandbox: `python -I -S sandbox.py SETTINGS`, where SETTINGS is a JSON object.

This file imports only the standard library, so that it starts in a moment. It forks the program, and waits for it.
Before the program begins, it gets its limits:

    memory      RLIMIT_AS, for each process
    processes   one: seccomp refuses fork. Several: every fork waits until this process has counted the others
    network     seccomp refuses every socket, and io_uring, which could make one
    files       Landlock refuses to write outside of the working directory, and to signal other processes (Linux 5.13
                and 6.12)
    privileges  all capabilities are dropped: with them, root could raise its limits again

None of these limits needs a privilege, and the program cannot take one off again: limits are inherited, and
PR_SET_NO_NEW_PRIVS keeps set-user-ID programs from getting more rights. When the program ends, or this process is told
to end by SIGTERM or loses its owner, everything that the program has started is killed.

Exit codes: that of the program, 128 + N if signal N killed it, and `REFUSED` if it could not be started.
"""

import ctypes
import fcntl
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

REFUSED = 126
LOOK_SECONDS = 0.02
"""Seconds between two looks whether the program has ended, while no fork wakes this process."""
MOST_FILE_BYTES = 1 << 30
MOST_OPEN_FILES = 256

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
SET_MODE_FILTER, NEW_LISTENER = 1, 8
RECEIVE, SEND, GO_ON = 0xC0502100, 0xC0182101, 1
ALLOW, KILL, ERRNO, NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
EPERM, EAGAIN, ENOSYS = 1, 11, 38
LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
CLONE_THREAD = 0x10000
X32 = 0x40000000

NUMBERS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "ptrace": 101, "mount": 165, "keyctl": 250,
            "unshare": 272, "setns": 308, "seccomp": 317, "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321,
            "io_uring_setup": 425, "clone3": 435, "pidfd_getfd": 438, "shmget": 29, "semget": 64, "msgget": 68,
            "mq_open": 240, "memfd_create": 319, "memfd_secret": 447,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "clone": 220, "ptrace": 117, "mount": 40, "keyctl": 219, "unshare": 97, "setns": 268,
            "seccomp": 277,
            "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "io_uring_setup": 425, "clone3": 435,
            "pidfd_getfd": 438, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "memfd_create": 279,
            "memfd_secret": 447,
        },
    ),
}  # fmt: skip
"""Machine -> its number in seccomp, and the numbers of system calls."""
ALWAYS = (
    "ptrace",
    "mount",
    "keyctl",
    "unshare",
    "setns",
    "process_vm_readv",
    "process_vm_writev",
    "bpf",
    "pidfd_getfd",
)
"""System calls that reach other processes or the system, and are refused to every program."""
UNCOUNTED = ("memfd_create", "memfd_secret", "shmget", "semget", "msgget", "mq_open")
"""System calls for memory that RLIMIT_AS does not count, or that outlives the program. Every program is told that they
do not exist."""
CAPABILITY_VERSION = 0x20080522
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
SCOPE_SIGNAL = 2


def filter_of(*, network: bool, several: bool) -> bytes:
    """Return the seccomp filter of a program, as the kernel takes it. Raises `OSError` on an unknown machine."""
    machine = platform.machine()
    if machine not in NUMBERS:
        raise OSError(f"the system calls of {machine} are not known")
    number, calls = NUMBERS[machine]
    fork = NOTIFY if several else ERRNO | EAGAIN
    code: list[tuple[int, int, int, int]] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, number), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, 0)]
    if machine == "x86_64":
        code += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    # A library that meets ENOSYS takes the older call, whose arguments a filter can read.
    answers = dict.fromkeys(ALWAYS, ERRNO | EPERM)
    answers |= dict.fromkeys(("io_uring_setup", "clone3", *UNCOUNTED), ERRNO | ENOSYS)
    answers |= dict.fromkeys(("fork", "vfork"), fork)
    if not network:
        answers["socket"] = ERRNO | EPERM
    for name, answer in answers.items():
        if name in calls:
            code += [(EQUAL, 0, 1, calls[name]), (RETURN, 0, 0, answer)]
    code += [(EQUAL, 0, 3, calls["clone"]), (LOAD, 0, 0, 16), (ANY_BIT, 1, 0, CLONE_THREAD), (RETURN, 0, 0, fork)]
    code += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *each) for each in code)


def refuse_calls(*, network: bool, several: bool) -> int:
    """Have the kernel refuse sockets and new processes to this process from now on. Raises `OSError`.

    With `several`, new processes are not refused, but wait for the process that reads the descriptor that this returns.
    """
    program = filter_of(network=network, several=several)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    call, library = NUMBERS[platform.machine()][1]["seccomp"], ctypes.CDLL(None, use_errno=True)
    found = library.syscall(call, SET_MODE_FILTER, NEW_LISTENER if several else 0, header)
    if found < 0:
        raise OSError(f"seccomp cannot be used: {os.strerror(ctypes.get_errno())}")
    return int(found)


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; 0 if it has none."""
    return max(0, int(ctypes.CDLL(None).syscall(LANDLOCK_CREATE, None, 0, 1)))


def keep_writes_inside(directory: str) -> None:
    """Refuse to write to files outside of this directory, and to signal other processes, where Landlock can do it."""
    version, library = landlock_version(), ctypes.CDLL(None, use_errno=True)
    if not version:
        return
    # Write, remove and make anything; from version 2 on move, and from version 3 on truncate.
    writes = 0x2 | sum(1 << bit for bit in range(4, 13)) | (version >= 2) << 13 | (version >= 3) << 14
    attributes = struct.pack("QQQ", writes, 0, SCOPE_SIGNAL if version >= 6 else 0)
    rules = library.syscall(LANDLOCK_CREATE, attributes, len(attributes) if version >= 6 else 8, 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path, allowed in ((directory, writes), (os.devnull, 0x2 | (version >= 3) << 14)):
        place = os.open(path, os.O_PATH)
        if library.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, place), 0):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
        os.close(place)
    if library.syscall(LANDLOCK_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def limit(settings: dict[str, Any]) -> int:
    """Give this process, and all that it starts, the limits of the settings. Raises `OSError` or `ValueError`.

    Returns what `refuse_calls` returns.
    """
    seconds = settings["seconds"]
    for kind, most in (
        (resource.RLIMIT_AS, settings["memory"]),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MOST_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()
    keep_writes_inside(settings["directory"])
    return refuse_calls(network=settings["network"], several=settings["processes"] > 1)


def drop_capabilities() -> None:
    """Give up all capabilities. With PR_SET_NO_NEW_PRIVS, no program that root starts gets them back."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, *arguments: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    padded = [*arguments, *[0] * (4 - len(arguments))]
    if library.prctl(option, *(each if not isinstance(each, int) else ctypes.c_ulong(each) for each in padded)):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def descendants(of: int) -> list[int]:
    """Return the live processes below this one, and below a sandbox also those that were left by their parents."""
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            parents[int(process.name)] = int(parent)
    below, found = {of}, list[int]()
    while new := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below |= set(new)
        found += new
    return found


def end_all() -> None:
    """Kill every descendant. While this process reads no listener, no further one is forked."""
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _start(settings: dict[str, Any], told: socket.socket) -> int:
    """Fork the program, and return its process id. The program sends the descriptor of its listener to `told`."""
    program = os.fork()
    if program:
        return program
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        listener = limit(settings)
        if settings["processes"] > 1:
            socket.send_fds(told, [b"."], [listener])
        os.execvp(settings["command"][0], settings["command"])
    except (OSError, ValueError) as error:
        os.write(2, f"the program cannot be started: {error}\n".encode())
    os._exit(REFUSED)


def _answer_fork(listener: int, most: int) -> None:
    """Let one fork go on if there are fewer processes than allowed; otherwise refuse it."""
    asked = bytearray(80)
    with suppress(OSError):  # Who asked may be gone.
        fcntl.ioctl(listener, RECEIVE, asked)
        [id] = struct.unpack_from("Q", asked)
        before = len(descendants(os.getpid()))
        error, flags = (0, GO_ON) if before < most else (-EAGAIN, 0)
        fcntl.ioctl(listener, SEND, struct.pack("QqiI", id, 0, error, flags))
        for _ in range(20 if flags else 0):
            # The next fork must count this one.
            if len(descendants(os.getpid())) != before:
                break
            time.sleep(0.001)


def _wait(program: int, listener: int, most: int) -> int:
    """Wait until the program has ended, answer its forks, and return its wait status."""
    forks = select.poll()
    if listener >= 0:
        forks.register(listener, select.POLLIN)
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG if listener >= 0 else 0)
        if pid == program:
            return status
        for _, event in forks.poll(LOOK_SECONDS * 1000) if not pid else ():
            if event & select.POLLIN:
                _answer_fork(listener, most)


def main(settings: dict[str, Any]) -> NoReturn:
    """Run the program of these settings, and end with its exit code."""
    most, listener = settings["processes"], -1

    def end(*_: object) -> NoReturn:
        end_all()
        os._exit(128 + signal.SIGTERM)

    # Before the fork: from then on, this process may not end without its program.
    signal.signal(signal.SIGTERM, end)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    heard, told = socket.socketpair()
    program = _start(settings, told)
    told.close()
    if most > 1:
        _, found, _, _ = socket.recv_fds(heard, 1, 1)
        listener = found[0] if found else -1
    code = os.waitstatus_to_exitcode(_wait(program, listener, most))
    end_all()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
