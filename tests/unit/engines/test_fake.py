"""What is special to the fake: its script and its clock. What it shares with all engines is in `tests/contract`."""

from __future__ import annotations

import asyncio
import heapq
import math
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.engines.base import KEPT_LIMIT, Delta, Request, Sampling
from headrace.engines.embedded.sampler import draw
from headrace.engines.fake import FakeEngine
from headrace.engines.fake_policy import FakePolicy
from headrace.engines.requests import sampling_refusal
from headrace.errors import DeliveryError, PeerDied

STOP = 63


class VirtualClock:
    """Time that passes only when everybody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._slept = 0

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slept += 1
        heapq.heappush(self._sleepers, (self.now + seconds, self._slept, wake))
        await wake

    async def run_until(self, task: asyncio.Task[object]) -> None:
        async with asyncio.timeout(20):
            while not task.done():
                for _ in range(10):
                    await asyncio.sleep(0)
                if self._sleepers and not task.done():
                    self.now, _, wake = heapq.heappop(self._sleepers)
                    if not wake.done():
                        wake.set_result(None)


def ask(id: str = "a", seed: int = 0, max_tokens: int = 1000, prompt: int = 3) -> Request:
    sampling = Sampling(max_tokens=max_tokens, seed=seed, stop_token_ids=(STOP,))
    return Request(id=id, token_ids=np.ones(prompt, np.int32), sampling=sampling)


async def collect(engine: FakeEngine, request: Request) -> list[Delta]:
    async with asyncio.timeout(20):
        return [delta async for delta in engine.generate(request)]


def tokens(deltas: list[Delta]) -> list[int]:
    return [int(token) for delta in deltas for token in delta.token_ids]


async def test_scripted_lengths_are_exact() -> None:
    engine = FakeEngine(version=0, lengths=[5, 1, 9])
    for i, length in enumerate([5, 1, 9, 5]):
        deltas = await collect(engine, ask(f"{i}", seed=i))
        assert len(tokens(deltas)) == length and deltas[-1].finish == "stop"
        assert tokens(deltas)[-1] == STOP and STOP not in tokens(deltas)[:-1]
    by_request = FakeEngine(version=0, lengths=lambda request: 2 * len(request.token_ids))
    assert len(tokens(await collect(by_request, ask(prompt=8)))) == 16
    cut = await collect(by_request, ask(prompt=8, max_tokens=7))
    assert (len(tokens(cut)), cut[-1].finish) == (7, "length")


async def test_a_scripted_length_survives_an_abort() -> None:
    engine = FakeEngine(version=0, lengths=[40, 1])
    stream = engine.generate(ask("a"))
    first = [await anext(stream) for _ in range(10)]
    await engine.abort(["a"])
    first += [delta async for delta in stream]
    partial = tokens(first)
    assert first[-1].finish == "aborted" and 10 <= len(partial) < 40
    rest = await collect(engine, ask("b", prompt=3 + len(partial)))
    assert len(partial) + len(tokens(rest)) == 40
    whole = FakeEngine(version=0, lengths=[40])
    assert tokens(await collect(whole, ask("c"))) == partial + tokens(rest)


def test_samples_follow_the_distribution_that_their_log_probabilities_state() -> None:
    policy = FakePolicy(vocabulary=6)
    for kind in ({}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.4}, {"forbidden": (0, 2)}):
        drawn = [policy.draw(Sampling(max_tokens=1, seed=seed, **kind), 4, 1)[:2] for seed in range(4000)]  # type: ignore[arg-type]
        stated = dict(drawn)
        assert sum(math.exp(p) for p in stated.values()) == pytest.approx(1.0, abs=0.02)
        for token, logprob in stated.items():
            share = sum(t == token for t, _ in drawn) / len(drawn)
            assert share == pytest.approx(math.exp(logprob), abs=0.03)


class Given(FakePolicy):
    """A policy with these logits everywhere."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__(len(logits))
        self._given = np.array(logits)

    def _compute_logits(self, position: int, version: int) -> np.ndarray:
        return self._given


# Steps of a quarter: ties are common, and no sum of masses falls next to a limit by rounding alone.
LOGITS = st.lists(st.integers(-12, 12).map(lambda quarter: quarter / 4), min_size=2, max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.75]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.97, 0.81, 0.53, 0.11]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 0.7]),
    forbidden=st.sets(st.integers(0, 13)).map(tuple),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 100_000),
)
def test_it_draws_what_the_embedded_engines_sampler_draws_from_the_same_logits(
    logits: list[float], seed: int, position: int, **kind: Any
) -> None:
    policy = Given(logits)
    sampling = Sampling(max_tokens=1, seed=seed, record_kept=True, **kind)
    assume(not sampling_refusal(sampling, policy.vocabulary))
    mine = policy.draw(sampling, position, 1)
    theirs = draw(torch.tensor([logits]), [sampling], [position])
    assert mine.kept.tolist() == theirs.kept[0].tolist()  # type: ignore[union-attr]
    assert mine.token == theirs.tokens[0]
    assert mine.logprob == pytest.approx(float(theirs.logprobs[0]), abs=1e-5)
    loose = msgspec.structs.replace(sampling, record_kept=False)
    assert policy.draw(loose, position, 1)[:2] == mine[:2], "recording a small set changes nothing"


def test_truncation_by_hand() -> None:
    """Masses 8, 4, 2, 2 of 16, the best last: what each rule leaves, and in which order they apply."""
    policy = Given([math.log(2), math.log(2), math.log(4), math.log(8)])

    def kept(**kind: Any) -> list[int]:
        drawn = policy.draw(Sampling(max_tokens=1, record_kept=True, **kind), 0, 0)
        mass = [2, 2, 4, 8]
        left = sum(mass[i] for i in drawn.kept)
        assert drawn.logprob == pytest.approx(math.log(mass[drawn.token] / left))
        return drawn.kept.tolist()  # type: ignore[no-any-return]

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=3) == [0, 2, 3], "of two equal ones the lower id"
    assert kept(top_p=0.7) == [2, 3]
    assert kept(top_p=0.8) == [0, 2, 3]
    assert kept(top_p=0.6, top_k=2) == [3], "8 of the 12 that top-k left are enough"
    assert kept(min_p=0.3) == [2, 3]
    assert kept(min_p=0.3, top_p=0.8) == [2, 3]
    assert kept(min_p=0.6, forbidden=(3,)) == [2], "2 of 4 is not enough"
    assert kept(top_k=2, forbidden=(2, 9)) == [0, 3], "an id outside of the vocabulary is ignored"


def test_no_more_than_the_limit_are_kept_where_they_are_recorded() -> None:
    policy = FakePolicy(KEPT_LIMIT + 50)
    recorded, free = (policy.draw(Sampling(max_tokens=1, record_kept=record), 0, 0) for record in (True, False))
    scores = [policy.logprob(token, 0, 0) for token in range(policy.vocabulary)]
    assert recorded.kept.tolist() == sorted(np.argsort(scores)[-KEPT_LIMIT:].tolist())
    assert len(free.kept) == policy.vocabulary


def test_tokens_depend_on_seed_position_and_version_each() -> None:
    policy = FakePolicy()
    sampling = [Sampling(max_tokens=1, seed=seed) for seed in (1, 2)]
    base = [policy.draw(sampling[0], p, 1)[0] for p in range(50)]
    assert base == [FakePolicy().draw(sampling[0], p, 1)[0] for p in range(50)]
    for other in (
        [policy.draw(sampling[1], p, 1)[0] for p in range(50)],
        [policy.draw(sampling[0], p + 1, 1)[0] for p in range(50)],
        [policy.draw(sampling[0], p, 2)[0] for p in range(50)],
    ):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 30


async def test_time_is_that_of_the_clock_it_was_given() -> None:
    clock = VirtualClock()
    engine = FakeEngine(version=0, lengths=[10, 4, 4], slots=2, token_seconds=3.0, sleep=clock.sleep)

    async def all_of_them() -> list[float]:
        ends = []

        async def one(id: str) -> None:
            await collect(engine, ask(id))
            ends.append(clock.now)

        async with asyncio.TaskGroup() as group:
            for id in "abc":
                group.create_task(one(id))
        return ends

    task = asyncio.create_task(all_of_them())
    await clock.run_until(task)  # type: ignore[arg-type]
    # The third waits for a slot: tokens 5..8 of the first step beside it.
    assert task.result() == [12.0, 24.0, 30.0]


async def test_staging_takes_time_in_which_tokens_flow() -> None:
    clock = VirtualClock()
    policy = FakePolicy()
    engine = FakeEngine(policy=policy, version=1, lengths=[10], token_seconds=1.0, load_seconds=4.5, sleep=clock.sleep)
    generating = asyncio.create_task(collect(engine, ask()))
    loading = asyncio.create_task(engine.load(policy.manifest(2)))
    await clock.run_until(generating)  # type: ignore[arg-type]
    assert [int(v) for delta in generating.result() for v in delta.versions] == [1] * 4 + [2] * 6
    assert loading.result().accepted and clock.now == 10.0


async def test_a_request_that_fails_by_script_fails_alone() -> None:
    engine = FakeEngine(version=0, lengths=[8], fail_requests={"bad": 3})
    good, bad = await asyncio.gather(collect(engine, ask("good")), collect(engine, ask("bad")))
    assert (len(tokens(good)), good[-1].finish) == (8, "stop")
    assert (len(tokens(bad)), bad[-1].finish, bad[-1].error) == (3, "failed", "request 'bad' fails by script")


async def test_an_engine_that_dies_ends_everything() -> None:
    engine = FakeEngine(version=0, lengths=[50], slots=2, die_after=21)
    completions = await asyncio.gather(*(collect(engine, ask(id)) for id in "abc"))
    assert sorted(len(tokens(deltas)) for deltas in completions) == [0, 10, 11]
    assert {(deltas[-1].finish, deltas[-1].error) for deltas in completions} == {("failed", "fake died")}
    assert (await collect(engine, ask("late")))[-1].finish == "failed"
    for call in (engine.fork("a", 1, 1), engine.load(engine.policy.manifest(1)), engine.score(np.ones(3, np.int32))):
        with pytest.raises(PeerDied, match="fake died"):
            await call
    await engine.close()


async def test_loads_go_wrong_by_script() -> None:
    engine = FakeEngine(loads={1: "reject", 3: "quarantine"})
    with pytest.raises(DeliveryError):
        await engine.score(np.ones(3, np.int32))
    proofs = [await engine.load(engine.policy.manifest(version)) for version in (1, 2, 3, 4)]
    assert [(p.accepted, p.quarantined) for p in proofs] == [
        (False, False),
        (True, False),
        (False, True),
        (True, False),
    ]
    assert engine.counters().version == 4


async def test_stop_tokens_that_cannot_be_drawn_are_refused_in_a_script() -> None:
    engine = FakeEngine(version=0, policy=FakePolicy(32), lengths=[4])
    deltas = await collect(engine, ask())
    assert deltas[-1].finish == "failed" and "vocabulary of 32" in deltas[-1].error


async def test_a_scripted_token_is_recorded_as_kept_and_is_never_a_forbidden_one() -> None:
    sampling = Sampling(
        max_tokens=99, seed=1, stop_token_ids=(5, 3), forbidden=(5, *range(6, 30)), top_k=4, record_kept=True
    )
    policy = FakePolicy(32)
    engine = FakeEngine(version=0, policy=policy, lengths=[40])
    deltas = await collect(engine, Request(id="a", token_ids=np.ones(3, np.int32), sampling=sampling))
    drawn = tokens(deltas)
    assert len(drawn) == 40 and drawn[-1] == 3 and deltas[-1].finish == "stop"
    assert set(drawn[:-1]) <= {0, 1, 2, 4, 30, 31}
    replaced = 0
    for position, (token, delta) in enumerate(zip(drawn, deltas, strict=True), 3):
        own = policy.draw(sampling, position, 0)
        assert delta.kept is not None and delta.kept.counts.tolist() == [len(delta.kept.token_ids)]
        if token == own.token:
            expected = own.logprob
            assert delta.kept.token_ids.tolist() == own.kept.tolist()
        else:
            replaced += 1
            expected = policy.logprob(token, position, 0)
            assert delta.kept.token_ids.tolist() == sorted({token, *own.kept.tolist()})
        assert delta.logprobs.tolist() == pytest.approx([expected])
    assert 1 < replaced < 39, "some tokens are the script's, some are drawn"
    unending = msgspec.structs.replace(sampling, stop_token_ids=(5,), max_tokens=60)
    deltas = await collect(engine, Request(id="b", token_ids=np.ones(3, np.int32), sampling=unending))
    assert (len(tokens(deltas)), deltas[-1].finish) == (60, "length"), "its only stop token is forbidden"


def test_rollouts_and_the_fake_import_without_torch() -> None:
    code = "import sys, headrace.rollouts, headrace.engines.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
