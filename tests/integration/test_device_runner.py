"""The GPU's runner, its kernels interpreted: the same tokens as the host's runner, whatever happens on the way."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.config.schema import EngineConfig
from headrace.delivery.base import Canary, Manifest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports.shm import ShmSender
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.base import Runner
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.device import prompts, runner
from headrace.engines.embedded.device.pace import Pace
from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.setup import MakeRunner, make_device_runner, make_host_runner
from headrace.engines.embedded.transfer import StreamMark
from headrace.models.attention import ATTENTION
from headrace.models.experts import PRODUCTS, experts_modules
from headrace.models.loading import named_weights

# On a GPU the kernels are compiled and steps captured; elsewhere they are interpreted.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 40
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.5,
}
"""The interpreter takes as long for each layer and each head of keys: several are in `WIDE`."""
WIDE = {**SHAPE, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU every launch would be over at once: here some are seen late, as there."""
    if DEVICE == "cpu":
        draw, looks = random.Random(0), WeakKeyDictionary[StreamMark, int]()

        def passed(mark: StreamMark) -> bool:
            looks[mark] = looks.get(mark, draw.randrange(4)) - 1
            return looks[mark] < 0

        monkeypatch.setattr(StreamMark, "passed", passed)


@pytest.fixture(params=["computed", "replayed"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and passes over prompts as they are, and as where they are captured: filled up, in buffers of their own."""
    if request.param == "replayed":
        monkeypatch.setattr(prompts, "LEAST_TOKENS", 8)
        monkeypatch.setattr(prompts, "LEAST_CHUNKS", 2)
        if DEVICE == "cpu":
            monkeypatch.setattr(runner, "make_recorder", lambda device, *, capture: lambda body: body)
    else:
        monkeypatch.setattr(prompts, "HOST_BOUND", 0)


def llama(shape: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(LlamaConfig(**shape), attn_implementation=ATTENTION).eval().to(DEVICE)


@pytest.fixture
def model() -> Any:
    return llama(SHAPE)


def cores(
    model: Any, max_length: int = 64, make_device_runner: MakeRunner = make_device_runner, **engine: Any
) -> tuple[EngineCore, EngineCore]:
    """The same engine on the host's runner, and on the device's."""
    config = EngineConfig(slots=4, block_size=4, prefill_chunk=16, compile=False, **engine)
    host = EngineCore(model, config, name="host", max_length=max_length, version=1, make_runner=make_host_runner)
    device = EngineCore(model, config, name="device", max_length=max_length, version=1, make_runner=make_device_runner)
    return host, device


class Making:
    """Makes the device's runner, and knows which one it made."""

    runner: Runner

    def __call__(self, model: Any, config: EngineConfig, max_length: int, staged: int = 0) -> tuple[Runner, BlockPool]:
        self.runner, pool = make_device_runner(model, config, max_length, staged)
        return self.runner, pool


def ask(id: str, prompt: list[int], parent: str = "", group: str = "", **sampling: Any) -> Request:
    sampling = {"max_tokens": 7, "seed": 5, **sampling}
    return Request(
        id=id, token_ids=np.array(prompt, np.int32), sampling=Sampling(**sampling), parent=parent, group=group
    )


class Joined:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.kept: list[list[int]] = []
        self.routing: list[list[list[int]]] = []
        self.finish = ""

    def add(self, delta: Delta) -> None:
        assert not self.finish
        self.tokens += delta.token_ids.tolist()
        self.logprobs += delta.logprobs.tolist()
        self.versions += delta.versions.tolist()
        if delta.kept is not None:
            ends = np.cumsum(delta.kept.counts)
            self.kept += [part.tolist() for part in np.split(delta.kept.token_ids, ends[:-1])]
        if delta.routing is not None:
            self.routing += delta.routing.tolist()
        self.finish = delta.finish or ""


def run(core: EngineCore, requests: list[Request]) -> dict[str, Joined]:
    core.submit(requests)
    return finish(core, {})


def finish(core: EngineCore, joined: dict[str, Joined]) -> dict[str, Joined]:
    for _ in range(500):
        if not core.has_work:
            break
        collect(joined, core.step())
    assert not core.has_work
    stats = core.counters()
    assert stats.free_blocks == stats.total_blocks
    return joined


def collect(joined: dict[str, Joined], deltas: list[Delta]) -> None:
    for delta in deltas:
        joined.setdefault(delta.id, Joined()).add(delta)


def assert_same(left: dict[str, Joined], right: dict[str, Joined]) -> None:
    assert left.keys() == right.keys()
    for id in left:
        assert left[id].tokens == right[id].tokens, id
        assert left[id].finish == right[id].finish, id
        assert left[id].kept == right[id].kept, id
        assert left[id].routing == right[id].routing, id
        np.testing.assert_allclose(left[id].logprobs, right[id].logprobs, atol=2e-5)


@pytest.mark.usefixtures("passes")
def test_a_crowd_of_requests_gets_the_same_tokens() -> None:
    host, device = cores(llama(WIDE))
    requests = [
        ask("greedy", [1, 2, 3], temperature=0.0),
        ask("one token", [7], max_tokens=9),
        ask("long prompt", list(range(30)), max_tokens=3),
        ask("stops", [3, 1, 4], stop_token_ids=tuple(range(0, VOCABULARY, 3)), max_tokens=20),
        ask("stop sequence", [3, 1, 4], stop_sequences=((1, 2), (5,), (9,), (30,)), max_tokens=12),
        *(ask(f"member {i}", [9, 8, 7, 6, 5, 4], group="g", seed=i) for i in range(4)),
    ]
    assert_same(run(host, requests), run(device, requests))


def test_a_batch_that_fills_up_does_not_step_in_between(model: Any) -> None:
    config = EngineConfig(slots=8, block_size=4, prefill_chunk=8, compile=False)
    core = EngineCore(model, config, name="device", max_length=64, version=1, make_runner=make_device_runner)
    core.submit([ask(f"r{i}", [1 + i, 2, 3, 4], max_tokens=8) for i in range(8)])
    joined: dict[str, Joined] = {}
    # Two prompts a pass: until the last two, as many begin as would decode.
    for passes in (1, 2, 3):
        collect(joined, core.step())
        assert core.counters().prefilled_tokens == 8 * passes
        assert all(s.sampled + s.in_flight <= 1 for s in core.scheduler.running) and core.timings.steps <= passes
    collect(joined, core.step())
    assert core.counters().prefilled_tokens == 32 and not core.counters().waiting
    assert all(len(answer.tokens) == 8 for answer in finish(core, joined).values())


@pytest.mark.usefixtures("passes")
def test_truncated_rows_beside_whole_ones(model: Any) -> None:
    host, device = cores(model)
    requests = [
        ask("whole", [1, 2, 3]),
        ask("top p", [1, 2, 3], top_p=0.7, temperature=0.8),
        ask("top k, forbidden", [4, 2], top_k=5, forbidden=(1, 2, 3)),
        ask("kept", [5, 5, 5], top_p=0.9, min_p=0.05, record_kept=True),
    ]
    left, right = run(host, requests), run(device, requests)
    assert len(left["kept"].kept) == 7
    assert_same(left, right)


@pytest.mark.usefixtures("passes")
def test_a_cache_that_is_too_small_preempts_and_finishes(model: Any) -> None:
    host, device = cores(model, cache_tokens=48)
    requests = [ask(str(i), [i, i + 1, i + 2], max_tokens=12, seed=i) for i in range(5)]
    assert_same(run(host, requests), run(device, requests))
    assert host.counters().preemptions > 0 and device.counters().preemptions > 0


@pytest.mark.parametrize("cache_tokens", [36, 48, 60, 72])
def test_no_step_is_launched_without_room_for_its_tokens(model: Any, cache_tokens: int) -> None:
    _, core = cores(model, cache_tokens=cache_tokens)
    core.submit([ask(str(i), [i, i + 1, i + 2], max_tokens=20 - i, seed=i) for i in range(6)])
    joined: dict[str, Joined] = {}
    while core.has_work:
        collect(joined, core.step())
        for sequence in core.scheduler.running:
            # The last token of all is only stored by the step after it, and none beyond the limit ever.
            wanted = min(len(sequence.tokens) + sequence.in_flight, sequence.limit)
            assert wanted <= 4 * len(sequence.blocks) + 1
    assert core.counters().preemptions > 0
    assert [len(joined[str(i)].tokens) for i in range(6)] == [20 - i for i in range(6)]


@pytest.mark.usefixtures("passes")
def test_forks_share_and_continue(model: Any) -> None:
    _, device = cores(model)
    joined: dict[str, Joined] = {}
    device.submit([ask("parent", [1, 2, 3, 4, 5], max_tokens=18)])
    while len(joined.get("parent", Joined()).tokens) < 10:
        collect(joined, device.step())
        collect(joined, device.flush())
    forks = device.fork("parent", 12, 2)
    before = device.counters().prefilled_tokens
    device.submit(forks)
    finish(device, joined)
    assert device.counters().prefilled_tokens == before
    host, _ = cores(model)
    fresh = run(host, [ask(f.id, f.token_ids.tolist(), **_sampling(f)) for f in forks])
    for fork in forks:
        assert joined[fork.id].tokens == fresh[fork.id].tokens
        np.testing.assert_allclose(joined[fork.id].logprobs, fresh[fork.id].logprobs, atol=2e-5)


def _sampling(request: Request) -> dict[str, Any]:
    return {"max_tokens": request.sampling.max_tokens, "seed": request.sampling.seed}


@pytest.mark.usefixtures("passes")
@pytest.mark.slow
def test_experts_are_recorded_alike() -> None:
    host, device = cores(moe_model())
    requests = [ask(str(i), [i, 3, 2], seed=i) for i in range(3)]
    left, right = run(host, requests), run(device, requests)
    assert np.array(left["0"].routing).shape == (7, 2, 2)
    assert_same(left, right)


class Trainer:
    """Publishes other weights for every version."""

    def __init__(self, model: Any) -> None:
        self.publisher = Publisher(ShmSender(f"device-{id(self):x}"), "float32", 1e-3, np.arange(1, 9, dtype=np.int32))
        self.weights = {name: weight.cpu().clone() for name, weight in named_weights(model).items()}

    def publish(self, version: int, score: Any) -> Manifest:
        noise = torch.Generator().manual_seed(version)
        for weight in self.weights.values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=noise))
        return self.publisher.publish(version, version - 1, version, self.weights, score).result(60)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("proof", ["right", "wrong"])
def test_a_swap_between_launches_tags_every_token(
    model: Any, kv: Literal["keep", "recompute"], proof: Literal["right", "wrong"]
) -> None:
    _, device = cores(model, kv=kv)
    shadow = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation="eager").eval()
    trainer = Trainer(model)

    def score(ids: Any) -> Any:
        with torch.no_grad():
            for name, weight in named_weights(shadow).items():
                weight.copy_(trainer.weights[name])
            logprobs = shadow(torch.tensor(np.array(ids, np.int64))[None]).logits.log_softmax(-1)[0, :-1]
            return logprobs.gather(1, torch.tensor(np.array(ids[1:], np.int64))[:, None])[:, 0].numpy()

    try:
        requests = [ask(str(i), [i, i + 3], max_tokens=20, seed=i) for i in range(2)]
        device.submit(requests)
        joined: dict[str, Joined] = {}
        for _ in range(2):
            collect(joined, device.step())
        manifest = trainer.publish(2, score)
        if proof == "wrong":
            manifest.canary = Canary(
                token_ids=manifest.canary.token_ids,
                logprobs=manifest.canary.logprobs - 1,
                tolerance=manifest.canary.tolerance,
            )
        device.install(device.stage(manifest))
        # Steps go on before the proof is known; their tokens stay inside.
        deltas = device.step()
        assert not any(2 in delta.versions for delta in deltas)
        collect(joined, deltas)
        proved = device.proof(wait=True)
        assert proved is not None and proved.accepted == (proof == "right")
        if proof == "wrong":
            assert device.version == -1
            collect(joined, device.flush())
            assert not device.has_work
            assert {v for j in joined.values() for v in j.versions} == {1}
            good = trainer.publish(3, score)
            assert device.swap(device.stage(good)).accepted
        finish(device, joined)
        newest = 2 if proof == "right" else 3
        for request in requests:
            mine = joined[request.id]
            assert len(mine.tokens) == 20 and mine.versions == sorted(mine.versions)
            assert set(mine.versions) == {1, newest}
            if kv == "recompute":
                whole = score([*request.token_ids.tolist(), *mine.tokens])[1:]
                new = np.array(mine.versions) == newest
                np.testing.assert_allclose(np.array(mine.logprobs)[new], whole[new], atol=2e-5)
    finally:
        trainer.publisher.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Steady(Pace):
    """Every step takes 5 ms, however long the interpreter needs for it."""

    def stepped(self, seconds: float) -> None:
        super().stepped(5e-3)


def test_no_step_is_begun_before_weights_that_are_nearly_proved(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, making = Clock(), Making()
    pace = Steady(clock)
    monkeypatch.setattr(runner, "Pace", lambda: pace)
    host, device = cores(model, make_device_runner=making)
    requests = [ask(str(i), [i, i + 3], max_tokens=20, seed=i) for i in range(2)]
    device.submit(requests)
    joined: dict[str, Joined] = {}
    for _ in range(3):
        collect(joined, device.step())
    pace.stepped(5e-3)
    pace.hurry("soon")
    clock.now += 2e-3
    for haste in ("now", "none", "soon"):
        pace.hurry(haste)
    while making.runner.busy:
        collect(joined, device.step())
    known = device.counters().generated_tokens
    assert [device.step() for _ in range(5)] == [[]] * 5
    assert not making.runner.busy and device.counters().generated_tokens == known
    clock.now += 6e-3
    collect(joined, device.step())
    assert making.runner.busy or device.counters().generated_tokens > known, "a step is the most that is waited"
    pace.hurry("none")
    assert_same(run(host, requests), finish(device, joined))


@pytest.mark.parametrize("runs", [True, False])
def test_the_canary_is_scored_behind_the_first_token(model: Any, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    making = Making()
    _, device = cores(model, make_device_runner=making)
    trainer = Trainer(model)
    scored: list[int] = []
    real = making.runner.score

    def score(ids: Any, *, again: bool = False) -> Any:
        scored.append(device.drawn_version)
        return real(ids, again=again)

    monkeypatch.setattr(making.runner, "score", score)
    try:
        device.submit([ask("0", [1, 4], max_tokens=20)] * runs)
        device.step()
        device.flush()
        device.install(device.stage(trainer.publish(2, lambda ids: np.zeros(len(ids) - 1, np.float32))))
        assert scored == [-1] * (not runs), "where nothing is to be drawn, it is not waited for"
        while runs and not scored:
            device.step()
        assert scored == [2 if runs else -1]
    finally:
        trainer.publisher.close()


def moe_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=[], norm_topk_prob=True
    )
    return Qwen3MoeForCausalLM._from_config(config, attn_implementation=ATTENTION).eval().to(DEVICE)


@pytest.mark.parametrize("family", ["llama", "moe"])
def test_layers_are_compiled_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of the memory, the canary, prompts of any number and length, and steps of any batch share one graph."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_by = partial(torch.compile, backend=backend)  # what is traced is the same
    monkeypatch.setattr(
        torch,
        "compile",
        lambda layer, *, dynamic, fullgraph, **_: compile_by(layer, dynamic=dynamic, fullgraph=fullgraph),
    )
    torch._dynamo.reset()
    config = EngineConfig(slots=4, block_size=4, prefill_chunk=16)
    served = llama(WIDE) if family == "llama" else moe_model()
    core = EngineCore(served, config, name="device", max_length=64, version=1, make_runner=make_device_runner)
    core.score(np.arange(16, dtype=np.int32))
    for name, lengths in (("a", [5]), ("b", [1, 8]), ("c", [20, 2, 2, 16, 3])):
        core.submit([ask(f"{name}{i}", list(range(length)), max_tokens=3) for i, length in enumerate(lengths)])
        while core.has_work:
            core.step()
    assert core.counters().generated_tokens == 24
    assert len(graphs) == 1
    # Of all numbers the length of a pass alone is a variable: sizes of heads and the like are constants.
    inputs = [node.meta["example_value"] for node in graphs[0].graph.nodes if node.op == "placeholder"]
    assert sum(isinstance(value, torch.SymInt) for value in inputs) == 1


def test_experts_are_computed_and_recorded_as_on_the_host() -> None:
    served = moe_model()
    host, device = cores(copy.deepcopy(served))[0], cores(served, expert_kernels=True)[1]
    assert all(getattr(module, PRODUCTS) is not None for module in experts_modules(served).values())
    answers = []
    for core in (host, device):
        core.submit([ask(name, prompt, max_tokens=2) for name, prompt in (("a", [1, 2]), ("b", [3]))])
        found: dict[str, Joined] = {"a": Joined(), "b": Joined()}
        while core.has_work:
            for delta in core.step():
                found[delta.id].add(delta)
        answers.append(found)
    for name, expected in answers[0].items():
        assert answers[1][name].tokens == expected.tokens and answers[1][name].routing == expected.routing
        np.testing.assert_allclose(answers[1][name].logprobs, expected.logprobs, atol=1e-5)
