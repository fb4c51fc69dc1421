"""A trainer and an engine of a tiny model for the delivery suite, and plain Hugging Face references of what they do.

Every version's weights are a pure function of (kind, version), so that any process knows what any version must be.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config.schema import EngineConfig, LoraConfig
from headrace.delivery import live, receiver, transports
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.digest import digest_as
from headrace.delivery.live import DeviceCopies
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports.base import Sender, SenderSettings
from headrace.delivery.transports.file import FileSource
from headrace.delivery.transports.nccl import NcclSender
from headrace.delivery.transports.tcp import TcpSource
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.engine import EngineLoop
from headrace.models.attention import ATTENTION
from headrace.models.loading import named_weights
from headrace.models.lora import Adapter

KINDS = ("full", "delta", "adapter")
LORA = LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "v_proj", "down_proj"])
VOCABULARY = 64
CANARY = np.arange(1, 13, dtype=np.int32)
LONGEST = 4096
BUCKET_BYTES = 1024
"""Of `tcp` and `nccl` here: even a tiny model, and most of its deltas, travel in several."""
SECONDS = 60.0

Weights = dict[str, torch.Tensor]


def tiny(seed: int = 0, attention: str = ATTENTION) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=LONGEST,
        # Wider weights amplify rounding: with 0.3, float32 is three times as far from float64. With 0.2, the
        # log-probabilities of two versions still differ by about 1.
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


def dtype_of_kind(kind: str) -> torch.dtype:
    """What its weights travel in; engines hold them as float32."""
    return torch.bfloat16 if kind == "delta" else torch.float32


@functools.cache
def trained(kind: str, version: int) -> Weights:
    """The trainer's weights: of an adapter its matrices; of a delta few change, of the others all."""
    if kind == "adapter":
        model = tiny()
        shapes = {name: tensor.shape for name, tensor in Adapter(model, LORA, "merged").weights().items()}
        noise = torch.Generator().manual_seed(version)
        return {name: 0.3 * torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    if kind == "full":
        return {name: weight.clone() for name, weight in named_weights(tiny(seed=version)).items()}
    if version <= 0:
        return trained("full", 0)
    weights = {name: weight.clone() for name, weight in trained(kind, version - 1).items()}
    noise = torch.Generator().manual_seed(version)
    for weight in weights.values():
        flat = weight.view(-1)
        places = torch.randint(len(flat), (max(1, len(flat) // 20),), generator=noise)
        flat[places] += 0.5 * torch.randn(len(places), generator=noise)
    return weights


def served(kind: str, version: int) -> Weights:
    """The bits that an engine must hold."""
    return {name: weight.to(dtype_of_kind(kind)).float() for name, weight in trained(kind, version).items()}


@functools.cache
def reference(kind: str, version: int) -> Any:
    """Plain Hugging Face code with a version's weights; an adapter is merged by hand."""
    model = tiny(attention="eager")
    weights = served(kind, version)
    with torch.no_grad():
        if kind != "adapter":
            for name, weight in named_weights(model).items():
                weight.copy_(weights[name])
            return model
        for name in [name for name in weights if ".lora_A." in name]:
            a, b = weights[name], weights[name.replace(".lora_A.", ".lora_B.")]
            model.get_parameter(name.replace(".lora_A.", ".")).add_(LORA.scaling * b @ a)
    return model


@torch.no_grad()
def whole_logprobs(kind: str, version: int, token_ids: np.ndarray) -> np.ndarray:
    """Of tokens 1..n, by one plain forward."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    logits = reference(kind, version)(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy().astype(np.float32)


@torch.no_grad()
def kept_logprobs(kind: str, prompt: np.ndarray, tokens: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """Of sampled tokens where each version goes on from the keys and values that older ones have left."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    found, cache, start = [], None, 0
    for version, span in itertools.groupby(range(len(tokens)), lambda i: int(versions[i])):
        # The pass that gives a token computes the one before it.
        stop = len(prompt) + list(span)[-1]
        out = reference(kind, version)(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, stop
        found.append(out.logits[0].log_softmax(-1))
    table = torch.cat(found)[len(prompt) - 1 :]
    return table.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def make_sender(transport: str, run_id: str, directory: Path, receivers: int = 1, device: str = "cpu") -> Sender:
    if transport == "nccl":
        return NcclSender(bucket_bytes=BUCKET_BYTES, patience=5.0)
    return transports.sender(
        transport, SenderSettings(run_id=run_id, directory=directory, receivers=receivers, device=device)
    )


def base_digest() -> int:
    return digest_as(named_weights(tiny()), "float32")


class Publishing:
    """The trainer's end of one transport, for one kind."""

    def __init__(
        self, transport: str, kind: str, run_id: str, directory: Path, receivers: int = 1, device: str = "cpu"
    ) -> None:
        self.kind, self.device = kind, device
        self.sender = make_sender(transport, run_id, directory, receivers, device)
        self.publisher = Publisher(
            self.sender,
            str(dtype_of_kind(kind)).removeprefix("torch."),
            1e-4,
            CANARY,
            send=kind,  # type: ignore[arg-type]
            base_digest=base_digest() if kind == "adapter" else 0,
            deadline=5.0,
        )

    def publish(self, version: int) -> Manifest:
        weights = {name: weight.clone().to(self.device) for name, weight in trained(self.kind, version).items()}
        future = self.publisher.publish(
            version, version - 1, version, weights, lambda ids: whole_logprobs(self.kind, version, ids)
        )
        for weight in weights.values():
            weight.fill_(float("nan"))  # The trainer goes on at once.
        return future.result(SECONDS)

    def acknowledge(self, version: int) -> None:
        self.publisher.acknowledged(version)

    def close(self) -> None:
        self.publisher.close()


class Holding:
    """An engine that holds weights and decodes nothing: many of them cost little."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        model = tiny()
        weights = Adapter(model, LORA, "merged").weights() if kind == "adapter" else named_weights(model)
        self.live = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.receiver = Receiver(self.live, name, base_digest=base_digest() if kind == "adapter" else None)

    def load(self, manifest: Manifest) -> Proof:
        staged = self.receiver.stage(manifest)
        return self.receiver.swap(staged, lambda ids: whole_logprobs(self.kind, manifest.version, ids))

    def holds(self, version: int) -> bool:
        return same_bits(self.live, served(self.kind, version))

    def stop(self) -> None:
        self.receiver.close()


def same_bits(live: Weights, wanted: Weights) -> bool:
    assert wanted.keys() == live.keys()
    return all(
        torch.equal(tensor.cpu().float().view(torch.int32), wanted[name].view(torch.int32))
        for name, tensor in live.items()
    )


class Serving:
    """A real embedded engine whose loop runs in a thread; every step hands out its tokens."""

    def __init__(
        self,
        kind: str,
        interrupt: str = "never",
        kv: str = "recompute",
        *,
        base_seed: int = 0,
        device: str = "cpu",
        staging: str = "auto",
    ) -> None:
        self.kind, self.kv = kind, kv
        model = tiny(seed=base_seed).to(device)
        found = digest_as(named_weights(model), "float32") if kind == "adapter" else None
        adapter = Adapter(model, LORA, "unmerged" if kv == "keep" else "merged") if kind == "adapter" else None
        # Uncaptured: what runs must still run when the next version comes.
        config = EngineConfig(
            slots=3,
            block_size=8,
            interrupt=interrupt,  # type: ignore[arg-type]
            kv=kv,  # type: ignore[arg-type]
            device=device,  # type: ignore[arg-type]
            staging=staging,  # type: ignore[arg-type]
            graphs=False,
            compile=False,
        )
        self._core = EngineCore(
            model,
            config,
            name="engine-0",
            max_length=LONGEST,
            adapter=adapter,
            base_digest=found,
            clock=itertools.count().__next__,
        )
        self.live = adapter.weights() if adapter is not None else named_weights(model)
        self.prompts: dict[str, np.ndarray] = {}
        self._deltas: dict[str, list[Delta]] = {}
        self._changed = threading.Condition()
        self.loop = EngineLoop(self._core, self._emit, interrupt)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self.loop.run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, name: str, max_tokens: int, prompt: np.ndarray | None = None) -> None:
        seed = len(self.prompts)
        if prompt is None:
            prompt = np.random.default_rng(seed).integers(1, VOCABULARY, 6).astype(np.int32)
        self.prompts[name] = prompt
        self.loop.submit([Request(id=name, token_ids=prompt, sampling=Sampling(max_tokens=max_tokens, seed=seed))])

    def load(self, manifest: Manifest) -> Proof:
        return self.loop.load(manifest).result(SECONDS)

    def wait(self, condition: Callable[[dict[str, Delta]], bool]) -> dict[str, Delta]:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self._joined()), timeout=SECONDS), self._joined()
            return self._joined()

    def answers(self) -> dict[str, Delta]:
        with self._changed:
            return self._joined()

    def go_on(self, version: int) -> None:
        """Wait until every open request that runs, and at least one, has a new token of this version."""
        before = {name: len(delta.token_ids) for name, delta in self.answers().items()}
        self.wait(
            lambda found: any(
                len(delta.token_ids) > before.get(name, 0) and delta.versions[-1] == version
                for name, delta in found.items()
            )
        )

    def holds(self, version: int) -> bool:
        """Whether the live weights are exactly this version's."""
        return same_bits(self.live, served(self.kind, version))

    def check_answers(self) -> None:
        """Every token has the log-probability that plain code gives it under the version of its tag."""
        for name, delta in self.answers().items():
            if not len(delta.token_ids):
                continue
            check_answer(self.kind, self.kv, self.prompts[name], delta)

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _emit(self, deltas: list[Delta]) -> None:
        with self._changed:
            for delta in deltas:
                self._deltas.setdefault(delta.id, []).append(delta)
            self._changed.notify_all()

    def _joined(self) -> dict[str, Delta]:
        return {name: _join(deltas) for name, deltas in self._deltas.items()}


def check_answer(kind: str, kv: str, prompt: np.ndarray, delta: Delta) -> None:
    assert (np.diff(delta.versions) >= 0).all()
    if kv == "keep":
        expected = kept_logprobs(kind, prompt, delta.token_ids, delta.versions)
        np.testing.assert_allclose(delta.logprobs, expected, atol=1e-4)
        return
    whole = np.concatenate([prompt, delta.token_ids])
    for version in set(delta.versions.tolist()):
        mine = delta.versions == version
        expected = whole_logprobs(kind, version, whole)[len(prompt) - 1 :]
        np.testing.assert_allclose(delta.logprobs[mine], expected[mine], atol=1e-4)


def _join(deltas: list[Delta]) -> Delta:
    assert all(delta.finish is None for delta in deltas[:-1]), "an answer goes on after its end"
    return Delta(
        id=deltas[0].id,
        token_ids=np.concatenate([delta.token_ids for delta in deltas]),
        logprobs=np.concatenate([delta.logprobs for delta in deltas]),
        versions=np.concatenate([delta.versions for delta in deltas]),
        finish=deltas[-1].finish,
        error=deltas[-1].error,
    )


def watch_copies(
    monkeypatch: Any,
    transport: str,
    device: str,
    midway: Callable[[], object] = lambda: None,
    damaged: Collection[int] = (),
) -> None:
    """Call `midway` when the first copy over live weights is half done. Flip a bit of the copies with these numbers.

    Publish first: a publisher of this process on a GPU copies with the same class.
    """
    numbers = itertools.count(1)

    def halves(real: Callable[..., None], targets: Any, sources: Any) -> None:
        number, names = next(numbers), list(targets)
        real({name: targets[name] for name in names[: len(names) // 2]}, sources)
        if device == "cuda":
            torch.cuda.synchronize()
        if number == 1:
            midway()
        real({name: targets[name] for name in names[len(names) // 2 :]}, sources)
        if number in damaged:
            targets[names[-1]].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)

    def spans_of(real: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def spans(*arguments: Any) -> Iterator[Any]:
            number, calls = next(numbers), itertools.count(1)
            with real(*arguments) as read:

                def watched(start: int, into: memoryview) -> None:
                    call = next(calls)
                    if (number, call) == (1, 3):
                        midway()
                    read(start, into)
                    if number in damaged and call == 3:
                        into[-1] ^= 1

                yield watched

        return spans

    for name, source in (("file", FileSource), ("tcp", TcpSource)):
        if name == transport:
            monkeypatch.setattr(source, "spans", spans_of(source.spans))
    if transport == "cuda_ipc":
        copy_all = live.copy_all
        monkeypatch.setattr(DeviceCopies, "copy", lambda self, plan, to, out_of: halves(copy_all, to, out_of))
    if transport == "shm":
        module: Any = live if device == "cuda" else receiver
        copy_all = module.copy_all
        monkeypatch.setattr(module, "copy_all", lambda to, out_of, **options: halves(copy_all, to, out_of))
