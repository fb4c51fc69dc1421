"""The plugin's parts that need no vLLM: staging, the live digest over fused layouts, the guard."""

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config.schema import LoraConfig
from headrace.delivery.base import Manifest
from headrace.delivery.digest import digest, digest_as
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.errors import DeliveryError
from headrace.models.loading import named_weights
from headrace.training.lora import TrainedAdapter
from headrace_vllm_plugin.guard import Guard
from headrace_vllm_plugin.weights import Pristine, WorkerStaging, compare
from headrace_vllm_plugin.wire import FetchOrder, StagingState

NAMES = ("q_proj", "k_proj", "v_proj")


def weights(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (10, 4), "norm.weight": (4,), "layers.0.o_proj.weight": (4, 6)}
    shapes |= {f"layers.0.attn.{name}.weight": (rows, 4) for name, rows in zip(NAMES, (6, 2, 3), strict=True)}
    return {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}


class Served(torch.nn.Module):
    """The same weights as vLLM lays them out: fused rows, padded embeddings, some packed away."""

    packed_modules_mapping = {"qkv_proj": list(NAMES)}

    def __init__(self, source: dict[str, torch.Tensor]) -> None:
        super().__init__()
        fused = torch.cat([source[f"layers.0.attn.{name}.weight"] for name in NAMES])
        tree = {
            "embed.weight": torch.cat([source["embed.weight"], torch.zeros(6, 4)]),
            "norm.weight": source["norm.weight"].clone(),
            "layers.0.attn.qkv_proj.weight": fused,
            "layers.0.o_proj.weight": torch.empty(0),
        }
        for name, tensor in tree.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(tensor))


def test_fused_and_padded_weights_are_digested_under_their_own_names() -> None:
    staged = weights(1)
    model = Served(staged)
    found = compare(model, staged, whole=True)
    assert (found.visible, found.hidden, found.wrong) == (5, 1, [])
    shown = {name: tensor for name, tensor in staged.items() if "o_proj" not in name}
    assert found.digest == digest(shown.items())


@pytest.mark.parametrize("row", [0, 6, 8])
def test_one_wrong_element_of_a_fused_weight_is_blamed_on_its_member(row: int) -> None:
    staged = weights(1)
    model = Served(staged)
    with torch.no_grad():
        dict(model.named_parameters())["layers.0.attn.qkv_proj.weight"][row, 2] += 1e-6
    member = {0: "q_proj", 6: "k_proj", 8: "v_proj"}[row]
    assert compare(model, staged, whole=True).wrong == [f"layers.0.attn.{member}.weight"]


def test_a_shard_shows_nothing() -> None:
    staged = weights(1)
    found = compare(Served(staged), staged, whole=False)
    assert (found.visible, found.hidden, found.digest) == (0, 6, 0)


def order_of(manifest: Manifest, **changes: object) -> FetchOrder:
    fields = {name: getattr(manifest, name) for name in FetchOrder.__struct_fields__ if hasattr(manifest, name)}
    order = FetchOrder(**{**fields, **changes})
    return msgspec.json.decode(msgspec.json.encode(order), type=FetchOrder)


def wait(staging: WorkerStaging) -> StagingState:
    deadline = time.monotonic() + 10
    while not staging.state().done and time.monotonic() < deadline:
        time.sleep(0.005)
    return staging.state()


@pytest.mark.parametrize("transport", ["shm", "file", "tcp"])
def test_what_is_staged_is_what_was_published(tmp_path: Path, transport: str) -> None:
    def canary(ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(ids) - 1, np.float32)

    sending = sender(transport, SenderSettings(run_id=f"plugin-{transport}", directory=tmp_path))
    publisher = Publisher(sending, "float32", 1e-3, np.arange(4, dtype=np.int32))
    staging = WorkerStaging(torch.device("cpu"), lambda: pytest.fail("no adapter is staged"))
    try:
        source = weights(2)
        manifest = publisher.publish(3, 2, 1, source, canary).result(timeout=60)
        staging.begin(order_of(manifest))
        assert (wait(staging).error, staging.state().digest) == ("", manifest.digest)
        with pytest.raises(DeliveryError, match="version 4 is not staged"):
            staging.take(4)
        taken = staging.take(3)
        assert taken.keys() == source.keys()
        assert all(torch.equal(taken[name], source[name]) for name in source)
        with pytest.raises(DeliveryError, match="version 3 is not staged"):
            staging.take(3)

        staging.begin(order_of(manifest, digest=manifest.digest ^ 1))
        assert "version 3 arrived wrong" in wait(staging).error
        with pytest.raises(DeliveryError):
            staging.take(3)
        staging.begin(order_of(manifest, plan_digest=7))
        assert "another plan" in wait(staging).error
        staging.begin(order_of(manifest, version=9))
        assert wait(staging).error, "the place holds another version"
    finally:
        staging.close()
        publisher.close()


def test_an_adapter_is_added_to_the_weights_of_the_directory_as_peft_does(tmp_path: Path) -> None:
    """Twice in a row: the second is not added to what the first left. Another base is refused."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    base = digest_as(named_weights(model), "float32")
    lora = LoraConfig(rank=4, alpha=6.0, modules=["model.norm"])
    adapter = TrainedAdapter(model, lora, base=tmp_path / "model")
    publisher = Publisher(
        sender("shm", SenderSettings(run_id="plugin-lora")),
        "float32",
        1e-3,
        np.arange(4, dtype=np.int32),
        send="adapter",
        base_digest=base,
    )
    staging = WorkerStaging(torch.device("cpu"), lambda: Pristine(tmp_path / "model", torch.float32, tied=True))
    try:
        for version in (1, 2):
            for tensor in adapter.weights().values():
                tensor.normal_(std=0.3)
            manifest = publisher.publish(
                version, version - 1, 1, adapter.weights(), lambda ids: np.zeros(len(ids) - 1, np.float32)
            ).result(timeout=60)
            publisher.acknowledged(version)
            staging.begin(order_of(manifest, scaling=lora.scaling))
            assert (wait(staging).error, staging.state().digest) == ("", manifest.digest)
            taken = staging.take(version)
        staging.begin(order_of(manifest, scaling=lora.scaling, base_digest=base ^ 1))
        assert f"to weights with digest {base ^ 1:016x}, but this server's model has {base:016x}" in wait(staging).error
        (tmp_path / "adapter").mkdir()
        adapter.snapshot()(tmp_path / "adapter")
        base_model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        merged = PeftModel.from_pretrained(base_model, tmp_path / "adapter").merge_and_unload()
        expected = named_weights(merged)
        assert taken.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(taken[name], tensor, atol=1e-6, rtol=1e-6)
    finally:
        staging.close()
        publisher.close()


def test_an_adapter_of_what_the_model_has_not_is_refused(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    pristine = Pristine(tmp_path, torch.float32)
    adapter = {"experts.lora_A.weight": torch.ones(1, 3), "experts.lora_B.weight": torch.ones(2, 1)}
    with pytest.raises(DeliveryError, match=r"changes experts\.weight, which this server's model does not have"):
        pristine.with_adapter(adapter, 1.0)
    for half in ("lora_A", "lora_B"):
        with pytest.raises(DeliveryError, match=r"only one half of the pair of layer\.weight"):
            pristine.with_adapter({f"layer.{half}.weight": torch.ones(1, 3)}, 1.0)
    with pytest.raises(DeliveryError, match="holds no safetensors"):
        Pristine(tmp_path / "nowhere", torch.float32)


async def call(guard: Guard, path: str, header: bytes | None, kind: str = "http") -> list[object]:
    sent: list[object] = []

    async def receive() -> object:
        return {}

    async def send(message: object) -> None:
        sent.append(message["status"] if "status" in message else message["type"])  # type: ignore[index, operator]

    headers = [] if header is None else [(b"authorization", header)]
    await guard({"type": kind, "path": path, "headers": headers}, receive, send)  # type: ignore[arg-type]
    return sent


async def test_the_guard_lets_nobody_in_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "inside"})  # type: ignore[operator]

    monkeypatch.setenv("VLLM_API_KEY", "right")
    guard = Guard(app)  # type: ignore[arg-type]
    for path in ("/v1/models", "/collective_rpc", "/update_weights", "/metrics"):
        assert await call(guard, path, b"Bearer right") == ["inside"]
        for wrong in (None, b"", b"Bearer ", b"Bearer wrong", b"Basic right", b"right"):
            assert (await call(guard, path, wrong))[0] == 401
    assert await call(guard, "/health", None) == ["inside"]
    assert await call(guard, "/ws", None, kind="websocket") == ["websocket.close"]
    monkeypatch.delenv("VLLM_API_KEY")
    assert (await call(Guard(app), "/v1/models", b"Bearer "))[0] == 401  # type: ignore[arg-type]
