"""Adapters that change under running sequences: what is served is what the trainer's peft model computes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from tiny_models import join, make_model, plain, prompts, reference_greedy, reference_logprobs, request, run_out

from headrace.config.schema import EngineConfig, LoraConfig
from headrace.delivery.base import Manifest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.engines.base import Delta
from headrace.engines.embedded.core import EngineCore
from headrace.errors import DeliveryError
from headrace.models.attention import check_model
from headrace.models.loading import named_weights
from headrace.models.lora import Adapter, adapter_weights

Mode = Literal["merged", "unmerged"]
SPEC = LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "v_proj", "o_proj", "down_proj"])
CANARY = np.arange(1, 9, dtype=np.int32)
BASE = make_model("llama")


class LoraTrainer:
    """Publishes adapters of one peft model. Version v is the adapter of seed v; 0 is the base model itself."""

    def __init__(self) -> None:
        config = PeftConfig(r=SPEC.rank, lora_alpha=SPEC.alpha, target_modules=SPEC.targets)
        self._model = get_peft_model(plain(BASE), config).eval()
        self._adapter = adapter_weights(self._model)
        self._publisher = Publisher(sender("shm", SenderSettings(run_id=uuid.uuid4().hex[:8])), "float32", 1e-3, CANARY)

    def at(self, version: int) -> Any:
        """The peft model with the adapter of this version."""
        noise = torch.Generator().manual_seed(version)
        for name, tensor in self._adapter.items():
            drawn = 0.3 * torch.randn(tensor.shape, generator=noise)
            tensor.copy_(drawn * (version > 0) if ".lora_B." in name else drawn)
        return self._model

    def publish(self, version: int) -> Manifest:
        model = self.at(version)

        def score(ids: np.ndarray) -> np.ndarray:
            return picked(model, ids[:1], ids[1:]).astype(np.float32)

        manifest = self._publisher.publish(version, version - 1, version, self._adapter, score).result(30)
        # The last two stay readable.
        self._publisher.acknowledged(version - 1)
        return manifest

    def check(self, prompt: np.ndarray, delta: Delta) -> None:
        """Each log-probability is that of a plain forward over the whole prefix under the version of its tag."""
        for version in set(delta.versions.tolist()):
            mine = delta.versions == version
            expected = picked(self.at(version), prompt, delta.token_ids)
            np.testing.assert_allclose(delta.logprobs[mine], expected[mine], atol=1e-4)

    def close(self) -> None:
        self._publisher.close()


def picked(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    table = reference_logprobs(model, prompt, tokens)
    return np.asarray(table[np.arange(len(tokens)), tokens])


@pytest.fixture
def trainer() -> Iterator[LoraTrainer]:
    made = LoraTrainer()
    yield made
    made.close()


@pytest.fixture(params=["merged", "unmerged"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param  # type: ignore[no-any-return]


def new_core(mode: Mode, version: int = 0, **changes: Any) -> EngineCore:
    model = make_model("llama")
    adapter = Adapter(model, SPEC, mode)
    check_model(model)
    config = EngineConfig(**{"slots": 4, "block_size": 4, "prefill_chunk": 16, "kv": "recompute", **changes})
    return EngineCore(model, config, name="e", max_length=64, version=version, adapter=adapter)


def swap(core: EngineCore, manifest: Manifest) -> None:
    proof = core.swap(core.stage(manifest))
    assert proof.accepted and proof.version == core.version == manifest.version, proof.reason


def steps(core: EngineCore, count: int) -> list[Delta]:
    return [delta for _ in range(count) for delta in core.step()]


def test_each_adapter_is_served_as_the_peft_model_generates(trainer: LoraTrainer, mode: Mode) -> None:
    core = new_core(mode)
    given = prompts([5, 9])
    served = []
    for version in (0, 1, 2):
        if version:
            swap(core, trainer.publish(version))
        core.submit(request(f"{version}/{i}", p, 16, temperature=0.0) for i, p in enumerate(given))
        done = run_out(core)
        for i, prompt in enumerate(given):
            assert done[f"{version}/{i}"].token_ids.tolist() == reference_greedy(trainer.at(version), prompt, 16)
            assert set(done[f"{version}/{i}"].versions.tolist()) == {version}
            trainer.check(prompt, done[f"{version}/{i}"])
        served.append(done[f"{version}/0"].token_ids.tolist())
    assert served[0] != served[1] != served[2] != served[0], "every adapter must matter"
    whole = np.concatenate([given[0], np.array(served[2], np.int32)])
    np.testing.assert_allclose(core.score(whole), picked(trainer.at(2), whole[:1], whole[1:]), atol=1e-4)
    core.close()


def test_running_sequences_change_their_adapter_where_their_tags_say(trainer: LoraTrainer, mode: Mode) -> None:
    core = new_core(mode, prefill_chunk=64)  # what a swap makes old is computed anew in one step
    given = prompts([5, 11])
    core.submit(request(f"{i}", p, 15, seed=i) for i, p in enumerate(given))
    deltas = steps(core, 5)
    for version in (1, 2):
        swap(core, trainer.publish(version))
        deltas += steps(core, 5)
    done = run_out(core, begun=deltas)
    for i, prompt in enumerate(given):
        delta = done[f"{i}"]
        assert delta.finish == "length" and delta.versions.tolist() == [0] * 5 + [1] * 5 + [2] * 5
        trainer.check(prompt, delta)
    # The check has teeth: under other adapters the same tokens have other log-probabilities.
    wrong = Delta(id="0", token_ids=delta.token_ids, logprobs=delta.logprobs, versions=2 - delta.versions)
    with pytest.raises(AssertionError):
        trainer.check(given[1], wrong)
    stats = core.counters()
    assert stats.free_blocks == stats.total_blocks
    core.close()


def test_requests_wait_for_the_first_adapter(trainer: LoraTrainer, mode: Mode) -> None:
    core = new_core(mode, version=-1)
    prompt = prompts([6])[0]
    core.submit([request("r", prompt, 8, temperature=0.0)])
    assert not core.has_work and core.step() == []
    swap(core, trainer.publish(3))
    done = run_out(core)["r"]
    assert done.token_ids.tolist() == reference_greedy(trainer.at(3), prompt, 8)
    assert set(done.versions.tolist()) == {3}
    core.close()


def test_a_canary_that_the_adapter_does_not_reproduce_withdraws_it(trainer: LoraTrainer, mode: Mode) -> None:
    """A digest of the adapter cannot see what the layers make of it: the canary does."""
    core = new_core(mode)
    prompt = prompts([6])[0]
    core.submit([request("r", prompt, 9, seed=4)])
    deltas = steps(core, 3)
    manifest = trainer.publish(1)
    # What a trainer would have published whose layers leave the adapter out.
    manifest.canary.logprobs[:] = picked(trainer.at(0), CANARY[:1], CANARY[1:])
    proof = core.swap(core.stage(manifest))
    assert not proof.accepted and proof.quarantined and "canary" in proof.reason
    assert core.version == -1 and not core.has_work
    swap(core, trainer.publish(2))
    delta = run_out(core, begun=deltas)["r"]
    assert delta.versions.tolist() == [0] * 3 + [2] * 6
    trainer.check(prompt, delta)
    core.close()


def test_what_is_not_this_adapter_is_refused_and_changes_nothing(trainer: LoraTrainer, mode: Mode) -> None:
    core = new_core(mode)
    prompt = prompts([6])[0]
    swap(core, trainer.publish(1))
    core.submit([request("r", prompt, 12, temperature=0.0)])
    deltas = steps(core, 4)
    damaged = trainer.publish(2)
    damaged.digest ^= 1
    with pytest.raises(DeliveryError, match="digest"):
        core.stage(damaged)
    whole = Publisher(sender("shm", SenderSettings(run_id=uuid.uuid4().hex[:8])), "float32", 1e-3, CANARY)
    try:
        manifest = whole.publish(3, 2, 3, named_weights(BASE), lambda ids: np.zeros(len(ids) - 1, np.float32))
        with pytest.raises(DeliveryError, match=r"lacks model.layers.0.*lora_A.weight and"):
            core.stage(manifest.result(30))
    finally:
        whole.close()
    done = join([*deltas, *run_out(core).values()])["r"]
    assert done.token_ids.tolist() == reference_greedy(trainer.at(1), prompt, 12)
    assert set(done.versions.tolist()) == {1}
    core.close()
