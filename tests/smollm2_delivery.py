"""Deliveries of a real model: SmolLM2-135M, trained by RL steps, to real engines. Run by `make deliveries`.

Deltas at a small learning rate are small and lose nothing, also for an engine that missed a version; of a LoRA adapter
nothing but the adapter travels, whatever the transport, and plain peft makes the same model of its export. SmolLM2 is
fetched by `examples/smollm2/fetch.py`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from headrace.config.schema import AlgorithmConfig, EngineConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.delivery import transports
from headrace.delivery.base import Manifest, canary_sequence
from headrace.delivery.digest import digest_as
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import nccl_group
from headrace.delivery.transports.base import SenderSettings
from headrace.delivery.transports.cuda_ipc import CudaIpcSender, read_ticket
from headrace.delivery.transports.segments import MappedSegment
from headrace.delivery.transports.tcp_server import TcpSender
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.errors import WrongBase
from headrace.models.loading import load_model, named_weights
from headrace.models.lora import Adapter
from headrace.models.rounding import rounded
from headrace.training.checkpoints.base import latest
from headrace.training.lora import TrainedAdapter
from headrace.training.trainer import Trainer
from headrace.types import Batch, Float32Array, Int32Array

sys.path.append(str(Path(__file__).parent / "unit/training"))

from random_models import AllDouble

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/smollm2/model"
LORA_RUN = {
    "run.versions": 2,
    # Two rewards that are equal teach nothing; these steps do, whatever is sampled.
    "warm_start.steps": 2,
    "warm_start.batch": 4,
    "buffer.groups": 2,
    "rollouts.group_size": 2,
    "rollouts.max_tokens": 8,
    "evaluate.prompts": 0,
    "observe.display": "none",
}
QUESTION = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 6
MISSED = 11
"""The version that one of the engines does not hear of."""
TRANSPORTS = transports.WITHOUT_GPU
DEVICE = "cpu"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def new_trainer(learning_rate: float, lora: LoraConfig | None = None, device: str = "cpu") -> Trainer:
    model = load_model(MODEL, device=device)
    adapter = TrainedAdapter(model, lora, base=MODEL) if lora is not None else None
    training = TrainingConfig(learning_rate=learning_rate, compute_dtype="float32", compile=False)
    return Trainer(model, AlgorithmConfig(), training, total_steps=100, warm_start=WarmStartConfig(), adapter=adapter)


def new_engine(name: str, **options: Any) -> EngineCore:
    config = EngineConfig(slots=4, block_size=16, compile=False)
    return EngineCore(options.pop("model", None) or load_model(MODEL), config, name=name, max_length=64, **options)


def answers(engine: EngineCore, prompt: Int32Array, step: int) -> list[Delta]:
    """Two answers to one question, sampled."""
    sampling = [Sampling(max_tokens=TOKENS, seed=2 * step + n) for n in range(2)]
    engine.submit(Request(id=f"{step}/{n}", token_ids=prompt, group="g", sampling=sampling[n]) for n in range(2))
    deltas: dict[str, list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.id, []).append(delta)
    return [
        Delta(
            id=name,
            token_ids=np.concatenate([delta.token_ids for delta in parts]),
            logprobs=np.concatenate([delta.logprobs for delta in parts]),
            versions=np.concatenate([delta.versions for delta in parts]),
        )
        for name, parts in sorted(deltas.items())
    ]


def rl_batch(engine: EngineCore, tokenizer: Any, step: int) -> Batch:
    """Sample a group under the engine's version, judge it, and give each answer its advantage: digits are good."""
    prompt = np.array(tokenizer.encode(QUESTION.format(step, step + 3)).ids, np.int32)
    group = answers(engine, prompt, step)
    texts = [tokenizer.decode(answer.token_ids.tolist()) for answer in group]
    rewards = [sum(letter.isdigit() for letter in text) + 0.01 * len(text) for text in texts]
    better = int(rewards[1] >= rewards[0])
    sampled = np.concatenate([[False] * len(prompt) + [True] * TOKENS] * 2)

    def flat(values: list[np.ndarray], before: float, dtype: Any) -> np.ndarray:
        head = np.full(len(prompt), before, dtype)
        return np.concatenate([part for value in values for part in (head, value.astype(dtype))])

    return Batch(
        step=step,
        version=engine.version,
        token_ids=np.concatenate([part for answer in group for part in (prompt, answer.token_ids)]).astype(np.int32),
        lengths=np.full(2, len(prompt) + TOKENS, np.int32),
        groups=np.zeros(2, np.int32),
        trained=sampled,
        logprobs=flat([answer.logprobs for answer in group], 0.0, np.float32),
        versions=flat([answer.versions for answer in group], -1, np.int32),
        advantages=flat([np.full(TOKENS, 1.0 if n == better else -1.0) for n in range(2)], 0.0, np.float32),
        weights=(sampled / sampled.sum()).astype(np.float32),
    )


def load(engine: EngineCore, manifest: Manifest) -> None:
    proof = engine.swap(engine.stage(manifest))
    assert proof.accepted, proof.reason
    assert proof.live_digest == manifest.digest


def size(entries: Any) -> int:
    return max(entry.offset + entry.nbytes for entry in entries)


def test_deltas_of_real_steps_are_a_tenth_and_lose_nothing(tokenizer: Any) -> None:
    trainer = new_trainer(learning_rate=1e-6)
    publisher = Publisher(
        transports.sender("shm", SenderSettings(run_id="smollm2-delta")),
        "bfloat16",
        None,
        canary_sequence(49152, 16),
        send="delta",
    )
    models = [load_model(MODEL) for _ in range(2)]
    engines = [new_engine(f"engine-{n}", model=model) for n, model in enumerate(models)]

    def score(token_ids: Int32Array) -> Float32Array:
        with rounded(trainer.model, torch.bfloat16):
            return trainer.score(token_ids)

    sent: dict[int, tuple[str, int, int]] = {}
    try:
        for version in range(22):
            if version:
                report = trainer.step(rl_batch(engines[0], tokenizer, version))
                assert not report.skipped and report.grad_norm > 0
            manifest = publisher.publish(version, version - 1, version, trainer.weights(), score).result(120)
            travels = size(manifest.payload or manifest.entries)
            sent[version] = (manifest.kind, travels, size(manifest.entries))
            load(engines[0], manifest)
            if version != MISSED:
                if version == MISSED + 1:
                    with pytest.raises(WrongBase, match=f"change to version {MISSED}, but this engine has version"):
                        engines[1].stage(manifest)
                    again = publisher.resend(manifest).result(120)
                    assert (again.kind, again.digest, size(again.entries)) == ("full", manifest.digest, sent[0][2])
                    load(engines[1], again)
                else:
                    load(engines[1], manifest)
            publisher.acknowledged(version)
            for number in range(2):
                if version != MISSED or number == 0:
                    assert holds(models[number], trainer), f"engine-{number}, version {version}"
    finally:
        for engine in engines:
            engine.close()
        publisher.close()
    assert sent.pop(0)[0] == "full"
    assert len(sent) == 21 and {kind for kind, _, _ in sent.values()} == {"delta"}
    print("bytes of a delta:", [nbytes for _, nbytes, _ in sent.values()], "of", sent[1][2])
    assert all(10 * nbytes <= whole for _, nbytes, whole in sent.values())


def holds(model: Any, trainer: Trainer) -> bool:
    """Whether an engine's float32 weights are the trainer's, rounded to bfloat16, bit for bit."""
    live = named_weights(model)
    return all(
        torch.equal(live[name].view(torch.int32), weight.to(torch.bfloat16).float().view(torch.int32))
        for name, weight in trainer.weights().items()
    )


class Wire:
    """Counts the bytes of weights that leave a sender."""

    def __init__(self, sender: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        self._sender = sender
        if isinstance(sender, TcpSender):
            answer = sender.respond

            def counted(frames: list[bytes]) -> list[Any]:
                said = answer(frames)
                self.nbytes += sum(len(frame) for frame in said)
                return said

            monkeypatch.setattr(sender, "respond", counted)
        elif sender.name == "nccl":
            broadcast = nccl_group.BroadcastGroup.broadcast

            def broadcasting(group: Any, session: int, packed: torch.Tensor, pieces: Any) -> None:
                # Both ends are in this process.
                self.nbytes += sum(stop - start for start, stop in pieces) // 2
                broadcast(group, session, packed, pieces)

            monkeypatch.setattr(nccl_group.BroadcastGroup, "broadcast", broadcasting)

    def count(self, manifest: Manifest) -> int:
        if isinstance(self._sender, CudaIpcSender):
            segment = MappedSegment(Path(manifest.location))
            with contextlib.closing(segment):
                return read_ticket(segment).nbytes
        return self.nbytes or Path(manifest.location).stat().st_size


def test_of_a_lora_run_only_the_adapter_travels_and_is_served_as_trained(
    request: pytest.FixtureRequest, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = request.module.DEVICE
    lora = LoraConfig(rank=16)
    trainer = new_trainer(learning_rate=1e-3, lora=lora, device=device)
    model = load_model(MODEL, device=device)
    base = digest_as(named_weights(model), "float32")
    engine = new_engine("engine-0", model=model, adapter=Adapter(model, lora, "merged"), base_digest=base)
    own = sum(tensor.nbytes for tensor in trainer.weights().values())
    assert own == 16 * 4 * sum(
        layer.in_features + layer.out_features
        for name, layer in load_model(MODEL).named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    )
    prompt = np.array(tokenizer.encode(QUESTION.format(17, 25)).ids, np.int32)
    for version, transport in enumerate(request.module.TRANSPORTS):
        if version:
            trainer.step(rl_batch(engine, tokenizer, version))
        sender = transports.sender(
            transport, SenderSettings(run_id="smollm2-lora", directory=tmp_path / "weights", device=device)
        )
        publisher = Publisher(sender, "float32", None, canary_sequence(49152, 16), send="adapter", base_digest=base)
        try:
            wire = Wire(sender, monkeypatch)
            manifest = publisher.publish(version, version - 1, version, trainer.weights(), trainer.score).result(120)
            assert manifest.kind == "adapter"
            load(engine, manifest)
            assert own <= wire.count(manifest) <= 1.02 * own, transport
        finally:
            publisher.close()
        for answer in answers(engine, prompt, 1000 + version):
            expected = trainer.score(np.concatenate([prompt, answer.token_ids]))[len(prompt) - 1 :]
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
            assert set(answer.versions.tolist()) == {version}
    with_base = trainer.reference_score(prompt)
    assert np.abs(trainer.score(prompt) - with_base).max() > 1e-2, "the adapter must matter"
    engine.close()


def command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_export_of_a_lora_run_is_the_trained_model_in_plain_peft(tokenizer: Any, tmp_path: Path) -> None:
    """In float64 on both sides: what is left is no rounding of either."""
    chosen = [f"{key}={value}" for key, value in LORA_RUN.items()] + [f"run.directory={tmp_path}", "run.name=lora"]
    command("train", "examples/lora/lora.toml", *(part for one in chosen for part in ("--set", one)))
    command("export", str(tmp_path / "lora"), "--to", "peft", "--out", str(tmp_path / "adapter"))

    ours = load_model(MODEL, dtype="float64")
    adapter = TrainedAdapter(ours, LoraConfig(rank=16, alpha=32), base=MODEL)
    settings = {"total_steps": 100, "warm_start": WarmStartConfig(), "adapter": adapter}
    trainer = Trainer(ours, AlgorithmConfig(), TrainingConfig(compute_dtype="float32", compile=False), **settings)
    trainer.load(latest(tmp_path / "lora" / "checkpoints"))
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64, attn_implementation="eager")
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter").to(torch.float64).eval()

    for first, second in ((17, 25), (3, 4), (88, 9)):
        token_ids = np.array(tokenizer.encode(QUESTION.format(first, second) + str(first + second)).ids, np.int32)
        with torch.no_grad(), AllDouble():
            found = trainer.score(token_ids)
            before = trainer.reference_score(token_ids)
            tokens = torch.from_numpy(token_ids).long()
            logits = plain(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert np.abs(found - before).max() > 1e-2, "the adapter must matter"
