"""The plugin's parts that need no vLLM: staging, the live digest over fused layouts, the guard."""

import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config.schema import LoraConfig
from headrace.delivery.base import Manifest, Part
from headrace.delivery.digest import digest, digest_as
from headrace.delivery.plan import plan_weights
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.errors import DeliveryError
from headrace.models.loading import named_weights
from headrace.training.lora import TrainedAdapter
from headrace_vllm_plugin.guard import Guard
from headrace_vllm_plugin.layout import compare, visible
from headrace_vllm_plugin.weights import Pristine, WorkerStaging
from headrace_vllm_plugin.wire import FetchOrder, Live, StagingState

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


def compared(model: torch.nn.Module, loaded: dict[str, torch.Tensor]) -> Live:
    return compare(
        list(visible(model, loaded)), loaded, lambda tensors: digest(tensors.items()), digest(loaded.items())
    )


def test_fused_and_padded_weights_are_digested_under_their_own_names() -> None:
    staged = weights(1)
    model = Served(staged)
    found = compared(model, staged)
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
    assert compared(model, staged).wrong == [f"layers.0.attn.{member}.weight"]


class ColumnParallelLinear(torch.nn.Module):
    """A layer with the names and attributes by which vLLM's own layers say what they hold."""

    def __init__(self, weight: torch.Tensor, rank: int, workers: int, replicas: int = 1) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.num_kv_head_replicas = rank, workers, replicas
        self.weight = torch.nn.Parameter(weight.clone())


class QKVParallelLinear(ColumnParallelLinear):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, rank: int, workers: int) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = rank, workers
        self.weight, self.bias = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(bias.clone())


class VocabParallelEmbedding(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, start: int, end: int) -> None:
        super().__init__()
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        padding = torch.zeros(8 - (end - start), weight.shape[1])
        self.weight = torch.nn.Parameter(torch.cat([weight[start:end], padding]))


class Shard(torch.nn.Module):
    """One of two workers: four query heads of two rows, one head of keys that both hold, a vocabulary of 13."""

    packed_modules_mapping = {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}

    def __init__(self, loaded: dict[str, torch.Tensor], rank: int) -> None:
        super().__init__()
        half = {name: tensor.chunk(2)[rank] for name, tensor in loaded.items()}
        self.qkv = QKVParallelLinear(
            torch.cat([half["q.weight"], loaded["k.weight"], loaded["v.weight"]]), rank, 2, replicas=2
        )
        self.gate_up = MergedColumnParallelLinear(torch.cat([half["gate.weight"], half["up.weight"]]), rank, 2)
        self.fc = ColumnParallelLinear(half["fc.weight"], rank, 2)
        self.down = RowParallelLinear(loaded["down.weight"].chunk(2, 1)[rank], loaded["down.bias"], rank, 2)
        self.embed = VocabParallelEmbedding(loaded["embed.weight"], *((0, 8) if rank == 0 else (8, 13)))
        self.norm = torch.nn.LayerNorm(4, bias=False)
        with torch.no_grad():
            self.norm.weight.copy_(loaded["norm.weight"])


def to_be_cut() -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    shapes = {"q": (8, 4), "k": (2, 4), "v": (2, 4), "gate": (6, 4), "up": (6, 4), "fc": (6, 4), "down": (4, 6)}
    shapes |= {"embed": (13, 4), "norm": (4,)}
    found = {f"{name}.weight": torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    return found | {"down.bias": torch.randn(4, generator=noise)}


@pytest.mark.parametrize("rank", [0, 1])
def test_each_worker_of_a_server_shows_its_slices(rank: int) -> None:
    loaded = to_be_cut()
    found = compared(Shard(loaded, rank), loaded)
    assert (found.visible, found.hidden, found.cut, found.wrong) == (10, 0, 6, [])


@pytest.mark.parametrize("name", sorted(to_be_cut()))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_slice_is_blamed_on_its_tensor(rank: int, name: str) -> None:
    loaded = to_be_cut()
    model = Shard(loaded, rank)
    changed = {**loaded, name: loaded[name] + 1e-3}
    assert compared(model, changed).wrong == [name]


def test_another_workers_slice_is_wrong() -> None:
    loaded = to_be_cut()
    model = Shard(loaded, 1)
    for layer in (model.qkv, model.gate_up, model.fc, model.down):
        layer.tp_rank = 0
    wrong = compared(model, loaded).wrong
    assert wrong == ["q.weight", "gate.weight", "up.weight", "fc.weight", "down.weight"]


def order_of(manifest: Manifest, **changes: object) -> FetchOrder:
    fields = {name: getattr(manifest, name) for name in FetchOrder.__struct_fields__ if hasattr(manifest, name)}
    order = FetchOrder(**{**fields, **changes})
    return msgspec.json.decode(msgspec.json.encode(order), type=FetchOrder)


def wait(staging: WorkerStaging) -> StagingState:
    deadline = time.monotonic() + 10
    while not staging.state().done and time.monotonic() < deadline:
        time.sleep(0.005)
    return staging.state()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("transport", ["shm", "file", "tcp", "nccl"])
def test_what_is_staged_is_what_was_published(tmp_path: Path, transport: str, workers: int) -> None:
    def canary(ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(ids) - 1, np.float32)

    sending = sender(transport, SenderSettings(run_id=f"plugin-{transport}", directory=tmp_path))
    publisher = Publisher(sending, "float32", 1e-3, np.arange(4, dtype=np.int32))
    staging = WorkerStaging(torch.device("cpu"), lambda: pytest.fail("no adapter is staged"), workers)
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
        staging.check()
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


def test_weights_that_are_overwritten_while_they_are_loaded_are_noticed() -> None:
    """A server reads them where the trainer wrote them."""
    sending = sender("shm", SenderSettings(run_id="plugin-overwritten"))
    publisher = Publisher(sending, "float32", 1e-3, np.arange(4, dtype=np.int32))
    staging = WorkerStaging(torch.device("cpu"), lambda: pytest.fail("no adapter is staged"))
    try:
        for version in (1, 2, 3):
            manifest = publisher.publish(
                version, version - 1, 1, weights(version), lambda ids: np.zeros(len(ids) - 1, np.float32)
            ).result(timeout=60)
            if version == 1:
                staging.begin(order_of(manifest))
                assert wait(staging).error == ""
                staging.take(1)
            publisher.acknowledged(version)
        with pytest.raises(DeliveryError):
            staging.check()
    finally:
        staging.close()
        publisher.close()


def test_a_version_in_parts_is_assembled(tmp_path: Path) -> None:
    """Two ranks of a trainer publish one half of each tensor, through senders of their own."""
    whole = {"a": torch.arange(12.0).view(6, 2), "b": torch.arange(8.0).view(2, 4)}
    plan = plan_weights(whole, "float32")
    senders = [sender("shm", SenderSettings(run_id=f"plugin-part-{rank}")) for rank in range(2)]
    staging = WorkerStaging(torch.device("cpu"), lambda: pytest.fail("no adapter is staged"))
    try:
        parts = []
        for rank, sending in enumerate(senders):
            mine = {name: tensor.chunk(2)[rank].contiguous() for name, tensor in whole.items()}
            piece = plan_weights(mine, "float32")
            sending.wait(1, 5)
            location = sending.write(1, piece, mine)
            sending.finish(location)
            starts = [(rank * entry.shape[0], 0) for entry in piece.entries]
            parts.append(Part(location=location, entries=list(piece.entries), starts=starts))
        order = FetchOrder(
            version=1, transport="shm", location="", entries=list(plan.entries), plan_digest=plan.digest,
            digest=digest(whole.items()), parts=parts,
        )  # fmt: skip
        staging.begin(order)
        assert wait(staging).error == ""
        taken = staging.take(1)
        assert all(torch.equal(taken[name], whole[name]) for name in whole)
        staging.begin(msgspec.structs.replace(order, parts=parts[:1]))
        assert "is incomplete" in wait(staging).error
    finally:
        staging.close()
        for sending in senders:
            sending.close()


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
