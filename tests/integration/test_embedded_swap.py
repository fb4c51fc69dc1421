"""Weights that change under running sequences: each token belongs to the version of its tag, and nothing leaks."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import join, make_model, plain, prompts, reference_greedy, reference_logprobs, request, run_out

from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.engines.base import Delta
from headrace.engines.embedded.base import Runner
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.engine import EmbeddedEngine, EngineLoop
from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.setup import make_runner
from headrace.errors import DeliveryError, HeadraceError, UserError
from headrace.models.loading import named_weights
from headrace.observe.spans import SpanRecorder

CANARY = np.arange(1, 9, dtype=np.int32)


@functools.cache
def reference(version: int) -> Any:
    """Version v is the random model of seed v, here under plain Hugging Face attention."""
    return plain(make_model("llama", seed=version))


class Trainer:
    """Publishes versions, and checks log-probabilities against them."""

    def __init__(self) -> None:
        self._publisher = Publisher(sender("shm", SenderSettings(run_id=uuid.uuid4().hex[:8])), "float32", 1e-3, CANARY)

    def publish(self, version: int) -> Manifest:
        def score(ids: np.ndarray) -> np.ndarray:
            table = reference_logprobs(reference(version), ids[:1], ids[1:])
            return table[np.arange(len(ids) - 1), ids[1:]].astype(np.float32)

        manifest = self._publisher.publish(
            version, version - 1, version, named_weights(reference(version)), score
        ).result(30)
        # The last two stay readable.
        self._publisher.acknowledged(version - 1)
        return manifest

    def close(self) -> None:
        self._publisher.close()

    def check(self, prompt: np.ndarray, delta: Delta) -> None:
        """Each log-probability equals a plain forward over the whole prefix under the version of its tag."""
        for version in set(delta.versions.tolist()):
            table = reference_logprobs(reference(version), prompt, delta.token_ids)
            mine = delta.versions == version
            expected = table[np.arange(len(delta.token_ids)), delta.token_ids]
            np.testing.assert_allclose(delta.logprobs[mine], expected[mine], atol=1e-4)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.close()


def new_core(
    version: int = -1, model: Any = None, watch: Callable[[Runner], None] = lambda runner: None, **changes: Any
) -> EngineCore:
    """An engine of this model, or of version 0; `watch` gets its runner, and may change it."""

    def make_watched(*arguments: Any) -> tuple[Runner, BlockPool]:
        runner, pool = make_runner(*arguments)
        watch(runner)
        return runner, pool

    config = EngineConfig(**{"slots": 4, "block_size": 4, "prefill_chunk": 16, **changes})
    model = model or make_model("llama", seed=max(version, 0))
    return EngineCore(model, config, name="e", max_length=64, version=version, make_runner=make_watched)


def steps(core: EngineCore, count: int) -> list[Delta]:
    return [delta for _ in range(count) for delta in core.step()]


def test_a_token_belongs_to_the_version_of_its_tag(trainer: Trainer) -> None:
    core = new_core(prefill_chunk=7)
    given = prompts([5, 12, 20, 9, 6])
    core.submit(request(f"r{i}", p, 14, seed=i) for i, p in enumerate(given))
    assert not core.has_work, "requests wait until the first version is proved"
    assert core.step() == []
    deltas: list[Delta] = []
    for version in (0, 1, 2):
        proof = core.swap(core.stage(trainer.publish(version)))
        assert proof.accepted and core.version == version
        before = core.counters().generated_tokens
        deltas += steps(core, 6)
        assert core.counters().generated_tokens > before
    while core.has_work:
        deltas += core.step()
    done = join(deltas)
    for i, prompt in enumerate(given):
        delta = done[f"r{i}"]
        assert delta.finish == "length" and len(delta.token_ids) == 14
        assert (np.diff(delta.versions) >= 0).all()
        trainer.check(prompt, delta)
    assert set(done["r0"].versions.tolist()) >= {0, 1}
    assert core.counters().free_blocks == core.counters().total_blocks


def test_the_tag_changes_exactly_at_the_swap(trainer: Trainer) -> None:
    core = new_core(version=0)
    prompt = prompts([5])[0]
    core.submit([request("r", prompt, 10, seed=3)])
    deltas = steps(core, 4)
    assert core.swap(core.stage(trainer.publish(3))).accepted
    deltas += steps(core, 20)
    delta = join(deltas)["r"]
    assert delta.versions.tolist() == [0] * 4 + [3] * 6
    trainer.check(prompt, delta)
    # The check has teeth: under the other version the same tokens have other log-probabilities.
    wrong = Delta(id="r", token_ids=delta.token_ids, logprobs=delta.logprobs, versions=3 - delta.versions)
    with pytest.raises(AssertionError):
        trainer.check(prompt, wrong)


@pytest.mark.parametrize(
    ("interrupt", "hurries"), [("never", True), ("abort", True), ("drain", False), ("block", False)]
)
def test_little_is_under_way_while_weights_wait_only_for_that(
    trainer: Trainer, interrupt: str, hurries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    core = new_core(
        version=0, interrupt=interrupt, watch=lambda runner: monkeypatch.setattr(runner, "hurry", said.append)
    )
    staged = core.stage(trainer.publish(1))
    assert said == ["soon", "now"] * hurries
    assert core.swap(staged).accepted
    assert said == ["soon", "now"] * hurries + ["none"]
    said.clear()
    torn = trainer.publish(2)
    torn.digest ^= 1
    with pytest.raises(DeliveryError, match="arrived wrong"):
        core.stage(torn)
    assert said == ["soon"] * hurries + ["none"], "what was refused is not waited for"


def test_kept_kv_goes_on_from_the_old_keys_and_values(trainer: Trainer) -> None:
    core = new_core(version=0, kv="keep")
    prompt = prompts([6])[0]
    core.submit([request("r", prompt, 8, seed=1)])
    deltas = steps(core, 4)
    assert core.swap(core.stage(trainer.publish(1))).accepted
    delta = join(deltas + steps(core, 10))["r"]
    assert delta.versions.tolist() == [0] * 4 + [1] * 4

    ids = torch.tensor(np.concatenate([prompt, delta.token_ids]), dtype=torch.long)[None]
    with torch.no_grad():
        # The fourth token was sampled but not yet computed when the weights changed.
        old = reference(0)(input_ids=ids[:, : len(prompt) + 3], use_cache=True)
        new = reference(1)(input_ids=ids[:, len(prompt) + 3 : -1], past_key_values=old.past_key_values, use_cache=True)
    expected = torch.log_softmax(new.logits[0], -1).gather(1, ids[0, len(prompt) + 4 :, None])[:, 0]
    np.testing.assert_allclose(delta.logprobs[4:], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_new_request_never_reads_keys_of_an_old_version(trainer: Trainer, kv: str) -> None:
    core = new_core(version=0, kv=kv, slots=2, block_size=8)
    prompt = prompts([30])[0]
    core.submit(request(f"r{i}", prompt, 6, group="g", seed=i) for i in range(6))
    deltas = steps(core, 4)
    assert core.swap(core.stage(trainer.publish(1))).accepted
    deltas += steps(core, 100)
    done = join(deltas)
    fresh = [d for d in done.values() if (d.versions == core.version).all()]
    assert len(fresh) == 4
    for delta in fresh if kv == "keep" else done.values():
        trainer.check(prompt, delta)


def test_a_partial_resumed_by_prefix_continues_as_if_never_aborted() -> None:
    prompt = prompts([9])[0]
    whole = new_core(version=0)
    whole.submit([request("r", prompt, 12, seed=5, top_k=20)])
    expected = run_out(whole)["r"]

    core = new_core(version=0)
    core.submit([request("r", prompt, 12, seed=5, top_k=20), request("other", prompt, 12, seed=6)])
    early = steps(core, 5)
    partial = join(early + core.abort(["r", "nobody"]))["r"]
    assert partial.finish == "aborted" and len(partial.token_ids) == 5
    resumed = np.concatenate([prompt, partial.token_ids])
    core.submit([request("r", resumed, 12 - 5, seed=5, top_k=20)])
    rest = run_out(core)["r"]
    assert np.concatenate([partial.token_ids, rest.token_ids]).tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(np.concatenate([partial.logprobs, rest.logprobs]), expected.logprobs, atol=1e-5)
    assert core.counters().free_blocks == core.counters().total_blocks


def test_the_death_of_a_leader_leaves_its_group_alive() -> None:
    prompt = prompts([40])[0]
    core = new_core(version=0, prefill_chunk=8)
    core.submit(request(f"r{i}", prompt, 3, group="g", temperature=0.0) for i in range(3))
    steps(core, 2)
    assert core.abort(["r0"])[0].finish == "aborted"
    done = run_out(core)
    expected = reference_greedy(plain(make_model("llama")), prompt, 3)
    assert [done[i].token_ids.tolist() for i in ("r1", "r2")] == [expected, expected]


def test_a_quarantined_engine_serves_nothing_until_a_later_version_is_proved(trainer: Trainer) -> None:
    core = new_core(version=0)
    prompt = prompts([5])[0]
    core.submit([request("r", prompt, 6, seed=1)])
    deltas = steps(core, 2)
    wrong = trainer.publish(1)
    wrong.canary.logprobs = wrong.canary.logprobs + 1
    proof = core.swap(core.stage(wrong))
    assert not proof.accepted and proof.quarantined
    assert core.version == -1 and not core.has_work and core.step() == []
    with pytest.raises(UserError, match="has no proved weights to score with"):
        core.score(prompt)
    assert core.swap(core.stage(trainer.publish(2))).accepted
    assert len(core.score(prompt)) == len(prompt) - 1
    delta = join(deltas + steps(core, 20))["r"]
    assert delta.versions.tolist() == [0] * 2 + [2] * 4
    trainer.check(prompt, delta)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 20), st.integers(1, 12), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0), st.just(False)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(False)),
        st.tuples(st.just("swap"), st.just(0), st.just(0), st.just(False)),
    ),
    max_size=14,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, kv=st.sampled_from(["keep", "recompute"]), slots=st.integers(1, 4))
def test_no_schedule_leaks_blocks_or_mixes_versions(operations: list[Any], kv: str, slots: int) -> None:
    model = make_model("llama")
    core = new_core(version=0, model=model, kv=kv, slots=slots, cache_tokens=40, prefill_chunk=5)
    weights = {v: {k: w.clone() for k, w in named_weights(make_model("llama", seed=v)).items()} for v in (0, 1)}
    given_prompts: dict[str, np.ndarray] = {}
    deltas: list[Delta] = []
    for kind, a, b, grouped in operations:
        if kind == "submit":
            name = f"r{len(given_prompts)}"
            given_prompts[name] = prompts([a])[0]
            core.submit([request(name, given_prompts[name], b, group="g" if grouped else "", seed=len(name))])
        elif kind == "abort":
            deltas += core.abort([f"r{a}"])
        elif kind == "step":
            deltas += steps(core, a)
        else:
            for name, live in named_weights(model).items():
                live.copy_(weights[(core.version + 1) % 2][name])
            core.adopt(core.version + 1)
    for _ in range(1000):
        if not core.has_work:
            break
        deltas += core.step()
    done = join(deltas)
    assert done.keys() == given_prompts.keys()
    stats = core.counters()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)
    for name, delta in done.items():
        assert delta.finish in ("length", "aborted")
        assert delta.finish == "aborted" or len(delta.token_ids) > 0
        if kv == "recompute" and len(delta.token_ids):
            parity = delta.versions % 2
            for version in (0, 1):
                table = reference_logprobs(reference(version), given_prompts[name], delta.token_ids)
                expected = table[np.arange(len(delta.token_ids)), delta.token_ids]
                mine = parity == version
                np.testing.assert_allclose(delta.logprobs[mine], expected[mine], atol=1e-4)


class Running:
    """An `EngineLoop` in a thread, and what it emitted. It makes no further step while `gate` is held."""

    def __init__(self, core: EngineCore, interrupt: str = "never") -> None:
        self.deltas: list[Delta] = []
        self.emitted = threading.Condition()
        self.gate = threading.Lock()
        self.error: BaseException | None = None
        self.loop = EngineLoop(core, self._emit, interrupt)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except RuntimeError as error:
            self.error = error

    def _emit(self, deltas: list[Delta]) -> None:
        with self.gate, self.emitted:
            self.deltas += deltas
            self.emitted.notify_all()

    def wait(self, condition: Callable[[dict[str, Delta]], bool]) -> dict[str, Delta]:
        with self.emitted:
            assert self.emitted.wait_for(lambda: condition(join(list(self.deltas))), timeout=30)
            return join(self.deltas)

    def stop(self) -> None:
        self.loop.stop()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("interrupt", ["never", "abort"])
def test_the_loop_loads_between_two_steps(trainer: Trainer, interrupt: str) -> None:
    spans = SpanRecorder()
    # A clock that ticks a second at each look: every step emits its tokens.
    ticks = itertools.count().__next__
    config = EngineConfig(slots=4, block_size=4)
    core = EngineCore(make_model("llama"), config, name="e", max_length=250, spans=spans, clock=ticks)
    running = Running(core, interrupt)
    prompt = prompts([5])[0]
    running.loop.submit([request("r", prompt, 220, seed=2)])
    assert running.loop.load(trainer.publish(1)).result(30).accepted
    running.wait(lambda done: "r" in done)
    # Every step emits, so that this holds the request in its middle.
    with running.gate:
        bad, good = trainer.publish(2), trainer.publish(3)
        bad.digest ^= 1
    loads = [running.loop.load(manifest) for manifest in (bad, good)]
    rejected, proof = (load.result(30) for load in loads)
    assert not rejected.accepted and not rejected.quarantined and "digest" in rejected.reason
    assert proof.accepted and running.loop.counters().version == 3
    done = running.wait(lambda done: done["r"].finish is not None)
    trainer.check(prompt, done["r"])
    if interrupt == "abort":
        assert done["r"].finish == "aborted" and set(done["r"].versions.tolist()) == {1}
    else:
        assert done["r"].finish == "length" and set(done["r"].versions.tolist()) == {1, 3}
    scored = running.loop.score(np.concatenate([prompt, done["r"].token_ids])).result(30)
    table = reference_logprobs(reference(3), prompt, done["r"].token_ids)
    expected = table[np.arange(len(done["r"].token_ids)), done["r"].token_ids]
    np.testing.assert_allclose(scored[len(prompt) - 1 :], expected, atol=1e-4)
    running.stop()
    recorded = {(span.name, span.busy) for span in spans.drain()}
    assert recorded == {("wait", False), ("swap", True), ("prefill", True), ("decode", True)}


def test_an_aborting_swap_returns_every_started_sequence() -> None:
    core = new_core(version=0, slots=2)
    core.submit(request(f"r{i}", p, 20, seed=i) for i, p in enumerate(prompts([4, 5, 6])))
    early = steps(core, 3)
    ended = join(early + core.abort_started())
    assert {name: (d.finish, len(d.token_ids)) for name, d in ended.items()} == {
        "r0": ("aborted", 3),
        "r1": ("aborted", 3),
    }
    assert run_out(core).keys() == {"r2"}


def test_an_error_in_a_step_is_raised_after_everybody_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the kernel is on fire")

    core = new_core(version=0, watch=lambda runner: monkeypatch.setattr(runner, "run", broken))
    running = Running(core)
    running.loop.submit([request("r", prompts([4])[0], 5)])
    done = running.wait(lambda done: "r" in done)
    running.thread.join(30)
    assert done["r"].finish == "aborted"
    assert isinstance(running.error, RuntimeError)
    with pytest.raises(HeadraceError, match="has stopped"):
        running.loop.score(CANARY).result(30)
    running.loop.submit([request("late", prompts([4])[0], 5)])
    assert join(running.deltas)["late"].finish == "failed"


def test_tokens_are_not_held_back() -> None:
    now = [0.0]
    config = EngineConfig(slots=2, block_size=4)
    core = EngineCore(make_model("llama"), config, name="e", max_length=64, version=0, clock=lambda: now[0])
    core.submit([request("r", prompts([4])[0], 40)])
    sizes = []
    for _ in range(12):
        sizes.append([len(d.token_ids) for d in core.step()])
        now[0] += 0.035
    assert sizes == [[1], [], [], [3], [], [], [3], [], [], [3], [], []]


def test_what_began_together_is_not_sent_together_ever_after() -> None:
    now = [0.0]
    config = EngineConfig(slots=8, block_size=4)
    core = EngineCore(make_model("llama"), config, name="e", max_length=64, version=0, clock=lambda: now[0])
    core.submit(request(f"r{i}", prompts([4])[0], 60) for i in range(8))
    sent: list[dict[str, int]] = []
    for _ in range(24):
        sent.append({d.id: len(d.token_ids) for d in core.step()})
        now[0] += 0.0101  # a little more than an eighth of what tokens are held back
    assert len(sent[0]) == 8
    assert all(len(deltas) == 1 for deltas in sent[1:])
    for name in (f"r{i}" for i in range(8)):
        turns = [turn for turn, deltas in enumerate(sent) if name in deltas]
        assert turns[1] <= 8 and np.diff(turns[1:]).tolist() == [8] * (len(turns) - 2)


async def test_the_engine_waits_for_weights_streams_and_ends(trainer: Trainer) -> None:
    config = EngineConfig(slots=4, block_size=4)
    model = make_model("llama", seed=0)
    engine = EmbeddedEngine(EngineCore(model, config, name="e", max_length=4000), config)
    prompt = prompts([5])[0]

    async def collect(name: str, max_tokens: int) -> Delta:
        return join([delta async for delta in engine.generate(request(name, prompt, max_tokens, seed=4))])[name]

    waiting = asyncio.create_task(collect("a", 20))
    aborted = asyncio.create_task(collect("c", 5))
    await asyncio.sleep(0.05)
    assert not waiting.done() and not aborted.done()
    await engine.abort(["c"])
    assert (await asyncio.wait_for(aborted, 30)).finish == "aborted"
    at_once = asyncio.create_task(collect("e", 5))
    await asyncio.sleep(0)
    await engine.abort(["e"])
    assert (await asyncio.wait_for(at_once, 30)).finish == "aborted"
    assert not waiting.done()
    assert (await engine.load(trainer.publish(1))).accepted
    trainer.check(prompt, await asyncio.wait_for(waiting, 30))

    assert (await asyncio.wait_for(collect("b", 5), 60)).finish == "length"

    closed = asyncio.create_task(collect("d", 3000))
    await asyncio.sleep(0.05)
    await engine.close()
    assert (await asyncio.wait_for(closed, 30)).finish == "aborted"
    await engine.close()
    assert engine.counters().free_blocks == engine.counters().total_blocks


async def test_leaving_a_stream_early_aborts_its_request() -> None:
    config = EngineConfig(slots=4, block_size=4)
    core = EngineCore(make_model("llama"), config, name="e", max_length=4000, version=0)
    engine = EmbeddedEngine(core, config)
    stream = engine.generate(request("r", prompts([5])[0], 3000))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await engine.score(CANARY)  # Asked for after the abort, and so answered after it.
    assert engine.counters().running == 0
    assert engine.counters().generated_tokens < 3000
    await engine.close()


def test_a_copy_of_the_model_is_not_needed_to_swap() -> None:
    model = make_model("llama")
    core = new_core(version=0, model=model)
    addresses = {name: w.data_ptr() for name, w in named_weights(model).items()}
    trainer = Trainer()
    assert core.swap(core.stage(trainer.publish(1))).accepted
    trainer.close()
    assert {name: w.data_ptr() for name, w in named_weights(model).items()} == addresses
    changed = copy.deepcopy(named_weights(model))
    for name, tensor in named_weights(make_model("llama", seed=1)).items():
        torch.testing.assert_close(changed[name], tensor, rtol=0, atol=0)
