"""Wrong servers and wrong starts: each is one line that says what to change."""

import socket
import threading
from pathlib import Path

import msgspec
import pytest
from vllm_stub import FACTS, Stub, serving

from headrace.config import Config, make_config
from headrace.config.model_dir import model_facts
from headrace.config.schema import EngineConfig
from headrace.engines.vllm.building import check_hosts, examine, refusals
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.memory import Budget, budget
from headrace.engines.vllm.server import VllmServer, check_interpreter, choose_port, last_word
from headrace.errors import UserError
from headrace_vllm_plugin.wire import Facts

WRONG: list[tuple[dict[str, object], str]] = [
    ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
    ({"backend": "nccl"}, "(weight transfer: nccl): start it with --weight-transfer-config"),
    ({"backend": ""}, "(weight transfer: none)"),
    (
        {"quantized_checkpoint": True, "quantization": "fp8"},
        "the files of its model hold weights that are quantised already (fp8)",
    ),
    ({"vocabulary": 49152}, "another model than [model] path: stub has a vocabulary of 49152, not 64"),
    ({"dtype": "bfloat16"}, "start it with --dtype float32"),
    ({"position_noise": False}, "start it with --logits-processors headrace_vllm_plugin.noise:PositionNoise"),
    ({"max_length": 128}, "start it with --max-model-len 4096"),
    ({"protocol": 0}, "speaks protocol 0"),
    ({"vllm": "0.31.2"}, "vLLM 0.31.2 is too old: 0.32 or newer"),
]


@pytest.mark.parametrize(("change", "line"), WRONG)
def test_each_thing_that_is_missing_is_one_line(change: dict[str, object], line: str) -> None:
    facts: Facts = msgspec.structs.replace(FACTS, **change)
    [found] = refusals(facts, vocabulary=64, dtype="float32", max_length=4096)
    assert line in found and "\n" not in found


def test_newer_servers_and_other_spellings_are_fine() -> None:
    facts = msgspec.structs.replace(FACTS, vllm="1.0.0rc1+cpu", logprobs_mode="LogprobsMode.PROCESSED_LOGPROBS")
    assert refusals(facts, vocabulary=64, dtype="float32", max_length=4096) == []


@pytest.mark.parametrize(
    ("path", "status", "answer", "line"),
    [
        ("/collective_rpc", 401, {"error": "Unauthorized"}, "put its --api-key into VLLM_API_KEY"),
        ("/collective_rpc", 404, {"detail": "Not Found"}, "VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", 500, {"error": {"message": "no attribute 'headrace_hello'"}}, "--worker-extension-cls"),
        ("/collective_rpc", 500, {"error": {"message": "out of luck"}}, "cannot be asked what it is: out of luck"),
        ("/inference/v1/generate", 403, {"error": "disabled"}, "start it with --enable-scale-out"),
        ("/inference/v1/generate", 401, {"error": "Unauthorized"}, "put its --api-key into VLLM_API_KEY"),
        ("/inference/v1/generate", 500, {"error": "x"}, "it does not generate: x"),
    ],
)
async def test_a_server_that_answers_wrongly_is_refused(path: str, status: int, answer: object, line: str) -> None:
    async with serving(Stub()) as stub:
        stub.statuses[path] = (status, answer)
        async with VllmClient(stub.url, deadline=5) as client:
            with pytest.raises(UserError) as caught:
                await examine(client, vocabulary=64, dtype="float32", max_length=4096)
        assert line in str(caught.value) and stub.url in str(caught.value) and "\n" not in str(caught.value)


async def test_a_good_server_is_taken_also_if_it_was_left_paused() -> None:
    async with serving(Stub()) as stub:
        stub.paused = True
        async with VllmClient(stub.url, deadline=5) as client:
            facts = await examine(client, vocabulary=64, dtype="float32", max_length=4096)
        assert facts == FACTS and not stub.paused


def test_shared_memory_does_not_leave_the_host() -> None:
    check_hosts(["http://127.0.0.1:1", "http://localhost:2"], "shm")
    check_hosts(["http://10.0.0.1:1"], "tcp")
    with pytest.raises(UserError, match=r'http://10\.0\.0\.1:1 is on another host, which "shm" does not reach'):
        check_hosts(["http://127.0.0.1:1", "http://10.0.0.1:1"], "shm")


def made(tmp_path: Path, **config: object) -> VllmServer:
    engine = EngineConfig(kind="vllm", device="cpu", slots=8, **config)  # type: ignore[arg-type]
    model = Path("examples/quickstart/model")
    return VllmServer(
        model=model, config=engine, log=tmp_path / "v.log", key="secret", max_length=100, weights="random"
    )


def test_the_key_is_not_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    here = made(tmp_path, threads=3, arguments=["--port", "1"])
    command = here.arguments("python", 8000)
    assert not any("secret" in word for word in command) and command[-2:] == ["--port", "1"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--load-format") + 1] == "dummy", "random weights are not in the directory"
    env = here.environment()
    assert (env["VLLM_API_KEY"], env["OMP_NUM_THREADS"]) == ("secret", "3") and "PYTHONPATH" not in env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind", "every server of a fleet would be bound to the same cores"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "an unbound worker needs no process of its own"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "2-4")
    bound = here.environment()
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "2-4" and "VLLM_ENABLE_V1_MULTIPROCESSING" not in bound


def test_the_cache_holds_every_slot_at_its_longest(tmp_path: Path) -> None:
    per_token = 2 * 3 * 2 * 64 * 4  # keys and values, layers, heads, head size, bytes
    command = made(tmp_path).arguments("python", 1)
    assert int(command[command.index("--kv-cache-memory-bytes") + 1]) >= 8 * 128 * per_token


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_several_workers_divide_the_model(tmp_path: Path) -> None:
    assert "--tensor-parallel-size" not in made(tmp_path).arguments("python", 1)
    server = made(tmp_path, gpus_per_engine=2)
    assert value(server.arguments("python", 1), "--tensor-parallel-size") == "2"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in server.environment(), "each of them needs a process"


GIB = 1 << 30


def configured(*settings: str) -> Config:
    given = {"model": {"path": "examples/quickstart/model", "weights": "random"}, "task": {"kind": "gym", "name": "x"}}
    return make_config(given, ["engine.kind=vllm", "engine.python=python", "engine.device=cuda", *settings])


def test_a_server_beside_the_trainer_gets_what_the_trainer_leaves(tmp_path: Path) -> None:
    """vLLM must not measure: the trainer takes and frees memory at the same time."""
    config = configured("engine.slots=8", "engine.max_length=100")
    found = budget(config, 80 * GIB, ("trainer-0",))
    assert found is not None and 0 < found.share < 0.9
    per_token = 2 * 3 * 2 * 64 * 4
    assert 8 * 100 * per_token <= found.cache_bytes < 2 * 8 * 100 * per_token, "no more than the slots can use"
    server = made(tmp_path)
    server.config = config.engine
    server.budget = found
    command = server.arguments("python", 1)
    assert int(value(command, "--kv-cache-memory-bytes")) == found.cache_bytes
    assert float(value(command, "--gpu-memory-utilization")) == pytest.approx(found.share, abs=1e-4)
    # On a small GPU the cache is what is left.
    most = configured("engine.cache_tokens=40000000")
    small, large = (budget(most, size * GIB, ("trainer-0",)) for size in (24, 40))
    assert small is not None and large is not None and small.cache_bytes < large.cache_bytes


def test_a_server_of_its_own_leaves_room_for_the_weights_that_it_stages() -> None:
    config, total = configured(), 40 * GIB
    alone = budget(config, total)
    assert alone is not None and alone.cache_bytes == 0, "vLLM measures"
    parameters = model_facts(Path("examples/quickstart/model"), "random").parameters
    assert alone.share == pytest.approx(0.92 - 4 * parameters / total)
    given = budget(configured("engine.memory_fraction=0.5"), total)
    assert given is not None and given.share == pytest.approx(0.5 - 4 * parameters / total)
    # Two workers read their slices where the trainer wrote them.
    two = budget(configured("engine.memory_fraction=0.5", "engine.gpus_per_engine=2"), total)
    assert two is not None and two.share == 0.5
    both = budget(configured(), total, ("engine-1",))
    assert both is not None and both.share == pytest.approx(0.45 - 4 * parameters / total)


def test_a_server_that_does_not_fit_is_refused_in_one_line() -> None:
    line = r"^\[engine\] memory_fraction: a vLLM server gets \d+\.\d GiB of a GPU of 10 GiB beside trainer-0, and "
    with pytest.raises(UserError, match=line) as caught:
        budget(configured("engine.memory_fraction=0.2"), 10 * GIB, ("trainer-0",))
    assert "\n" not in str(caught.value)


def test_of_an_unknown_gpu_only_the_given_share_is_known() -> None:
    assert budget(configured(), 0) is None
    assert budget(configured("engine.memory_fraction=0.4"), 0) == Budget(0.4)


def test_interpreters_and_ports(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\[engine\] python: .*nothing is not there"):
        check_interpreter(str(tmp_path / "nothing"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"\[engine\] port: {port} on 127\.0\.0\.1 is taken"):
            choose_port(port)
        # A server that was killed may hold its port a little longer.
        timer = threading.Timer(0.2, taken.close)
        timer.start()
        assert choose_port(port, patience=10.0) == port
    assert choose_port() > 0


async def test_a_server_that_dies_at_once_leaves_its_last_word(tmp_path: Path) -> None:
    # A stand-in for an interpreter that fails like one without vLLM: the real one is tried by `make test-vllm`.
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'starting'\necho \"ModuleNotFoundError: No module named 'vllm'\" >&2\nexit 1\n")
    python.chmod(0o755)
    server = made(tmp_path, python=str(python))
    server.start()
    with pytest.raises(UserError) as caught:
        await server.ready(10.0)
    await server.stop()
    log = tmp_path / "v.log"
    assert str(caught.value) == (
        f"the vLLM server ended (exit code 1): ModuleNotFoundError: No module named 'vllm' ({log})"
    )


async def test_a_server_that_is_killed_has_no_last_word(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ValueError: of a request'\nkill -9 $$\n")
    python.chmod(0o755)
    server = made(tmp_path, python=str(python))
    server.start()
    with pytest.raises(UserError) as caught:
        await server.ready(10.0)
    await server.stop()
    assert str(caught.value) == f"the vLLM server ended (killed by signal 9) ({tmp_path / 'v.log'})"


def test_the_last_word_is_the_first_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore pid=3) INFO 11-15 08:39:33 [core.py:1] fine\n"
        "(EngineCore pid=3) WARNING 11-15 08:39:33 [kernels.py:4] ImportError: no faster kernels\n"
        "(EngineCore pid=3) ERROR 11-15 08:39:33 [core.py:9] Traceback (most recent call last):\n"
        "(EngineCore pid=3) ERROR 11-15 08:39:33 [core.py:9] ValueError: no weights in /model\n"
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_word(log) == "ValueError: no weights in /model"
    log.write_text("usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --x\n")
    assert last_word(log) == "api_server.py: error: unrecognized arguments: --x"
    log.write_text(
        "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=1)   Value error, User-specified max_model_len (9) is greater than 4 [type=value_error]\n"
    )
    assert last_word(log).startswith("Value error, User-specified max_model_len (9) is greater than 4")
    log.write_text(
        "(APIServer pid=1) ERROR 11-15 08:39:33 [x.py:9] ValueError: a request that was refused\n"
        "(EngineCore pid=3) ERROR 11-15 08:39:33 [core.py:9] EngineCore encountered a fatal error.\n"
        "(EngineCore pid=3) ERROR 11-15 08:39:33 [core.py:9] RuntimeError: no such kernel\n"
        + "(APIServer pid=1) ERROR 11-15 08:39:33 [x.py:9] EngineDeadError: EngineCore encountered an issue.\n"
        * 2000
    )
    assert last_word(log) == "RuntimeError: no such kernel"
    log.write_text("one\n\nlast\n\n")
    assert last_word(log) == "last"
