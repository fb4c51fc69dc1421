"""How a GPU's memory is divided: by hand, and always leaving less to engines the more the trainer needs."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import make_config
from headrace.config.memory import CHUNK_BYTES, MARGIN_BYTES, engine_share, trainer_bytes
from headrace.config.model_dir import ModelFacts
from headrace.config.schema import LoraConfig

FACTS = ModelFacts(
    architecture="x",
    parameters=600_000_000,
    layers=28,
    kv_bytes_per_token=1,
    vocabulary=151_936,
    max_positions=4096,
    hidden=1024,
)
CONFIG = make_config({"model": {"path": "m", "dtype": "bfloat16"}, "task": {"kind": "gym", "name": "x"}})


def test_the_estimate_by_hand() -> None:
    # Master, gradient, two moments, the 16-bit copy, two places to publish in: 16 + 2 + 4 bytes.
    state = 600_000_000 * 22
    row = 8192 * 1024 * 2 * 34 * 28
    assert trainer_bytes(CONFIG.training, FACTS) == state + row + CHUNK_BYTES
    total = 139 << 30
    assert engine_share(CONFIG, FACTS, total) == (total - state - row - CHUNK_BYTES - MARGIN_BYTES) / total


def test_a_frozen_model_takes_what_it_is_held_in() -> None:
    full, four_bits = (trainer_bytes(CONFIG.training, FACTS, lora=LoraConfig(base=base)) for base in ("full", "nf4"))
    assert full - four_bits == 600_000_000
    mixture = msgspec.structs.replace(FACTS, experts=8)
    assert trainer_bytes(CONFIG.training, mixture, lora=LoraConfig(base="nf4")) == full
    assert full < trainer_bytes(CONFIG.training, FACTS)


def test_nothing_is_left_on_a_small_gpu() -> None:
    assert engine_share(CONFIG, FACTS, 24 << 30) < 0


@given(st.integers(1, 64), st.integers(1, 4))
def test_a_larger_pass_leaves_less(thousands: int, engines: int) -> None:
    def share(tokens: int) -> float:
        training = msgspec.structs.replace(CONFIG.training, micro_batch_tokens=tokens)
        engine = msgspec.structs.replace(CONFIG.engine, count=engines)
        return engine_share(msgspec.structs.replace(CONFIG, training=training, engine=engine), FACTS, 139 << 30)

    assert share(1000 * thousands) > share(1000 * thousands + 1000)
