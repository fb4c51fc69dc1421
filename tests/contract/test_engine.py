"""What every engine keeps. Nothing here knows which engine it runs on; `engine_subjects.py` makes them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import pytest
from engine_subjects import Factory, Setting, Subject

from headrace.engines.base import FORBIDDEN_LIMIT, Counters, Delta, FinishReason, Request, Sampler, Sampling
from headrace.errors import HeadraceError

T = TypeVar("T")

SECONDS = 60.0
"""No wait of a test is longer than this."""
LONG = 3000
"""Tokens of a request that is still running when a test acts on it."""


@dataclass
class Completion:
    """Deltas, joined as they come."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""

    def add(self, delta: Delta) -> None:
        assert self.finish is None, "a delta came after the last one"
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.versions)
        self.token_ids += delta.token_ids.tolist()
        self.logprobs += delta.logprobs.tolist()
        self.versions += delta.versions.tolist()
        if delta.kept is not None:
            counts = delta.kept.counts
            assert len(counts) == len(delta.token_ids) and counts.sum() == len(delta.kept.token_ids)
            self.kept += [ids.tolist() for ids in np.split(delta.kept.token_ids, counts.cumsum())[:-1]]
        self.finish, self.error = delta.finish, delta.error


async def soon(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(SECONDS):
        return await awaitable


def ask(id: str, prompt: list[int] | None = None, *, priority: int = 0, **sampling: object) -> Request:
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 7, **sampling}
    token_ids = np.array([3, 1, 4, 1, 5] if prompt is None else prompt, np.int32)
    return Request(id=id, token_ids=token_ids, sampling=Sampling(**sampling), priority=priority)  # type: ignore[arg-type]


class Stream:
    """A request under way; `completion` grows while it is watched."""

    def __init__(self, engine: Sampler, request: Request) -> None:
        self.request = request
        self.completion = Completion()
        self._deltas: AsyncIterator[Delta] = engine.generate(request)

    async def until(self, enough: Callable[[Completion], bool]) -> Completion:
        async with asyncio.timeout(SECONDS):
            while not enough(self.completion):
                delta = await anext(self._deltas)
                assert delta.id == self.request.id
                self.completion.add(delta)
        return self.completion

    async def begun(self) -> Completion:
        """Until there is a token; the request must still be running then."""
        completion = await self.until(lambda c: bool(c.token_ids) or c.finish is not None)
        assert completion.finish is None, "the request is too short for this test"
        return completion

    async def end(self) -> Completion:
        completion = await self.until(lambda c: c.finish is not None)
        with pytest.raises(StopAsyncIteration):
            await soon(anext(self._deltas))
        return completion

    async def close(self) -> None:
        await soon(self._deltas.aclose())  # type: ignore[attr-defined]


async def complete(engine: Sampler, request: Request) -> Completion:
    return await Stream(engine, request).end()


async def complete_all(engine: Sampler, requests: list[Request]) -> list[Completion]:
    return await soon(asyncio.gather(*(complete(engine, request) for request in requests)))


class Counting(Protocol):
    """A subject, or an engine that counts."""

    @property
    def counters(self) -> Callable[[], Counters]: ...


async def eventually(counting: Counting, holds: Callable[[Counters], bool]) -> Counters:
    """Counters may trail the deltas by a moment."""
    async with asyncio.timeout(SECONDS):
        while True:
            stats = counting.counters()
            if holds(stats):
                return stats
            await asyncio.sleep(0.01)


def idle(stats: Counters) -> bool:
    return stats.running == stats.waiting == 0 and stats.free_blocks == stats.total_blocks


def assert_recorded(subject: Subject, request: Request, completion: Completion) -> None:
    """Each token's log-probability is that of the version it is tagged with, given all tokens before it."""
    whole = np.concatenate([request.token_ids, np.array(completion.token_ids, np.int32)])
    for version in set(completion.versions):
        reference = subject.reference(version, whole)[len(request.token_ids) - 1 :]
        mine = np.array(completion.versions) == version
        np.testing.assert_allclose(np.array(completion.logprobs)[mine], reference[mine], atol=1e-4)


async def load(subject: Subject, version: int) -> None:
    proof = await soon(subject.load(await subject.publish(version)))
    assert proof.accepted and not proof.quarantined and proof.version == version, proof.reason


# Completions


async def test_deltas_make_the_completion(subject: Subject) -> None:
    request = ask("a", max_tokens=40)
    completion = await complete(subject.engine, request)
    assert completion.finish == "length" and completion.error == ""
    assert len(completion.token_ids) == 40
    assert all(0 <= token < subject.vocabulary for token in completion.token_ids)
    assert completion.versions == [1] * 40
    assert_recorded(subject, request, completion)


@pytest.mark.parametrize("max_tokens", [1, 2, 33])
async def test_the_length_limit_is_exact(subject: Subject, max_tokens: int) -> None:
    completion = await complete(subject.engine, ask("a", max_tokens=max_tokens))
    assert (len(completion.token_ids), completion.finish) == (max_tokens, "length")


async def test_a_stop_token_ends_the_sequence_and_is_part_of_it(subject: Subject) -> None:
    free = (await complete(subject.engine, ask("free", max_tokens=30))).token_ids
    at = next(i for i in range(3, 30) if free[i] not in free[:i])
    stopped = await complete(subject.engine, ask("stopped", max_tokens=30, stop_token_ids=(free[at],)))
    assert (stopped.token_ids, stopped.finish) == (free[: at + 1], "stop")
    last = await complete(subject.engine, ask("last", max_tokens=at + 1, stop_token_ids=(free[at],)))
    assert (last.token_ids, last.finish) == (free[: at + 1], "stop")


async def test_greedy_does_not_depend_on_the_seed(subject: Subject) -> None:
    one, two = [await complete(subject.engine, ask(f"{s}", temperature=0.0, seed=s, max_tokens=30)) for s in (1, 2)]
    assert one.token_ids == two.token_ids
    assert_recorded(subject, ask("1"), one)


async def test_the_best_token_alone_is_certain(subject: Subject) -> None:
    greedy = await complete(subject.engine, ask("greedy", temperature=0.0))
    single = await complete(subject.engine, ask("single", top_k=1))
    assert single.token_ids == greedy.token_ids
    np.testing.assert_allclose(single.logprobs, 0.0, atol=1e-6)


async def test_seeds_matter_and_neighbours_do_not(subject: Subject) -> None:
    request = ask("alone", max_tokens=25, seed=11)
    alone = await complete(subject.engine, request)
    crowd = [ask(f"n{i}", list(range(1, 2 + 5 * i)), max_tokens=5 + 7 * i, seed=i) for i in range(2 * subject.slots)]
    together = await complete_all(subject.engine, [*crowd[:5], msgspec.structs.replace(request, id="with"), *crowd[5:]])
    assert together[5].token_ids == alone.token_ids
    np.testing.assert_allclose(together[5].logprobs, alone.logprobs, atol=1e-4)
    other = await complete(subject.engine, ask("other", max_tokens=25, seed=12))
    assert other.token_ids != alone.token_ids


async def test_scores_are_the_log_probabilities_of_greedy_tokens(subject: Subject) -> None:
    request = ask("a", temperature=0.0, max_tokens=20)
    completion = await complete(subject.engine, request)
    whole = np.concatenate([request.token_ids, np.array(completion.token_ids, np.int32)])
    scores = await soon(subject.engine.score(whole))
    assert scores.shape == (len(whole) - 1,)
    np.testing.assert_allclose(scores, subject.reference(1, whole), atol=1e-4)
    np.testing.assert_allclose(scores[len(request.token_ids) - 1 :], completion.logprobs, atol=1e-4)


# Many requests


async def test_more_requests_than_slots_all_finish_and_the_counters_add_up(subject: Subject) -> None:
    requests = [ask(f"{i}", max_tokens=3 + i, seed=i) for i in range(3 * subject.slots)]
    completions = await complete_all(subject.engine, requests)
    assert [len(c.token_ids) for c in completions] == [3 + i for i in range(3 * subject.slots)]
    stats = await eventually(subject, idle)
    assert stats.version == 1
    assert stats.generated_tokens == sum(len(c.token_ids) for c in completions)
    assert stats.prefilled_tokens >= len(requests[0].token_ids)


async def test_no_more_than_the_slots_run_at_a_time(subject: Subject) -> None:
    streams = [Stream(subject.engine, ask(f"{i}", max_tokens=LONG)) for i in range(subject.slots + 2)]
    running = [asyncio.create_task(stream.end()) for stream in streams]
    await eventually(subject, lambda s: (s.running, s.waiting) == (subject.slots, 2))
    await soon(subject.engine.abort())
    assert {(await soon(task)).finish for task in running} == {"aborted"}


async def test_a_lower_priority_number_goes_first(fresh: Subject) -> None:
    ended: list[str] = []

    async def finish(request: Request) -> None:
        await complete(fresh.engine, request)
        ended.append(request.id)

    patient = [ask(f"{i}", max_tokens=20, priority=1) for i in range(3 * fresh.slots)]
    tasks = [asyncio.create_task(finish(request)) for request in [*patient, ask("urgent", max_tokens=20)]]
    # All of them are there when the first may begin.
    await eventually(fresh, lambda s: s.running + s.waiting == len(tasks))
    await load(fresh, 1)
    await soon(asyncio.gather(*tasks))
    assert ended.index("urgent") < fresh.slots


async def test_a_duplicate_id_is_an_error_for_that_request_only(subject: Subject) -> None:
    alone = await complete(subject.engine, ask("reference", max_tokens=60))
    first = Stream(subject.engine, ask("same", max_tokens=60))
    running = asyncio.create_task(first.end())
    await asyncio.sleep(0)
    second = await complete(subject.engine, ask("same", max_tokens=5))
    assert second.finish == "failed" and "same" in second.error
    assert (await soon(running)).token_ids == alone.token_ids
    await eventually(subject, idle)


async def test_a_request_that_cannot_be_served_fails_alone(subject: Subject) -> None:
    good, bad = await complete_all(subject.engine, [ask("good"), ask("bad", [])])
    assert good.finish == "length"
    assert bad.finish == "failed" and bad.error and not bad.token_ids
    await eventually(subject, idle)


# Abort, close


async def test_abort_returns_the_partial_and_a_prefix_resumes_it(subject: Subject) -> None:
    stream = Stream(subject.engine, ask("a", max_tokens=LONG))
    await stream.begun()
    await soon(subject.engine.abort(["a"]))
    partial = await stream.end()
    assert partial.finish == "aborted" and 0 < len(partial.token_ids) < LONG

    n = len(partial.token_ids)
    resumed = await complete(subject.engine, ask("b", [3, 1, 4, 1, 5, *partial.token_ids], max_tokens=20))
    whole = await complete(subject.engine, ask("c", max_tokens=n + 20))
    assert partial.token_ids + resumed.token_ids == whole.token_ids
    np.testing.assert_allclose(partial.logprobs + resumed.logprobs, whole.logprobs, atol=1e-4)


async def test_abort_ends_the_named_requests_only(subject: Subject) -> None:
    streams = [Stream(subject.engine, ask(f"{i}", max_tokens=LONG)) for i in range(2)]
    for stream in streams:
        await stream.begun()
    await soon(subject.engine.abort(["0", "nobody"]))
    assert (await streams[0].end()).finish == "aborted"
    before = len(streams[1].completion.token_ids)
    await streams[1].until(lambda c: len(c.token_ids) > before)
    assert streams[1].completion.finish is None
    await streams[1].close()


async def test_abort_of_all_ends_running_and_waiting(subject: Subject) -> None:
    streams = [Stream(subject.engine, ask(f"{i}", max_tokens=LONG)) for i in range(2 * subject.slots)]
    tasks = [asyncio.create_task(stream.end()) for stream in streams]
    await eventually(subject, lambda s: s.running == s.waiting == subject.slots and s.generated_tokens > 0)
    await soon(subject.engine.abort())
    completions = await soon(asyncio.gather(*tasks))
    assert all(c.finish == "aborted" for c in completions)
    assert sum(bool(c.token_ids) for c in completions) >= 1
    stats = await eventually(subject, idle)
    assert stats.generated_tokens == sum(len(c.token_ids) for c in completions)


async def test_closing_the_iterator_frees_the_request(subject: Subject) -> None:
    stream = Stream(subject.engine, ask("a", max_tokens=LONG))
    await stream.begun()
    await stream.close()
    stats = await eventually(subject, idle)
    assert stats.generated_tokens < LONG


async def test_cancelling_the_reader_frees_the_request(subject: Subject) -> None:
    reader = asyncio.create_task(complete(subject.engine, ask("a", max_tokens=LONG)))
    await eventually(subject, lambda s: s.running == 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(reader)
    stats = await eventually(subject, idle)
    assert stats.generated_tokens < LONG


async def test_close_unblocks_everybody_and_may_be_called_again(subject: Subject) -> None:
    streams = [Stream(subject.engine, ask(f"{i}", max_tokens=LONG)) for i in range(2 * subject.slots)]
    tasks = [asyncio.create_task(_outcome(stream.end())) for stream in streams]
    await eventually(subject, lambda s: s.running == subject.slots)
    await soon(subject.engine.close())
    assert set(await soon(asyncio.gather(*tasks))) <= {"failed", "aborted"}
    await soon(subject.engine.close())
    assert await soon(_outcome(complete(subject.engine, ask("late")))) == "failed"


async def test_close_unblocks_what_waits_for_a_first_version(fresh: Subject) -> None:
    waiting = asyncio.create_task(_outcome(complete(fresh.engine, ask("a"))))
    await eventually(fresh, lambda s: s.running + s.waiting == 1)
    await soon(fresh.engine.close())
    assert await soon(waiting) in {"failed", "aborted"}


async def _outcome(completion: Awaitable[Completion]) -> str:
    """How a request ended; an error of ours is a way to fail."""
    try:
        return str((await completion).finish)
    except HeadraceError:
        return "failed"


# Weights


async def test_requests_wait_for_the_first_proved_version(fresh: Subject) -> None:
    assert fresh.counters().version == -1
    request = ask("a")
    running = asyncio.create_task(complete(fresh.engine, request))
    await eventually(fresh, lambda s: s.running + s.waiting == 1)
    await asyncio.sleep(0.05)
    assert not running.done() and fresh.counters().generated_tokens == 0
    await load(fresh, 3)
    completion = await soon(running)
    assert set(completion.versions) == {3}
    assert_recorded(fresh, request, completion)


async def test_a_load_changes_the_version_between_two_tokens_of_a_running_request(subject: Subject) -> None:
    requests = [ask("a", max_tokens=LONG), ask("b", [2, 7, 1, 8], max_tokens=LONG, seed=3)]
    streams = [Stream(subject.engine, request) for request in requests]
    for stream in streams:
        await stream.begun()
    for version in (2, 5):
        await load(subject, version)
        assert subject.counters().version == version
        for stream in streams:
            await stream.until(lambda c, version=version: c.versions[-1] == version)  # type: ignore[misc]
    await soon(subject.engine.abort())
    for request, stream in zip(requests, streams, strict=True):
        completion = await stream.end()
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) == {1, 2, 5}
        assert_recorded(subject, request, completion)


async def test_new_weights_are_really_served(subject: Subject) -> None:
    before = await complete(subject.engine, ask("before", max_tokens=30))
    await load(subject, 2)
    request = ask("after", max_tokens=30)
    after = await complete(subject.engine, request)
    assert set(after.versions) == {2}
    assert after.token_ids != before.token_ids
    assert_recorded(subject, request, after)


@pytest.mark.parametrize("wrong", ["digest", "older"])
async def test_a_rejected_load_changes_nothing(fresh: Subject, wrong: str) -> None:
    first = await fresh.publish(1)
    assert (await soon(fresh.load(first))).accepted
    await load(fresh, 2)
    stream = Stream(fresh.engine, ask("running", max_tokens=LONG))
    await stream.begun()
    if wrong == "digest":
        manifest = await fresh.publish(3)
        proof = await soon(fresh.load(msgspec.structs.replace(manifest, digest=manifest.digest ^ 1)))
    else:
        proof = await soon(fresh.load(first))
    assert not proof.accepted and not proof.quarantined and proof.reason
    assert fresh.counters().version == 2

    known = len(stream.completion.token_ids)
    await stream.until(lambda c: len(c.token_ids) > known)
    await soon(fresh.engine.abort())
    completion = await stream.end()
    assert set(completion.versions) == {2}
    assert_recorded(fresh, stream.request, completion)
    await load(fresh, 4)


async def test_live_weights_that_fail_their_proof_serve_nothing(subject: Subject) -> None:
    stream = Stream(subject.engine, ask("a", max_tokens=LONG))
    await stream.begun()
    manifest = await subject.publish(2)
    manifest.canary = msgspec.structs.replace(manifest.canary, logprobs=manifest.canary.logprobs - 1)
    proof = await soon(subject.load(manifest))
    assert not proof.accepted and proof.quarantined and proof.reason
    stats = subject.counters()
    assert stats.version == -1
    await asyncio.sleep(0.05)
    assert subject.counters().generated_tokens == stats.generated_tokens
    await load(subject, 3)
    completion = await stream.until(lambda c: c.versions[-1] == 3)
    assert set(completion.versions) == {1, 3}
    await stream.close()


async def test_an_interrupting_load_returns_partials_that_resume_under_the_new_weights(
    factory: Factory, setting: Setting
) -> None:
    async with factory(dataclasses.replace(setting, interrupt="abort")) as subject:
        await load(subject, 1)
        stream = Stream(subject.engine, ask("a", max_tokens=LONG))
        await stream.begun()
        await load(subject, 2)
        partial = await stream.end()
        assert partial.finish == "aborted" and set(partial.versions) == {1}
        assert_recorded(subject, stream.request, partial)
        request = ask("b", [3, 1, 4, 1, 5, *partial.token_ids], max_tokens=10)
        resumed = await complete(subject.engine, request)
        assert set(resumed.versions) == {2}
        assert_recorded(subject, request, resumed)
        await eventually(subject, idle)


async def test_a_draining_load_lets_what_runs_end_and_nothing_begin(factory: Factory, setting: Setting) -> None:
    async with factory(dataclasses.replace(setting, interrupt="drain")) as subject:
        await load(subject, 1)
        running = [Stream(subject.engine, ask(f"r{i}", max_tokens=300, seed=i)) for i in range(subject.slots)]
        for stream in running:
            await stream.begun()
        waiting = Stream(subject.engine, ask("w", max_tokens=10))
        waited = asyncio.create_task(waiting.end())
        await eventually(subject, lambda stats: stats.waiting == 1)
        manifest = await subject.publish(2)
        loading = asyncio.create_task(subject.load(manifest))
        ended = [await stream.end() for stream in running]
        proof = await soon(loading)
        late = await waited
        assert proof.accepted and proof.version == 2
        for stream, completion in zip(running, ended, strict=True):
            assert completion.finish == "length" and set(completion.versions) == {1}
            assert_recorded(subject, stream.request, completion)
        assert late.finish == "length" and set(late.versions) == {2}
        assert_recorded(subject, waiting.request, late)
        await eventually(subject, idle)


async def test_a_blocking_load_lets_all_that_were_asked_for_end(factory: Factory, setting: Setting) -> None:
    async with factory(dataclasses.replace(setting, interrupt="block")) as subject:
        await load(subject, 1)
        before = [Stream(subject.engine, ask(f"b{i}", max_tokens=300, seed=i)) for i in range(subject.slots + 1)]
        for stream in before[: subject.slots]:
            await stream.begun()
        # Its turn comes when another has ended: the time for that, and then the time for its own tokens.
        last = asyncio.create_task(before[-1].until(lambda c: bool(c.token_ids)))
        await eventually(subject, lambda stats: stats.waiting == 1)
        manifest = await subject.publish(2)
        loading = asyncio.create_task(subject.load(manifest))
        ended = [await stream.end() for stream in before[:-1]]
        await last
        ended.append(await before[-1].end())
        assert (await soon(loading)).accepted
        assert all(c.finish == "length" and set(c.versions) == {1} for c in ended)
        request = ask("after", max_tokens=10)
        after = await complete(subject.engine, request)
        assert set(after.versions) == {2}
        assert_recorded(subject, request, after)
        await eventually(subject, idle)


# Sampling options


def first_end(tokens: list[int], stops: tuple[tuple[int, ...], ...]) -> int:
    """How many tokens there are when they first end with one of these; all of them, if they never do."""
    ends = (n for n in range(1, len(tokens) + 1) if any(tuple(tokens[:n][-len(stop) :]) == stop for stop in stops))
    return next(ends, len(tokens))


async def test_a_stop_sequence_ends_the_completion_and_is_part_of_it(subject: Subject) -> None:
    free = (await complete(subject.engine, ask("free", max_tokens=30))).token_ids
    late, early, single = tuple(free[9:13]), tuple(free[4:6]), (free[7],)
    unseen = next(token for token in range(subject.vocabulary) if token not in free)
    cases = {
        "whole": (late,),
        "first": (tuple(free[:2]),),
        "one token": (single,),
        "the first to be whole": (late, early),
        "its end alone is not enough": ((unseen, *late), (*early, unseen)),
        "longer than the completion": ((*free, *free),),
        "not from the prompt on": ((5, free[0]), (1, 5, *free[:3])),
    }
    requests = [ask(name, max_tokens=30, stop_sequences=stops) for name, stops in cases.items()]
    for (name, stops), completion in zip(cases.items(), await complete_all(subject.engine, requests), strict=True):
        end = first_end(free, stops)
        assert completion.token_ids == free[:end], name
        assert completion.finish == ("stop" if end < 30 else "length"), name
    assert first_end(free, cases["whole"]) <= 13 and first_end(free, cases["first"]) == 2

    end = first_end(free, (late,))
    last = await complete(subject.engine, ask("last", max_tokens=end, stop_sequences=(late,)))
    assert (last.token_ids, last.finish) == (free[:end], "stop"), "at the length limit it is still a stop"
    cut = await complete(subject.engine, ask("cut", max_tokens=end - 1, stop_sequences=(late,)))
    assert (cut.token_ids, cut.finish) == (free[: end - 1], "length")
    await eventually(subject, idle)


_ALTERNATIVES: dict[bytes, np.ndarray] = {}


def alternatives(subject: Subject, prefix: list[int], temperature: float = 1.0) -> np.ndarray:
    """The reference's probabilities [V] after a prefix, from its scores of every token that may follow, in float64."""

    def scores(token: int) -> np.ndarray:
        return subject.reference(1, np.array([*prefix, token], np.int32))

    # Engines that serve the same weights share this: equal scores of a prefix, to the bit, are of the same weights.
    key = np.array(prefix).tobytes() + scores(0).tobytes()
    if key not in _ALTERNATIVES:
        _ALTERNATIVES[key] = np.array([scores(token)[-1] for token in range(subject.vocabulary)], np.float64)
        assert np.exp(_ALTERNATIVES[key]).sum() == pytest.approx(1.0, abs=1e-4)
    tempered = np.exp(_ALTERNATIVES[key] / temperature)
    return np.asarray(tempered / tempered.sum())


def kept_by_definition(p: np.ndarray, sampling: Sampling) -> list[int]:
    """Ids that truncation leaves: forbidden tokens go first, then top-k, top-p and min-p each look at the rest."""
    left = sorted((t for t in range(len(p)) if t not in sampling.forbidden), key=lambda t: -p[t])
    if sampling.top_k:
        left = left[: sampling.top_k]
    total = sum(p[t] for t in left)
    chosen: list[int] = []
    for token in left:
        if sum(p[t] for t in chosen) < sampling.top_p * total:
            chosen.append(token)
    return sorted(t for t in chosen if p[t] >= sampling.min_p * p[left[0]])


def assert_drawn(subject: Subject, request: Request, completion: Completion, count: int) -> None:
    """The first tokens come from what truncation leaves of the reference's distributions, and say so."""
    sampling = request.sampling
    for i in range(count):
        prefix = [*request.token_ids.tolist(), *completion.token_ids[:i]]
        p = alternatives(subject, prefix, sampling.temperature or 1.0)
        left = kept_by_definition(p, sampling)
        token = completion.token_ids[i]
        assert token in left
        assert completion.logprobs[i] == pytest.approx(np.log(p[token] / p[left].sum()), abs=1e-4)
        if sampling.record_kept:
            assert completion.kept[i] == left


TRUNCATIONS: dict[str, dict[str, object]] = {
    "nothing": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "tempered": {"temperature": 0.6, "top_p": 0.9},
    "all": {"temperature": 1.4, "top_k": 9, "top_p": 0.85, "min_p": 0.15, "forbidden": (2, 40)},
}


async def test_truncated_draws_are_from_the_kept_tokens_and_name_them(subject: Subject) -> None:
    """All on one prompt, so that its distribution is asked for once; one request is followed by a token."""
    requests = [
        ask(f"{name}/{seed}", max_tokens=2, seed=seed, record_kept=True, **kind)
        for name, kind in TRUNCATIONS.items()
        for seed in range(4)
    ]
    completions = await complete_all(subject.engine, requests)
    sizes = {}
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.kept) == 2
        assert all(token in kept for token, kept in zip(completion.token_ids, completion.kept, strict=True))
        assert_drawn(subject, request, completion, 1)
        sizes[request.id.partition("/")[0]] = len(completion.kept[0])
    assert_drawn(subject, requests[-1], completions[-1], 2)
    assert sizes.pop("nothing") == subject.vocabulary
    assert all(1 < size < subject.vocabulary for size in sizes.values()), "every rule must leave some and cut some"


async def test_recording_what_was_kept_changes_no_token(subject: Subject) -> None:
    kinds = [TRUNCATIONS["nothing"], TRUNCATIONS["all"]]
    requests = [
        ask(f"{i}/{record}", max_tokens=20, record_kept=record, **kind)
        for i, kind in enumerate(kinds)
        for record in (False, True)
    ]
    plain, recorded, plain_all, recorded_all = await complete_all(subject.engine, requests)
    for without, with_kept in ((plain, recorded), (plain_all, recorded_all)):
        assert without.token_ids == with_kept.token_ids
        np.testing.assert_allclose(without.logprobs, with_kept.logprobs, atol=1e-4)
        assert without.kept == [] and len(with_kept.kept) == 20
        for token, kept in zip(with_kept.token_ids, with_kept.kept, strict=True):
            assert token in kept and kept == sorted(set(kept))
    greedy = await complete(subject.engine, ask("greedy", temperature=0.0, top_k=3, record_kept=True))
    assert greedy.kept == [[]] * 12, "nothing is truncated where nothing is drawn"


async def test_forbidden_tokens_are_never_drawn_and_the_others_share_their_probability(subject: Subject) -> None:
    prompt = ask("").token_ids.tolist()
    best = np.argsort(-alternatives(subject, prompt))
    most, even = tuple(best[:FORBIDDEN_LIMIT].tolist()), tuple(range(0, subject.vocabulary, 2))
    requests = [
        *(ask(f"most/{seed}", max_tokens=8, seed=seed, forbidden=most) for seed in range(6)),
        ask("even", max_tokens=30, forbidden=even),
        ask("greedy", max_tokens=2, temperature=0.0, forbidden=most),
        ask("nobody", max_tokens=8, forbidden=(subject.vocabulary + 7,)),
        ask("free", max_tokens=8),
    ]
    completions = await complete_all(subject.engine, requests)
    for request, completion in zip(requests, completions, strict=True):
        assert not set(completion.token_ids) & set(request.sampling.forbidden)
        assert_drawn(subject, request, completion, 1)
    greedy = completions[-3]
    assert_drawn(subject, requests[-3], greedy, 2)
    assert greedy.token_ids[0] == best[FORBIDDEN_LIMIT]
    assert completions[-2].token_ids == completions[-1].token_ids, "a token that does not exist forbids nothing"


async def test_values_that_make_no_sense_fail_their_request_alone_in_one_line(subject: Subject) -> None:
    bad: dict[str, tuple[dict[str, object], str]] = {
        "no tokens": ({"max_tokens": 0}, "max_tokens"),
        "temperature": ({"temperature": -0.5}, "temperature"),
        "top_k": ({"top_k": -1}, "top_k"),
        "top_p of nothing": ({"top_p": 0.0}, "top_p"),
        "top_p over one": ({"top_p": 1.1}, "top_p"),
        "min_p over one": ({"min_p": 1.5}, "min_p"),
        "min_p under zero": ({"min_p": -0.1}, "min_p"),
        "min_p of no number": ({"min_p": float("nan")}, "min_p"),
        "stop": ({"stop_sequences": ((3, 4), ())}, "stop sequence"),
        "forbidden": ({"forbidden": tuple(range(FORBIDDEN_LIMIT + 1))}, f"{FORBIDDEN_LIMIT} tokens are forbidden"),
    }
    requests = [ask(name, **kind) for name, (kind, _) in bad.items()]
    *failed, good = await complete_all(subject.engine, [*requests, ask("good")])
    assert good.finish == "length" and len(good.token_ids) == 12
    for (name, (_, about)), completion in zip(bad.items(), failed, strict=True):
        assert completion.finish == "failed" and not completion.token_ids, name
        assert about in completion.error and "\n" not in completion.error, name
    await eventually(subject, idle)


# Parents


def child(id: str, parent: str, prompt: list[int], **sampling: object) -> Request:
    return msgspec.structs.replace(ask(id, prompt, **sampling), parent=parent)


async def test_a_child_gets_the_tokens_of_its_prompt_and_leaves_its_parent_alone(subject: Subject) -> None:
    parent = ask("parent", max_tokens=LONG)
    stream = Stream(subject.engine, parent)
    await stream.until(lambda c: len(c.token_ids) >= 12 or c.finish is not None)
    assert stream.completion.finish is None, "the request is too short for this test"
    known = list(stream.completion.token_ids)
    whole = [*parent.token_ids.tolist(), *known]
    other = (whole[9] + 1) % subject.vocabulary
    # Cut at its last known token, in the middle, inside of its prompt, and where the two go apart.
    prompts = {"end": whole, "middle": whole[:11], "prompt": whole[:3], "apart": [*whole[:9], other, *whole[10:13]]}
    seeds = dict(zip(prompts, range(4), strict=True))
    children = [child(name, "parent", prompt, seed=seeds[name]) for name, prompt in prompts.items()]
    # Two at a time, so that there is a slot for them beside their parent.
    with_parent = [*await complete_all(subject.engine, children[:2]), *await complete_all(subject.engine, children[2:])]
    assert stream.completion.finish is None
    await soon(subject.engine.abort(["parent"]))
    ended = await stream.end()
    assert ended.finish == "aborted" and len(ended.token_ids) > len(known)
    alone = [ask(f"{name} alone", prompt, seed=seeds[name]) for name, prompt in prompts.items()]
    again = ask("parent again", max_tokens=len(ended.token_ids))
    *without, undisturbed = await complete_all(subject.engine, [*alone, again])
    for request, one, two in zip(children, with_parent, without, strict=True):
        assert one.token_ids == two.token_ids, request.id
        assert_recorded(subject, request, one)
    assert ended.token_ids == undisturbed.token_ids
    np.testing.assert_allclose(ended.logprobs, undisturbed.logprobs, atol=1e-4)
    await eventually(subject, idle)


async def test_a_parent_that_is_unknown_or_has_ended_is_no_error(subject: Subject) -> None:
    parent = await complete(subject.engine, ask("ended"))
    prompt = [3, 1, 4, 1, 5, *parent.token_ids[:6]]
    requests = [child(name, name.split()[0], prompt) for name in ("ended child", "nobody child", "itself")]
    expected = await complete(subject.engine, ask("alone", prompt))
    for request, completion in zip(requests, await complete_all(subject.engine, requests), strict=True):
        assert (completion.token_ids, completion.finish) == (expected.token_ids, "length"), request.id
        assert_recorded(subject, request, completion)
    await eventually(subject, idle)


async def test_a_parent_that_is_aborted_takes_no_child_along(subject: Subject) -> None:
    stream = Stream(subject.engine, ask("parent", max_tokens=LONG))
    known = list((await stream.begun()).token_ids)
    prompt = [3, 1, 4, 1, 5, *known]
    begun = Stream(subject.engine, child("begun", "parent", prompt, max_tokens=LONG))
    await begun.begun()
    late = child("late", "parent", prompt, max_tokens=20)
    running = asyncio.create_task(complete(subject.engine, late))
    await asyncio.sleep(0)  # It is asked for, and the abort comes right after it.
    await soon(subject.engine.abort(["parent"]))
    assert (await stream.end()).finish == "aborted"
    had = len(begun.completion.token_ids)
    await begun.until(lambda c: len(c.token_ids) >= had + 20 or c.finish is not None)
    await soon(subject.engine.abort(["begun"]))
    completions = [await begun.end(), await soon(running)]
    assert [completion.finish for completion in completions] == ["aborted", "length"]
    for request, completion in zip([begun.request, late], completions, strict=True):
        count = len(completion.token_ids)
        alone = await complete(subject.engine, ask(f"{request.id} alone", prompt, max_tokens=count))
        assert completion.token_ids == alone.token_ids
        assert_recorded(subject, request, completion)
    await eventually(subject, idle)


# Forks


async def test_forks_continue_a_running_request_and_leave_it_alone(subject: Subject) -> None:
    parent = ask("parent", max_tokens=LONG)
    stream = Stream(subject.engine, parent)
    await stream.until(lambda c: len(c.token_ids) >= 12 or c.finish is not None)
    assert stream.completion.finish is None, "the request is too short for this test"
    whole = [*parent.token_ids.tolist(), *stream.completion.token_ids]
    inside, after = await soon(subject.engine.fork("parent", 3, 1)), await soon(subject.engine.fork("parent", 13, 2))
    assert [len(inside), len(after)] == [1, 2]
    for request, at in zip([*inside, *after], [3, 13, 13], strict=True):
        assert request.token_ids.tolist() == whole[:at] and request.parent == "parent"
        assert request.sampling.max_tokens == LONG - max(0, at - len(parent.token_ids))
    assert len({request.sampling.seed for request in after} | {parent.sampling.seed}) == 3
    short = [
        msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=15))
        for request in (*inside, *after)
    ]
    # Two at a time, so that there is a slot for them beside their parent.
    forked = [*await complete_all(subject.engine, short[:1]), *await complete_all(subject.engine, short[1:])]
    assert stream.completion.finish is None
    await soon(subject.engine.abort(["parent"]))
    ended = await stream.end()
    alone = [msgspec.structs.replace(request, id=f"{request.id} alone", parent="") for request in short]
    again = ask("parent again", max_tokens=len(ended.token_ids))
    *without, undisturbed = await complete_all(subject.engine, [*alone, again])
    for request, one, two in zip(short, forked, without, strict=True):
        assert (one.token_ids, one.finish) == (two.token_ids, "length"), request.id
        assert_recorded(subject, request, one)
    assert ended.token_ids == undisturbed.token_ids
    await eventually(subject, idle)


async def test_what_cannot_be_forked_is_one_line_and_ends_nothing(subject: Subject) -> None:
    stream = Stream(subject.engine, ask("a", max_tokens=LONG))
    await stream.begun()
    for name, at, n, why in (
        ("nobody", 1, 1, "fork of request nobody: it is not running"),
        ("a", LONG + 5, 1, f"token {LONG + 5} is not among its tokens"),
        ("a", 2, 0, "0 alternatives were asked for"),
    ):
        with pytest.raises(HeadraceError, match=why) as caught:
            await soon(subject.engine.fork(name, at, n))
        assert "\n" not in str(caught.value)
    known = len(stream.completion.token_ids)
    await stream.until(lambda c: len(c.token_ids) > known)
    await stream.close()
    await eventually(subject, idle)
