"""`headrace bench delivery` on a tiny model: real processes, whose figures must fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import headrace
from tiny_models import make_model

from headrace.bench.delivery import LEGS, Row, bench_delivery, rows
from headrace.bench.delivery_sides import RANK, flip_words
from headrace.bench.options import DeliveryBench, lines
from headrace.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(directory)
    return directory


def bench(model: Path, **changes: Any) -> dict[str, Any]:
    said: list[str] = []
    found = bench_delivery(DeliveryBench(model=str(model), **{"versions": 3, "device": "cpu", **changes}), said.append)
    assert said and all("\n" not in line for line in said)
    assert all(len(line) < 200 for line in lines(found))
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


def check(row: dict[str, Any]) -> None:
    """The parts of a delivery follow each other, and are no longer than the whole."""
    assert 0 < row["trainer_lost_seconds"] <= row["ready_seconds"]
    assert 0 <= row["fetch_seconds"] < row["stage_seconds"]
    whole = row["acknowledged_seconds"]
    assert whole > max(row["ready_seconds"], row["stage_seconds"], row["swap_seconds"])
    assert row["gb_per_second"] == pytest.approx(row["bytes_on_the_wire"] / whole / 1e9)
    assert row["ratio_to_copy"] == pytest.approx(row["gb_per_second"] / row["copy_gb_per_second"])


def test_the_pause_of_an_engine_in_one_copy_is_shown_with_its_limit(model_dir: Path) -> None:
    found = bench(model_dir, transports=["shm", "tcp"], staging="none", versions=1)
    digest_seconds = found["proof"]["full"]["all_cores_digest_seconds"]
    for row in found["rows"]:
        assert row["pause_seconds"] == pytest.approx(row["swap_seconds"] + row["canary_seconds"])
        copy = row["bytes_of_weights"] / (0.7 * row["copy_gb_per_second"] * 1e9)
        assert row["pause_limit_seconds"] == pytest.approx(copy + digest_seconds + row["canary_seconds"])
    in_place, streamed = found["rows"]
    assert in_place["stage_seconds"] > 0 and streamed["stage_seconds"] == 0, "bytes of tcp come in the pause"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"staging": "disk"}, "--staging disk: one of device, host, none"),
        (
            {"staging": "none", "sends": ["delta"]},
            "--staging none: --send delta and --transport nccl need a second copy",
        ),
        ({"staging": "none", "transports": ["nccl"]}, "--staging none: --send delta and --transport nccl need a"),
    ],
)
def test_staging_that_cannot_be_measured_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        DeliveryBench(**options).check()


def test_the_command_delivers_to_two_engines(model_dir: Path) -> None:
    done = headrace(
        *("bench", "delivery", "--model-shape", str(model_dir), "--engines", "2", "--versions", "2", "--json"),
        *("--device", "cpu", "--dtype", "bfloat16"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["threads"], found["engines"], found["dtype"]) == (1, 2, "bfloat16")
    (row,), proof = found["rows"], found["proof"]["full"]
    check(row)
    assert (row["transport"], row["sent"]) == ("shm", ["full"]) and row["canary_seconds"] > 0
    parameters = sum(p.numel() for p in make_model("llama").parameters())
    assert row["bytes_of_weights"] == proof["bytes"] == 2 * parameters
    assert row["bytes_of_weights"] <= row["bytes_on_the_wire"] < 1.02 * row["bytes_of_weights"]
    assert proof["digest_over_copy"] == pytest.approx(proof["digest_seconds"] / proof["copy_seconds"])
    assert min(proof["copy_seconds"], proof["all_cores_digest_seconds"], row["trainer_lost_over_copy"]) > 0


def test_deltas_are_really_sent_by_socket_and_by_broadcast(model_dir: Path) -> None:
    found = bench(model_dir, transports=("tcp", "nccl"), sends=("delta",), changed=0.02, per_parameter=True)
    tcp, packed, single = found["rows"]
    for row in (tcp, packed, single):
        check(row)
        assert row["sent"] == ["delta"] and row["wire_over_weights"] < 0.1
    assert not packed["per_parameter"] and single["per_parameter"]
    assert tcp["ratio_to_socket"] == pytest.approx(tcp["gb_per_second"] / tcp["socket_gb_per_second"])
    assert tcp["fetch_ratio_to_socket"] > tcp["ratio_to_socket"] and "ratio_to_socket" not in packed


def test_adapters_arrive_while_an_engine_decodes(model_dir: Path) -> None:
    row = bench(model_dir, sends=("adapter",), decode=3)["rows"][0]
    check(row)
    linear = [m for n, m in make_model("llama").named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    own = 4 * RANK * sum(m.in_features + m.out_features for m in linear)
    assert row["sent"] == ["adapter"] and row["bytes_of_weights"] == own
    assert own <= row["bytes_on_the_wire"] <= 1.02 * own
    assert row["step_seconds"] > 0 and row["swap_seconds"] > 0
    legs = {name: row[f"leg_{name}_seconds"] for name in LEGS}
    assert min(legs.values()) >= 0 and legs["install"] > 0 and legs["first_step"] > 0
    assert 0 < max(legs.values()) < row["first_token_seconds"]
    assert legs["stage"] >= row["stage_seconds"]
    assert row["first_token_beyond_a_step_seconds"] == pytest.approx(row["first_token_seconds"] - row["step_seconds"])


def test_the_legs_of_one_version_are_the_time_to_its_first_token(model_dir: Path) -> None:
    row = bench(model_dir, versions=1, decode=2)["rows"][0]
    check(row)
    assert sum(row[f"leg_{name}_seconds"] for name in LEGS) == pytest.approx(row["first_token_seconds"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_versions_differ_in_the_share_of_words_that_was_asked_for(dtype: torch.dtype) -> None:
    tensor = torch.randn(100, 50).to(dtype)
    changed = flip_words(tensor, 0.03, torch.Generator().manual_seed(0))
    assert int((changed != tensor).sum()) == 150
    assert torch.allclose(changed.float(), tensor.float(), rtol=2**-6 if dtype == torch.bfloat16 else 1e-6)


def test_rows_are_transports_by_kinds() -> None:
    options = DeliveryBench(model="m", transports=("nccl", "shm"), sends=("delta", "full"), per_parameter=True)
    assert rows(options, "cpu") == [
        Row(transport="nccl", send="full"),
        Row(transport="nccl", send="full", per_parameter=True),
        Row(transport="nccl", send="delta"),
        Row(transport="nccl", send="delta", per_parameter=True),
        Row(transport="shm", send="full"),
        Row(transport="shm", send="delta"),
    ]
    with pytest.raises(UserError, match="--transport cuda_ipc: needs --device cuda"):
        rows(DeliveryBench(model="m", transports=("cuda_ipc",)), "cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"transports": ("smoke",)}, "--transport smoke: one of shm, file"),
        ({"sends": ("half",)}, "--send half: one of full, delta, adapter"),
        ({"per_parameter": True}, "--per-parameter is for --transport nccl"),
    ],
)
def test_a_mistake_is_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        DeliveryBench(model="m", **changes).check()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_that_is_no_model_ends_the_command_with_one_line() -> None:
    done = headrace("bench", "delivery", "--model-shape", "gpt-5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headrace: --model-shape gpt-5: neither a model directory nor a shape")
    assert done.stderr.count("\n") == 1
