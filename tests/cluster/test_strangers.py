"""Strangers at the ports of a run under Ray: they get nothing, the run goes on, and its private keys stay private."""

from __future__ import annotations

import json
import secrets
import stat
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from attacked_run import NAME, SECONDS, Run, attacked_run, listeners
from search import forms

from headrace.channel.codec import PROTOCOL, pack
from headrace.channel.heartbeats import Hello
from headrace.delivery.transports.tcp_wire import KEYS, ReadRequest, RunKeys
from headrace.review.summary import read_ledgers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONNECTIONS = 2000
GATEWAY = "gateway.json"
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE".ljust(64, b"\0")
SIGNATURE = GREETING[:10]
LONG_COMMAND = b"\x06"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with attacked_run() as made:
        yield made


@pytest.fixture(scope="module")
def ports(run: Run) -> dict[str, str]:
    return dict(listeners(run.hosts))


@pytest.fixture(scope="module")
def keys(run: Run) -> RunKeys:
    return msgspec.json.decode((run.path / KEYS).read_bytes(), type=RunKeys)


@pytest.fixture(scope="module")
def hub_key(run: Run) -> str:
    """The public key of the hub, which is an argument of every worker."""
    option = "--server-key="
    words = [word for host in run.hosts for words in host.processes().values() for word in words]
    [key] = {word.removeprefix(option) for word in words if word.startswith(option)}
    return key


def commands(stream: bytes) -> list[str]:
    """Return the names of the commands of ZMTP in a stream, after its greeting. With CURVE, messages are commands."""
    names, at = [], len(GREETING)
    while at + 9 < len(stream):
        long = stream[at] & 2
        size = int.from_bytes(stream[at + 1 : at + 9]) if long else stream[at + 1]
        at += 9 if long else 2
        names.append(stream[at + 1 : at + 1 + stream[at]].decode(errors="replace"))
        at += size
    return names


def test_these_ports_are_open_and_no_others(run: Run) -> None:
    """The tests below attack these ports. One that is new must be attacked too, and described in SECURITY.md."""
    found = listeners(run.hosts)
    assert [role for role, _ in found] == ["controller", "gateway", "trainer"]
    assert {address.partition(":")[0] for _, address in found} == {run.hosts[0].address}


def test_nobody_is_let_in_without_a_key_of_the_run(
    run: Run, ports: dict[str, str], keys: RunKeys, hub_key: str
) -> None:
    hello = [bytes(frame).hex() for frame in pack("event", 0, Hello(protocol=PROTOCOL))]
    question = [msgspec.msgpack.encode(ReadRequest(1, 0, 1, 0, 0)).hex()]
    own, other = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
    hub = {"do": "knock", "address": ports["controller"], "name": "engine-1", "frames": hello}
    trainer = {"do": "knock", "address": ports["trainer"], "name": "engine-1", "frames": question}
    tasks = [{**hub, "keys": tried} for tried in ([], [hub_key, *own], [other[0], *own])]
    tasks += [{**trainer, "keys": tried} for tried in ([], [keys.server_public, *own], [other[0], *own])]
    assert run.stranger_gets(tasks) == [{"let_in": False, "received": []}] * 6
    run.goes_on()
    # The stranger would have noticed an answer, because keys of the run get one. Nothing is sent to the hub.
    worker = [hub_key, *next(iter(run.pairs("worker").items()))]
    client = [keys.server_public, keys.client_public, keys.client_secret]
    tasks = [{**hub, "keys": worker, "name": "a", "frames": []}, {**trainer, "keys": client}]
    welcomed, answered = run.stranger_gets(tasks)
    assert welcomed == {"let_in": True, "received": []} and answered["let_in"] and answered["received"]


def test_bytes_of_a_stranger_get_no_answer(run: Run, ports: dict[str, str]) -> None:
    noise = secrets.token_bytes(1 << 20)
    endless = [GREETING + LONG_COMMAND + size.to_bytes(8) + noise for size in (1 << 62, 1 << 29)]
    tasks = [
        {"do": "say", "address": ports[role], "parts": [said.hex()]}
        for role in ("controller", "trainer")
        for said in (noise, SIGNATURE + noise, *endless)
    ]
    for got in run.stranger_gets(tasks):
        # The other end has greeted, as it greets everybody, and has closed the connection.
        assert bytes.fromhex(got)[:10] in (b"", SIGNATURE)
        assert commands(bytes.fromhex(got)) == []
    run.goes_on()


def test_what_was_recorded_opens_nothing(run: Run, ports: dict[str, str]) -> None:
    """The bytes of an engine's own connections, from their beginning, as they were on the network."""
    recorded = json.loads(run.recorder.communicate("", timeout=SECONDS)[0])
    tasks = []
    for role in ("controller", "trainer"):
        port = int(ports[role].partition(":")[2])
        stream = max((bytes.fromhex(stream) for at, stream in recorded if at == port), key=len)
        assert commands(stream)[:3] == ["HELLO", "INITIATE", "MESSAGE"]
        hello_end = stream.index(b"\x08INITIATE") - 9
        parts = [stream[: len(GREETING)], stream[len(GREETING) : hello_end], stream[hello_end:]]
        tasks.append({"do": "say", "address": ports[role], "parts": [part.hex() for part in parts]})
    # The first half of a handshake is the same for everybody. Only who has the secret key can finish it.
    assert [commands(bytes.fromhex(got)) for got in run.stranger_gets(tasks)] == [["WELCOME"], ["WELCOME"]]
    run.goes_on()


def test_the_gateway_answers_nobody_without_its_key(run: Run, ports: dict[str, str]) -> None:
    key = json.loads((run.path / GATEWAY).read_text())["api_key"]
    head = "GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\r\n"
    said = [*(head.format(tried).encode() for tried in ("", "wrong", key)), secrets.token_bytes(1 << 10)]
    got = run.stranger_gets([{"do": "say", "address": ports["gateway"], "parts": [text.hex()]} for text in said])
    *known, noise = [bytes.fromhex(answer)[9:12] for answer in got]
    assert known == [b"401", b"401", b"200"] and noise in (b"400", b"")
    run.goes_on()


def test_two_thousand_connections_at_every_port_do_no_harm(run: Run, ports: dict[str, str]) -> None:
    tasks = [{"do": "hold", "address": address, "count": CONNECTIONS} for address in ports.values()]
    with run.stranger_does(tasks) as stranger:
        assert [stranger.stdout.readline() for _ in tasks] == [f"{CONNECTIONS}\n"] * len(tasks)
        run.goes_on()
        got = json.loads(stranger.communicate("enough\n" * len(tasks), timeout=SECONDS)[0])
    assert {answer for answers in got for answer in answers} <= {"", SIGNATURE.hex()}
    run.goes_on()


def test_private_keys_are_in_their_own_files_and_nowhere_else(run: Run, keys: RunKeys, hub_key: str) -> None:
    controller, workers = run.pairs("controller"), run.pairs("worker")
    assert set(controller) == {hub_key, keys.server_public, keys.client_public}
    assert len(workers) == 4
    gateway_key = json.loads((run.path / GATEWAY).read_text())["api_key"]
    found = run.search(
        hub=hub_key, worker=next(iter(workers)), gateway=gateway_key, directory=run.shared.name, ray="raylet"
    )
    away = run.hosts[1]
    [copy] = away.path("/tmp").glob(f"headrace-host-*/{NAME}/{KEYS}")
    its_name = f"{away.name}: /tmp/{copy.relative_to(away.path('/tmp'))}"
    assert found["secret keys"] == {("file", f"run/{KEYS}"), ("file", its_name)}
    assert found["gateway"] == {("file", f"run/{GATEWAY}")}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (copy, run.path / KEYS, run.path / GATEWAY)} == {0o600}
    # The search reaches every place: public keys and the name of a directory are where they should be.
    assert ("memory", "host1: gcs_server") in found["hub"]
    assert ("arguments", "host2: python -m headrace.cluster.worker_main") in found["hub"]
    assert "unnamed file" in {kind for kind, _ in found["worker"]}
    assert {"environment", "file"} <= {kind for kind, _ in found["directory"]}
    for host in run.hosts:
        assert any(kind == "file" and name.startswith(f"{host.name}: /tmp/ray/") for kind, name in found["ray"])


def test_the_run_ends_in_order_and_leaves_no_key(run: Run) -> None:
    said, mistakes = run.end()
    assert (run.process.returncode, mistakes) == (0, "")
    assert read_ledgers(run.path)["balanced"]
    assert run.ask("SELECT process, reason FROM restarts") == []
    assert {"summary.json", "report.html", "journal.db", "logs"} <= {path.name for path in run.path.iterdir()}
    logs = {path.name: path.read_text() for path in (run.path / "logs").iterdir()}
    assert [name for name, log in logs.items() if "Too many open files" in log] == []
    assert run.search()["secret keys"] == set()
    assert not any(form in said.encode() for form in forms(run.mark))
