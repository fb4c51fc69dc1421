"""Where an engine stages new weights: the choice, the refusals, and the estimates that follow the choice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.config import make_config
from headrace.config.memory import estimate, least_engine_bytes
from headrace.config.model_dir import ModelFacts
from headrace.config.schema import Config
from headrace.config.staging import chosen_staging, with_second_copy
from headrace.errors import ConfigError

GIB = 2**30
FACTS = ModelFacts(
    architecture="x",
    parameters=1_000_000,
    layers=2,
    kv_bytes_per_token=400,
    vocabulary=1000,
    max_positions=4096,
    hidden=100,
)


def config(**sections: dict[str, Any]) -> Config:
    minimal = {"model": {"path": "m", "dtype": "bfloat16"}, "task": {"kind": "gym", "name": "spell_backward"}}
    return make_config(minimal | sections)


@pytest.mark.parametrize(
    ("weights", "cache", "exact", "staging"),
    [
        (10, 90, True, "device"),  # Both fit.
        (10, 91, True, "none"),  # The cache must have what was asked for.
        (10, 91, False, "device"),  # The cache can be a little smaller.
        (50, 1000, False, "device"),  # It loses half of the room, and not more.
        (51, 49, False, "device"),
        (51, 50, False, "none"),
        (200, 1, False, "none"),
    ],
)
def test_a_gpu_stages_beside_the_live_weights_where_that_fits(
    weights: int, cache: int, exact: bool, staging: str
) -> None:
    found = chosen_staging("auto", weights * GIB, on_gpu=True, room=100 * GIB, cache=cache * GIB, exact=exact)
    assert found.staging == staging
    assert found.device_bytes == (weights * GIB if staging == "device" else 0)
    assert f"{weights}.0 GiB of 100.0 GiB" in found.why


def test_what_is_asked_for_is_taken() -> None:
    for asked in ("device", "host", "none"):
        found = chosen_staging(asked, 200, on_gpu=True, room=100)
        assert found.staging == asked and found.why == f'[engine] staging = "{asked}"'
        assert found.device_bytes == (200 if asked == "device" else 0)
    on_cpu = chosen_staging("auto", 200, on_gpu=False)
    assert (on_cpu.staging, on_cpu.device_bytes) == ("device", 0)


@pytest.mark.parametrize(
    ("delivery", "needs"),
    [({"send": "delta"}, '[delivery] send = "delta"'), ({"transport": "nccl"}, '[delivery] transport = "nccl"')],
)
def test_what_needs_a_second_copy_is_refused_without_one(delivery: dict[str, Any], needs: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(delivery=delivery, engine={"staging": "none"})
    assert (
        str(refused.value) == f'[engine] staging = "none" does not go together with {needs}, which needs a second copy'
    )
    assert with_second_copy(config(delivery=delivery)).staging == "device"
    assert with_second_copy(config(delivery=delivery, engine={"staging": "host"})).staging == "host"
    assert with_second_copy(config()).staging == "auto"


def test_an_adapter_is_never_a_delta() -> None:
    adapted = config(delivery={"send": "delta"}, engine={"staging": "none"}, lora={"rank": 4})
    assert with_second_copy(adapted).staging == "none"


@pytest.mark.parametrize("engine", [{"kind": "vllm", "python": "x"}, {"kind": "mine.py:Mine"}])
def test_only_embedded_engines_stage(engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'^\[engine\] staging: only engine kind "embedded" has it$'):
        config(engine=engine | {"staging": "host"})


def test_estimates_follow_the_choice() -> None:
    weights = 2 * FACTS.parameters
    by_default = estimate(config(), FACTS)["memory_bytes"]["engine"]
    for staging, second in (("device", weights), ("host", 0), ("none", 0)):
        engine = {"staging": staging}
        assert by_default - estimate(config(engine=engine), FACTS)["memory_bytes"]["engine"] == weights - second
        assert least_engine_bytes(config(engine=engine), FACTS) - least_engine_bytes(config(), FACTS) == second
    delta = config(delivery={"send": "delta"})
    assert least_engine_bytes(delta, FACTS) - least_engine_bytes(config(), FACTS) == weights
    merged, unmerged = (config(lora={"rank": 1, "serve": serve}) for serve in ("merged", "unmerged"))
    assert estimate(merged, FACTS)["memory_bytes"]["engine"] == by_default
    # The adapter of rank 1 has 2 / 100 of the parameters of the layers.
    adapter = 2 * 2 * (FACTS.parameters - 2 * 1000 * 100) // 100
    assert by_default - estimate(unmerged, FACTS)["memory_bytes"]["engine"] == weights - adapter
    in_one = msgspec.structs.replace(unmerged, engine=config(engine={"staging": "none"}).engine)
    assert estimate(in_one, FACTS)["memory_bytes"]["engine"] == by_default - weights


SHARED = {"rank": 4, "serve": "unmerged", "share_base": True}
ON_CPU = {"engine": {"device": "cpu"}, "training": {"device": "cpu"}, "model": {"path": "m"}}


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"lora": {"serve": "merged"}}, '[lora] serve = "unmerged"'),
        ({"lora": {"base": "nf4"}}, '[lora] base = "full"'),
        ({"lora": {"modules": ["norm"]}}, "[lora] modules = []"),
        ({"engine": {"kind": "mine.py:Mine"}}, 'engine kind "embedded"'),
        ({"training": {"ranks": 2}}, "one trainer rank without offload"),
        ({"training": {"offload": True}}, "one trainer rank without offload"),
        ({"training": {"device": "cuda"}}, "trainer and engines on a CPU"),
        ({"engine": {"device": "cuda"}}, "trainer and engines on a CPU"),
        ({"pipeline": {"launcher": "ray"}}, "trainer and engines on one host"),
        ({"model": {"dtype": "bfloat16"}}, "float32 on both sides"),
        ({"training": {"compute_dtype": "bfloat16"}}, "float32 on both sides"),
    ],
)
def test_a_base_that_cannot_be_shared_is_refused(changes: dict[str, dict[str, Any]], needs: str) -> None:
    whole = {"lora": SHARED, **ON_CPU}
    alone = config(**whole)
    assert alone.lora is not None and alone.lora.share_base
    for section, keys in changes.items():
        whole[section] = whole.get(section, {}) | keys
    with pytest.raises(ConfigError) as refused:
        config(**whole)
    assert str(refused.value) == f"[lora] share_base: needs {needs}"


def test_a_shared_base_is_counted_once() -> None:
    apart = config(lora={**SHARED, "share_base": False}, **ON_CPU)
    together = config(lora=SHARED, **ON_CPU)
    engine = [estimate(each, FACTS)["memory_bytes"]["engine"] for each in (apart, together)]
    assert engine[0] - engine[1] == 4 * FACTS.parameters
