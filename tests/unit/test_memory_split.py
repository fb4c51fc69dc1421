"""How a GPU's memory is divided: by hand, and always leaving less to engines the more the trainer needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Config, make_config
from headrace.config.memory import (
    CHUNK_LOGITS,
    MARGIN_BYTES,
    TrainerMemory,
    engine_share,
    estimate,
    least_engine_bytes,
    second_copy,
    served_bytes,
    share_beside_trainer,
    teacher_facts,
    trainer_memory,
)
from headrace.config.model_dir import ModelFacts, model_facts
from headrace.config.schema import LoraConfig
from headrace.config.scorers import TeacherConfig
from headrace.errors import UserError
from headrace.training.logprobs import CHUNK_ELEMENTS, DEVICE_CHUNKS

FACTS = ModelFacts(
    architecture="x",
    parameters=600_000_000,
    layers=28,
    kv_bytes_per_token=1,
    vocabulary=151_936,
    max_positions=4096,
    hidden=1024,
)
LARGE = msgspec.structs.replace(FACTS, parameters=7_600_000_000, hidden=3584)
CONFIG = make_config({"model": {"path": "m", "dtype": "bfloat16"}, "task": {"kind": "gym", "name": "x"}})
H200 = 139 << 30
TABLE, LARGE_TABLE = 151_936 * 1024, 151_936 * 3584
"""Parameters of one embedding."""


def changed(**sections: dict[str, Any]) -> Config:
    replaced = {name: msgspec.structs.replace(getattr(CONFIG, name), **changes) for name, changes in sections.items()}
    return msgspec.structs.replace(CONFIG, **replaced)


def with_lora(**options: Any) -> Config:
    return msgspec.structs.replace(CONFIG, lora=LoraConfig(**options))


def test_a_chunk_is_as_large_as_the_trainer_makes_it() -> None:
    assert CHUNK_LOGITS == CHUNK_ELEMENTS * DEVICE_CHUNKS


def test_all_weights_of_a_small_model() -> None:
    # A chunk in float32, its gradient in 16 bits; the projection's gradient twice in float32, and once as it is left.
    head = 268_435_456 * 6 + TABLE * 10
    row = 8192 * 1024 * 2 * 34 * 28
    # Master, gradient, two moments and the 16-bit copy; two places to publish in.
    found = trainer_memory(CONFIG, FACTS)
    assert found == TrainerMemory(600_000_000 * 18, 600_000_000 * 4, 0, 0, 0, row + head)
    assert found.total == sum(found)
    assert engine_share(CONFIG, FACTS, H200) == (H200 - found.total - MARGIN_BYTES) / H200


def test_teachers_that_follow_the_policy_are_copies_in_float32() -> None:
    ema = TeacherConfig(policy="ema")
    for teachers, copies in (({"a": ema}, 1), ({"a": ema, "b": TeacherConfig(policy="earlier", versions_ago=3)}, 5)):
        config = msgspec.structs.replace(CONFIG, scorers=teachers)
        assert trainer_memory(config, FACTS).policies == copies * 4 * 600_000_000


def test_float32_has_no_second_copy_of_the_weights() -> None:
    found = trainer_memory(changed(training={"compute_dtype": "float32"}), FACTS)
    assert found.state == 600_000_000 * 16
    assert found.computing == 8192 * 1024 * 4 * 34 * 28 + 268_435_456 * 8 + TABLE * 12


def test_what_is_not_compiled_makes_more_of_a_logit() -> None:
    plain = trainer_memory(changed(training={"compile": False}), FACTS)
    assert plain.computing - trainer_memory(CONFIG, FACTS).computing == 268_435_456 * (16 - 6)


def test_gradients_of_a_pass_count_where_they_are_more_than_its_activations() -> None:
    short = changed(training={"activation_checkpointing": True, "micro_batch_tokens": 256})
    assert trainer_memory(short, LARGE).computing == 7_600_000_000 * 2


def test_a_large_model_fits_by_ranks_or_offloaded_and_not_alone() -> None:
    alone = changed(training={"activation_checkpointing": True})
    assert trainer_memory(alone, LARGE).state == 7_600_000_000 * 18
    assert engine_share(alone, LARGE, H200) < 0

    layer = (7_600_000_000 - 2 * LARGE_TABLE) // 28
    gathered = 2 * (2 * LARGE_TABLE + 2 * layer) + 4 * 7_600_000_000
    # Inputs of all layers, twice, and one layer that is computed again.
    computing = 8192 * 3584 * 2 * (2 * 28 + 34) + 268_435_456 * 6 + LARGE_TABLE * 10
    offloaded = changed(training={"activation_checkpointing": True, "offload": True})
    assert trainer_memory(offloaded, LARGE) == TrainerMemory(0, 7_600_000_000 * 4, 0, 0, gathered, computing)
    assert 0.4 < engine_share(offloaded, LARGE, H200) < 0.5

    eight = changed(training={"activation_checkpointing": True, "ranks": 8})
    assert trainer_memory(eight, LARGE) == TrainerMemory(950_000_000 * 16, 950_000_000 * 4, 0, 0, gathered, computing)
    assert 0.5 < engine_share(eight, LARGE, H200) < 0.6


def test_gradients_are_divided_at_once_where_a_batch_is_one_pass() -> None:
    one_pass = changed(training={"ranks": 8, "micro_batch_tokens": 4096}, buffer={"groups": 1})
    layer = (600_000_000 - 2 * TABLE) // 28
    assert trainer_memory(one_pass, FACTS).gathered == 2 * (2 * TABLE + 2 * layer) + 4 * (2 * TABLE + layer)


def test_other_policies_hold_copies_of_what_is_trained() -> None:
    kl = {"kl": "k3"}
    both = kl | {"loss": "decoupled_ppo", "proximal": "recomputed"}
    assert trainer_memory(changed(algorithm=kl), FACTS).policies == 600_000_000 * 2
    assert trainer_memory(changed(algorithm=both), FACTS).policies == 600_000_000 * 4
    assert trainer_memory(changed(algorithm={"proximal": "recomputed"}), FACTS).policies == 0, (
        "only decoupled_ppo has it"
    )
    # Shards are in float32, and lie where they are trained.
    assert trainer_memory(changed(algorithm=kl, training={"ranks": 8}), FACTS).policies == 600_000_000 * 4 // 8
    assert trainer_memory(changed(algorithm=kl, training={"offload": True}), FACTS).policies == 0


def test_an_adapter_has_its_reference_in_itself() -> None:
    adapted = with_lora(rank=16)
    kl = msgspec.structs.replace(adapted.algorithm, kl="k3")
    assert trainer_memory(msgspec.structs.replace(adapted, algorithm=kl), FACTS).policies == 0
    proximal = msgspec.structs.replace(kl, loss="decoupled_ppo", proximal="recomputed")
    adapter = 2 * 16 * (600_000_000 - 2 * TABLE) // 1024
    assert trainer_memory(msgspec.structs.replace(adapted, algorithm=proximal), FACTS).policies == adapter * 2


def test_the_teacher_is_whole_on_each_rank() -> None:
    for training in ({}, {"ranks": 8}):
        assert trainer_memory(changed(training=training), FACTS, LARGE).teacher == 7_600_000_000 * 2
    assert trainer_memory(changed(training={"offload": True}), FACTS, LARGE).teacher == 0
    assert teacher_facts(CONFIG) is None


def test_only_an_adapter_has_moments() -> None:
    adapter = 2 * 16 * (7_600_000_000 - 2 * LARGE_TABLE) // 3584
    full = trainer_memory(with_lora(rank=16), LARGE)
    assert full.state == 7_600_000_000 * 2 + adapter * 18
    assert full.publishing == adapter * 2 * 4, "merged adapters travel in float32"
    assert full.computing == 8192 * 3584 * 2 * 34 * 28 + 268_435_456 * 6, "the projection is frozen"
    four_bits = trainer_memory(with_lora(rank=16, base="nf4"), LARGE)
    assert four_bits.state == 2 * LARGE_TABLE * 2 + (7_600_000_000 - 2 * LARGE_TABLE) * 9 // 16 + adapter * 18
    mixture = msgspec.structs.replace(LARGE, experts=8)
    assert trainer_memory(with_lora(rank=16, base="nf4"), mixture) == full, "experts are held in full"
    rounded = (7_600_000_000 - 2 * LARGE_TABLE) * 9 // 16
    ranks = msgspec.structs.replace(with_lora(rank=16, base="nf4"), training=changed(training={"ranks": 4}).training)
    assert trainer_memory(ranks, LARGE).state == -(-(adapter * 16 + 2 * LARGE_TABLE * 4) // 4) + rounded
    offloaded = changed(training={"offload": True}).training
    assert trainer_memory(msgspec.structs.replace(ranks, training=offloaded), LARGE).state == rounded
    head = trainer_memory(with_lora(rank=16, modules=["lm_head"]), LARGE)
    assert head.state - full.state == LARGE_TABLE * 18


def test_other_transports_publish_from_the_host() -> None:
    assert trainer_memory(changed(delivery={"transport": "shm"}), FACTS).publishing == 0
    assert trainer_memory(changed(delivery={"dtype": "float32"}), FACTS).publishing == 600_000_000 * 8


def test_nothing_is_left_on_a_small_gpu() -> None:
    assert engine_share(CONFIG, FACTS, 24 << 30) < 0


def _write_model(path: Path) -> str:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": 151_936}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "x", **sizes}))
    return str(path)


def test_a_share_that_was_given_is_taken_if_it_fits(tmp_path: Path) -> None:
    path = {"path": _write_model(tmp_path), "weights": "random"}
    assert share_beside_trainer(changed(model=path, engine={"memory_fraction": 0.3}), H200) == 0.3
    assert 0.5 < share_beside_trainer(changed(model=path), H200) < 1
    with pytest.raises(
        UserError, match=r"^trainer and engine do not fit on one GPU of 24 GiB: the trainer is estimated"
    ):
        share_beside_trainer(changed(model=path), 24 << 30)
    expected = (
        r"^\[engine\] memory_fraction = 0.45: 2 engines take 125.1 GiB of a GPU of 139 GiB, and the trainer is "
        r"estimated to need \d+\.\d GiB \(lower it, or "
    )
    with pytest.raises(UserError, match=expected) as refused:
        share_beside_trainer(changed(model=path, engine={"memory_fraction": 0.45}), H200, 2)
    assert "\n" not in str(refused.value)


def test_a_given_share_may_take_all_that_the_trainer_leaves(tmp_path: Path) -> None:
    path = {"path": _write_model(tmp_path), "weights": "random"}
    half = changed(model=path, engine={"memory_fraction": 0.5})
    facts = model_facts(tmp_path, "random")
    total = trainer_memory(half, facts).total * 2
    assert share_beside_trainer(half, total) == 0.5
    with pytest.raises(UserError, match=r"^\[engine\] memory_fraction = 0.51: "):
        share_beside_trainer(changed(model=path, engine={"memory_fraction": 0.51}), total)
    assert engine_share(half, facts, total) < 0.5, "by default there is a margin"


def test_the_check_counts_what_the_division_counts() -> None:
    gpu = {"device": "cuda"}
    found = estimate(changed(training=gpu), FACTS)
    assert found["memory_bytes"]["trainer"] == trainer_memory(changed(training=gpu), FACTS).total
    ranked = changed(training=gpu | {"ranks": 8})
    assert estimate(ranked, FACTS)["memory_bytes"]["trainer"] == trainer_memory(ranked, FACTS).total
    assert estimate(ranked, FACTS)["trainer_ranks"] == 8
    offloaded = estimate(changed(training=gpu | {"offload": True}), FACTS)["memory_bytes"]
    assert offloaded["offloaded"] == 600_000_000 * 16 and found["memory_bytes"]["offloaded"] == 0


def test_a_cpu_holds_a_quarter_of_the_logits() -> None:
    found = estimate(changed(training={"device": "cpu"}), FACTS)["memory_bytes"]["trainer"]
    head = 67_108_864 * 16 + TABLE * 12
    assert found == 600_000_000 * 16 + 8192 * 1024 * 4 * 34 * 28 + head


@given(st.integers(1, 64), st.integers(1, 4))
def test_a_larger_pass_leaves_less(thousands: int, engines: int) -> None:
    def share(tokens: int) -> float:
        config = changed(training={"micro_batch_tokens": tokens}, engine={"count": engines})
        return engine_share(config, FACTS, H200)

    assert share(1000 * thousands) > share(1000 * thousands + 1000)


models = st.builds(
    lambda parameters, layers, hidden, vocabulary: msgspec.structs.replace(
        FACTS, parameters=parameters, layers=layers, hidden=hidden, vocabulary=vocabulary
    ),
    st.integers(10**6, 10**11),
    st.integers(1, 100),
    st.integers(64, 10_000),
    st.integers(1000, 300_000),
)
passes = st.fixed_dictionaries(
    {
        "micro_batch_tokens": st.integers(128, 65_536),
        "activation_checkpointing": st.booleans(),
        "compute_dtype": st.sampled_from([None, "float32", "bfloat16"]),
        "compile": st.booleans(),
    }
)


@given(models, passes, st.integers(1, 64), st.sampled_from(["none", "k3"]), st.booleans())
def test_more_ranks_never_need_more(
    facts: ModelFacts, training: dict[str, Any], ranks: int, kl: str, offload: bool
) -> None:
    def needed(count: int) -> int:
        config = changed(training=training | {"ranks": count, "offload": offload}, algorithm={"kl": kl})
        return trainer_memory(config, facts).total

    assert needed(ranks + 1) <= needed(ranks)


@given(models, passes, st.integers(1, 64), st.booleans(), models)
def test_another_policy_never_needs_less_and_offloading_never_more(
    facts: ModelFacts, training: dict[str, Any], ranks: int, offload: bool, teacher: ModelFacts
) -> None:
    training = training | {"ranks": ranks, "offload": offload}

    def needed(teacher: ModelFacts | None = None, **algorithm: str) -> int:
        return trainer_memory(changed(training=training, algorithm=algorithm), facts, teacher).total

    kl = needed(kl="k1")
    assert needed() <= kl <= needed(kl="k1", loss="decoupled_ppo", proximal="recomputed")
    assert needed() <= needed(teacher)
    assert trainer_memory(changed(training=training | {"offload": True}), facts).total <= needed()


def test_fp8_halves_the_live_weights_and_is_staged_in_both_forms() -> None:
    rounded = 600_000_000 - 2 * TABLE
    live = 2 * 2 * TABLE + rounded
    for staging, expected in (("device", 600_000_000 * 2 + live), ("host", live)):
        fp8 = changed(engine={"quantize": "fp8", "staging": staging})
        assert served_bytes(fp8, FACTS) == live and second_copy(fp8, FACTS) == expected
    fitting = changed(engine={"quantize": "fp8", "cache_tokens": 64})
    assert least_engine_bytes(fitting, FACTS) == 2 * live + 64 * 2 // 4
    assert served_bytes(changed(engine={"quantize": "none"}), FACTS) == 600_000_000 * 2
    sparse = msgspec.structs.replace(FACTS, experts=4)
    assert served_bytes(changed(engine={"quantize": "fp8"}), sparse) == 600_000_000 * 2, "experts are not rounded"
