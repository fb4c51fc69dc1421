"""Adapters under training against plain peft, plain Hugging Face and autograd in float64."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from random_models import AllDouble, model_dir, random_batch, twins
from reference_loop import batch_loss, plain_model, sequence_logprobs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from headrace.algorithms.losses.base import build_loss
from headrace.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.delivery.digest import digest
from headrace.errors import HeadraceError, UserError
from headrace.models.loading import load_model
from headrace.models.lora import adapter_weights
from headrace.training import logprobs
from headrace.training.checkpoints.base import base_of, keep_base
from headrace.training.checkpoints.export import export_checkpoint
from headrace.training.lora import TrainedAdapter
from headrace.training.policies import FrozenPolicy
from headrace.training.serving import prepare_model
from headrace.training.trainer import Trainer, accumulate

CISPO = AlgorithmConfig()
TRAINING = TrainingConfig(
    learning_rate=5e-3, warmup_steps=2, schedule="cosine", weight_decay=0.01, micro_batch_tokens=32
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
WARM_START = WarmStartConfig(steps=2, learning_rate=5e-3)
LORA = LoraConfig(rank=4, alpha=6.0)
EXPERTS = LoraConfig(rank=2, alpha=3.0, targets=["all-linear", "experts.gate_up_proj", "experts.down_proj"])
NORMS = LoraConfig(rank=2, alpha=3.0, targets=["q_proj", "down_proj"], modules=["norm"])
TOKENS = np.random.default_rng(0).integers(3, 61, 17, dtype=np.int32)


def trainer_of(
    path: Path, lora: LoraConfig = LORA, seed: int = 0, algorithm: AlgorithmConfig = CISPO, recompute: bool = False
) -> Trainer:
    training = msgspec.structs.replace(TRAINING, activation_checkpointing=recompute)
    model = load_model(path)
    adapter = TrainedAdapter(model, lora, base=path, seed=seed)
    prepare_model(model, training)
    return Trainer(model, algorithm, training, total_steps=5, warm_start=WARM_START, adapter=adapter)


def batches(warm: int = 2, policy: int = 4) -> list:
    imitation = [random_batch(100 + i, step=1 + i, objective="imitation") for i in range(warm)]
    return imitation + [random_batch(200 + i, step=1 + warm + i, temperature=0.9) for i in range(policy)]


def trained(path: Path, lora: LoraConfig = LORA, **changes) -> Trainer:
    trainer = trainer_of(path, lora, **changes)
    for batch in batches():
        trainer.step(batch)
    return trainer


def fill(weights: dict[str, torch.Tensor], scale: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(3)
    for tensor in weights.values():
        tensor.add_(scale * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


def base_digest(model) -> int:
    """Of everything but the adapter, by its own names."""
    own = {name: p for name, p in model.named_parameters() if ".lora_" not in name and "modules_to_save" not in name}
    return digest(
        (name.replace(".base_layer", "").replace(".original_module", ""), p.detach()) for name, p in own.items()
    )


@torch.no_grad()
def plain_scores(model, token_ids: np.ndarray = TOKENS) -> np.ndarray:
    return sequence_logprobs(model, torch.from_numpy(token_ids).long(), 1.0).numpy()


@pytest.mark.parametrize(
    ("family", "lora", "modules"),
    [
        (
            "llama",
            {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
            LORA,
        ),
        ("qwen3", {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["model.norm"]}, NORMS),
        (
            "mixtral",
            {
                "target_modules": ATTENTION,
                "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            },
            EXPERTS,
        ),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_gradients_are_those_of_plain_peft(monkeypatch, family, lora, modules, chunked):
    """Packed rows and shared prefixes against one plain forward a sequence, in float64."""
    if chunked:
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 5 * 61)
    model, plain = twins(family, torch.float64)
    reference = get_peft_model(plain, PeftConfig(r=modules.rank, lora_alpha=modules.alpha, **lora)).eval()
    adapter = TrainedAdapter(model, modules, base=Path("base"))
    theirs = adapter_weights(reference)
    assert theirs.keys() == adapter.weights().keys()
    fill(theirs)
    for name, tensor in adapter.weights().items():
        tensor.copy_(theirs[name])
    model.eval()
    batch = random_batch(1, temperature=0.9)
    with AllDouble():
        found = accumulate(model, batch, build_loss(CISPO), micro_batch_tokens=32, share_prefixes=True)
        loss = batch_loss(reference, batch, CISPO)
        loss.backward()
    assert found.loss == pytest.approx(float(loss), abs=1e-10)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, f"{name} must have a gradient iff it is trained"
    mine = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = {n.removeprefix("base_model.model."): p.grad for n, p in reference.named_parameters() if p.requires_grad}
    assert mine.keys() == expected.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-8)
        assert float(gradient.abs().max()) > 1e-6, name


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_only_the_adapter_is_trained_and_published(tmp_path, family):
    path = model_dir(tmp_path / "model", family)
    trainer = trainer_of(path, EXPERTS if family == "mixtral" else LORA)
    before, weights = base_digest(trainer.model), {n: t.clone() for n, t in trainer.weights().items()}
    assert before == digest((name, p.detach()) for name, p in load_model(path).named_parameters())
    assert all((".lora_B." in name) == (not tensor.any()) for name, tensor in weights.items())
    np.testing.assert_allclose(trainer.score(TOKENS), plain_scores(plain_model(path)), atol=5e-6)
    for batch in batches():
        trainer.step(batch)
    assert base_digest(trainer.model) == before
    for name, tensor in trainer.weights().items():
        assert ".lora_A." in name or ".lora_B." in name
        assert not torch.equal(tensor, weights[name]), name
    assert {p.requires_grad for n, p in trainer.model.named_parameters() if "lora_" not in n} == {False}


def test_the_first_adapter_depends_on_the_seed_alone(tmp_path):
    path = model_dir(tmp_path / "model")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = trainer_of(path, seed=4).weights()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    same, other = trainer_of(path, seed=4).weights(), trainer_of(path, seed=5).weights()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if ".lora_A." in name)


@pytest.mark.parametrize("lora", [LORA, NORMS])
def test_reference_scores_are_those_of_the_base_model(tmp_path, lora):
    path = model_dir(tmp_path / "model", "qwen3")
    trainer = trained(path, lora)
    expected = plain_scores(plain_model(path))
    trainable = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    with_adapter = trainer.score(TOKENS)
    np.testing.assert_allclose(trainer.reference_score(TOKENS), expected, atol=5e-6)
    assert np.abs(with_adapter - expected).max() > 0.01, "the adapter must matter"
    np.testing.assert_array_equal(trainer.score(TOKENS), with_adapter)
    assert [name for name, p in trainer.model.named_parameters() if p.requires_grad] == trainable
    full = Trainer(load_model(path), CISPO, TRAINING, total_steps=5, warm_start=WARM_START)
    with pytest.raises(UserError, match=r"need \[lora\]"):
        full.reference_score(TOKENS)


def test_the_reference_is_the_base_model_after_a_warm_start_too(tmp_path):
    path, algorithm = model_dir(tmp_path / "model"), AlgorithmConfig(kl="k3")
    warm, first = batches(warm=2, policy=1)[:2], random_batch(200, step=3)
    cold = trainer_of(path, algorithm=algorithm)
    assert cold.step(first).metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    adapted = trainer_of(path, algorithm=algorithm)
    full = Trainer(load_model(path), algorithm, TRAINING, total_steps=5, warm_start=WARM_START)
    for batch in warm:
        adapted.step(batch)
        full.step(batch)
    assert adapted.step(first).metrics["reference_kl"] > 1e-3
    assert full.step(first).metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "lora"),
    [("llama", LORA), ("llama", LoraConfig(rank=4, dropout=0.3)), ("qwen3", NORMS), ("mixtral", EXPERTS)],
)
@pytest.mark.parametrize("stop_after", [1, 4])
def test_continuing_from_a_checkpoint_equals_never_having_stopped(tmp_path, family, lora, stop_after):
    path = model_dir(tmp_path / "model", family)
    work = batches()
    straight, stopped = trainer_of(path, lora), trainer_of(path, lora)
    expected = [straight.step(batch).loss for batch in work]
    for batch in work[:stop_after]:
        stopped.step(batch)
    saved = stopped.save(tmp_path / "checkpoints", version=3, source=path)
    resumed = trainer_of(path, lora, seed=0)
    fill(resumed.weights())
    resumed.load(saved)
    assert [resumed.step(batch).loss for batch in work[stop_after:]] == expected[stop_after:]
    for name, tensor in resumed.weights().items():
        assert torch.equal(tensor, straight.weights()[name]), name


def test_dropout_is_on_in_training_passes_only(tmp_path):
    path = model_dir(tmp_path / "model")
    dropping, plain = (trainer_of(path, LoraConfig(rank=4, dropout=p)) for p in (0.5, 0.0))
    for trainer in (dropping, plain):
        fill(trainer.weights())
    np.testing.assert_array_equal(dropping.score(TOKENS), plain.score(TOKENS))
    batch = random_batch(1)
    state = torch.get_rng_state()
    first = dropping.step(batch).loss
    assert torch.equal(torch.get_rng_state(), state), "nobody else's draws may depend on it"
    assert first != plain.step(batch).loss
    assert not any(module.training for module in dropping.model.modules())
    again = trainer_of(path, LoraConfig(rank=4, dropout=0.5))
    fill(again.weights())
    assert again.step(batch).loss == first


def test_a_layer_that_is_computed_again_drops_the_same_again(tmp_path):
    path = model_dir(tmp_path / "model")
    straight, again = (
        trained(path, LoraConfig(rank=4, dropout=0.3), recompute=recompute) for recompute in (False, True)
    )
    for name, tensor in straight.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name


def test_other_policies_score_without_dropout(tmp_path, monkeypatch):
    path = model_dir(tmp_path / "model")
    algorithm = AlgorithmConfig(loss="decoupled_ppo", proximal="recomputed")
    dropping, plain = (trainer_of(path, LoraConfig(rank=4, dropout=p), algorithm=algorithm) for p in (0.5, 0.0))
    seen = []
    readings = FrozenPolicy.readings
    monkeypatch.setattr(FrozenPolicy, "readings", lambda *given: seen.append(readings(*given)) or seen[-1])
    for trainer in (dropping, plain):
        fill(trainer.weights())
        trainer.step(random_batch(1))
    assert len(seen) == 2
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize(("family", "lora"), [("llama", LORA), ("qwen3", NORMS), ("mixtral", EXPERTS)])
def test_plain_peft_and_plain_transformers_load_a_checkpoint(tmp_path, family, lora):
    path = model_dir(tmp_path / "model", family)
    trainer = trained(path, lora)
    expected = trainer.score(TOKENS)
    assert np.abs(expected - plain_scores(plain_model(path))).max() > 0.01, "the adapter must matter"
    saved = trainer.save(tmp_path / "checkpoints", source=path)
    peft_dir = export_checkpoint(saved, tmp_path / "peft", "peft")
    merged_dir = export_checkpoint(saved, tmp_path / "hf", "hf")
    assert not (saved / "model.safetensors").exists() and not (peft_dir / "trainer").exists()
    for directory in (saved, peft_dir):
        assert (directory / "tokenizer.json").is_file()
        loaded = PeftModel.from_pretrained(plain_model(path), directory).eval()
        np.testing.assert_allclose(plain_scores(loaded), expected, atol=1e-5)
        by_name = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        np.testing.assert_allclose(plain_scores(by_name), expected, atol=1e-5)
    assert not list(merged_dir.glob("adapter*")) and (merged_dir / "chat_template.jinja").is_file()
    np.testing.assert_allclose(plain_scores(plain_model(merged_dir)), expected, atol=1e-5)
    assert sum(t.numel() for t in load_file(peft_dir / "adapter_model.safetensors").values()) == sum(
        t.numel() for t in trainer.weights().values()
    )


def test_a_full_checkpoint_is_exported_as_it_is(tmp_path):
    path = model_dir(tmp_path / "model")
    trainer = Trainer(load_model(path), CISPO, TRAINING, total_steps=5, warm_start=WARM_START)
    trainer.step(random_batch(1))
    saved = trainer.save(tmp_path / "checkpoints", source=path)
    out = export_checkpoint(saved, tmp_path / "out" / "hf", "hf")
    assert not (out / "trainer").exists()
    np.testing.assert_allclose(plain_scores(plain_model(out)), trainer.score(TOKENS), atol=5e-6)
    with pytest.raises(UserError, match="has no adapter: its run trained all weights"):
        export_checkpoint(saved, tmp_path / "peft", "peft")
    with pytest.raises(UserError, match="exists already"):
        export_checkpoint(saved, out, "hf")
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        export_checkpoint(path, tmp_path / "other", "hf")


def test_what_is_not_this_adapter_is_not_loaded(tmp_path):
    path = model_dir(tmp_path / "model")
    full = Trainer(load_model(path), CISPO, TRAINING, total_steps=5, warm_start=WARM_START)
    narrow, wide = trainer_of(path), trainer_of(path, LoraConfig(rank=5))
    with pytest.raises(UserError, match=r"holds no adapter: it is of a run without \[lora\]"):
        narrow.load(full.save(tmp_path / "full", source=path))
    adapter = narrow.save(tmp_path / "adapter", source=path)
    with pytest.raises(UserError, match=r"differ in base_model.model.model.layers.0.*lora_A.weight"):
        wide.load(adapter)
    with pytest.raises(UserError, match=r"holds an adapter only: it is of a run with \[lora\]"):
        full.load(adapter)


def test_a_random_base_is_kept_beside_its_checkpoints(tmp_path):
    path = model_dir(tmp_path / "model")
    model = load_model(path, weights="random", seed=7)
    reference = copy.deepcopy(model)
    base = keep_base(model, tmp_path / "checkpoints", path)
    adapter = TrainedAdapter(model, LORA, base=base)
    trainer = Trainer(model, CISPO, TRAINING, total_steps=5, warm_start=WARM_START, adapter=adapter)
    trainer.step(random_batch(1))
    saved = trainer.save(tmp_path / "checkpoints", source=path)
    assert base_of(saved) == base and (base / "tokenizer.json").is_file()
    for name, parameter in plain_model(base).named_parameters():
        assert torch.equal(parameter, dict(reference.named_parameters())[name])
    merged = export_checkpoint(saved, tmp_path / "hf", "hf")
    np.testing.assert_allclose(plain_scores(plain_model(merged)), trainer.score(TOKENS), atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "line"),
    [
        (
            LoraConfig(targets=["qkv"]),
            "target 'qkv' is not in the model; its linear layers are .*; stacked experts",
        ),
        (LoraConfig(targets=["q_proj"], modules=["layernorm"]), "module 'layernorm', to be trained in full, is not in"),
        (LoraConfig(targets=["q_proj"], modules=["self_attn"]), "q_proj is inside of .*self_attn, which is trained in"),
        (
            LoraConfig(targets=["q_proj"], modules=["rotary_emb"]),
            "rotary_emb, to be trained in full, has no param",
        ),
        # Layer 0 has a plain MLP, layer 1 has experts of the same names, which peft would adapt in its stead.
        (LoraConfig(targets=["down_proj"]), "peft does not adapt model.layers.0.mlp.down_proj of this model as asked"),
        (LoraConfig(targets=["gate_proj"]), "Cannot convert PEFT target"),
        (LoraConfig(targets=["mlp.experts.down_proj"], dropout=0.1), "dropout: stacked experts take none"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_a_line(lora, line):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts": 4}
    config = Qwen3MoeConfig(**sizes, **heads, mlp_only_layers=[0], pad_token_id=None)
    with pytest.raises(HeadraceError, match=line) as raised:
        TrainedAdapter(AutoModelForCausalLM.from_config(config), lora, base=Path("base"))
    assert "\n" not in str(raised.value)
