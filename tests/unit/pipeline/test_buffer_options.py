"""The options of the buffer in whole runs: the real controller under a virtual clock, ledgers and tokens looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.buffer.journal import open_readonly
from headrace.config import make_config
from headrace.engines.base import Request
from headrace.engines.fake_policy import FakePolicy
from headrace.errors import HeadraceError
from headrace.observe.metrics import read_metrics
from headrace.pipeline import attempts
from headrace.sim.run import VOCABULARY, SimRun, run_virtual
from headrace.types import Batch, Prompt, Rollout

BASE = ("rollouts.group_size=2", "rollouts.max_tokens=400", "buffer.groups=2", "run.versions=12")


def slow_groups(short: int, long: int, every: int = 5) -> Callable[[Request], int]:
    """Every fifth group is long; what goes on from a salvaged prefix ends at the same place."""

    def length(request: Request) -> int:
        done = int(len(request.token_ids) > 6) * len(request.token_ids)
        return max(1, (long if int(request.group) % every == 0 or done else short) - done)

    return length


class Simulated:
    """A finished run, its batches, and its journal to look at."""

    def __init__(
        self, path: Path, *settings: str, lengths: Any = None, stop_after: int | None = None, **options: Any
    ) -> None:
        self.path = path
        self.batches: list[Batch] = []
        config = make_config({"model": {"path": "-"}, "task": {"kind": "gym", "name": "-"}}, [*BASE, *settings])
        options = {"token_seconds": 0.01, "train_seconds": lambda batch: 0.05, **options}

        async def simulate() -> SimRun:
            run = SimRun(config, path, lengths=lengths or (lambda request: 4), keep_rollouts=True, **options)

            def on_batch(batch: Batch) -> None:
                self.batches.append(batch)
                if len(self.batches) == stop_after:
                    raise HeadraceError("killed")

            run.trainer.on_batch = on_batch
            self.run = run
            await run.execute()
            return run

        run_virtual(simulate())

    @property
    def reasons(self) -> dict[str, int]:
        return dict(self.run.recorder.ledgers.as_dict()["groups"]["reasons"]["dropped"])

    @property
    def lags(self) -> np.ndarray[Any, Any]:
        return np.concatenate([batch.lags() for batch in self.batches])

    def check(self) -> None:
        """What every run must leave behind."""
        with open_readonly(self.path / "journal.db") as journal:
            assert journal.imbalances() == []
        for ledger in self.run.recorder.ledgers.as_dict().values():
            assert ledger["admitted"] == ledger["trained"] + ledger["dropped"] + ledger["failed"]
        assert self.lags.min() >= 0 and self.lags.max() <= self.run.window.lag_bound

    def rollouts(self, where: str = "TRUE") -> list[Rollout]:
        with open_readonly(self.path / "journal.db") as journal:
            return list(journal.rollouts(where))


def test_an_unbounded_stream_drops_what_is_too_old_early(tmp_path: Path) -> None:
    run = Simulated(
        tmp_path, "buffer.depth=unbounded", "buffer.max_lag=2", "buffer.on_stale=drop", lengths=slow_groups(4, 300)
    )
    run.check()
    assert run.run.window.lag_bound == 2 and run.lags.max() > 0
    assert set(run.reasons) == {"stale"}
    assert len(run.batches) == 12
    stale = run.rollouts("state = 'dropped'")
    assert stale and all(rollout.ending == "aborted" and 0 < rollout.sampled_tokens < 300 for rollout in stale)


def test_an_unbounded_stream_waits_where_it_is_told_to(tmp_path: Path) -> None:
    run = Simulated(tmp_path, "buffer.depth=unbounded", "buffer.max_lag=2", lengths=slow_groups(4, 100))
    run.check()
    assert run.reasons == {} and run.lags.max() <= 2
    assert any(rollout.sampled_tokens == 100 for rollout in run.rollouts("state = 'trained'"))


@pytest.mark.parametrize("depth", ["unbounded", "2"])
def test_salvaged_tokens_are_untrained_context_with_their_own_records(tmp_path: Path, depth: str) -> None:
    settings = (f"buffer.depth={depth}", "buffer.max_lag=2", "buffer.on_stale=salvage", "run.versions=40")
    run = Simulated(tmp_path, *settings, lengths=slow_groups(4, 60))
    run.check()
    policy = FakePolicy(VOCABULARY)
    dropped = {rollout.id: rollout for rollout in run.rollouts("state = 'dropped' AND reason = 'stale'")}
    heirs = [
        rollout
        for rollout in run.rollouts("state = 'trained'")
        if (~rollout.traces[0].trained & (rollout.traces[0].versions >= 0)).any()
    ]
    assert heirs and dropped
    for heir in heirs:
        trace = heir.traces[0]
        old = ~trace.trained & (trace.versions >= 0)
        end = int(np.flatnonzero(old)[-1]) + 1
        parents = [
            parent.traces[0] for parent in dropped.values()
            if len(parent.traces[0]) == end and np.array_equal(parent.traces[0].token_ids, trace.token_ids[:end])
        ]  # fmt: skip
        assert any(
            np.array_equal(parent.logprobs, trace.logprobs[:end])
            and np.array_equal(parent.versions, trace.versions[:end])
            for parent in parents
        ), "the beginning is an earlier attempt's, record for record"
        assert trace.trained[end:].all() and heir.sampled_tokens == len(trace) - np.count_nonzero(trace.versions < 0)
        # What was sampled anew has the log-probabilities of the version it is tagged with, at its own position.
        for position in np.flatnonzero(trace.trained)[:-1]:
            expected = policy.logprob(int(trace.token_ids[position]), int(position), int(trace.versions[position]))
            assert trace.logprobs[position] == pytest.approx(expected, abs=1e-5)
    trained = {int(i) for batch in run.batches for i in batch.versions[batch.trained]}
    assert min(trained) == 0 and -1 not in trained


def constant_for(prompts: int) -> Callable[[Prompt, str], float]:
    """Rewards that differ within a group, except for some of the prompts."""
    counts: Counter[str] = Counter()

    def judge(prompt: Prompt, completion: str) -> float:
        counts[prompt.id] += 1
        return 1.0 if int(prompt.id) % 4 < prompts else float(counts[prompt.id] % 2)

    return judge


@pytest.mark.parametrize(("depth", "max_lag"), [(0, None), (1, None), (2, 2)])
@pytest.mark.parametrize("oversample", [1.0, 2.0])
def test_groups_without_variance_are_replaced_within_the_bound(
    tmp_path: Path, depth: int, max_lag: int | None, oversample: float
) -> None:
    limit = [] if max_lag is None else [f"buffer.max_lag={max_lag}"]
    run = Simulated(
        tmp_path, f"buffer.depth={depth}", *limit, 'buffer.filter=["zero_variance"]',
        f"buffer.oversample={oversample}", "run.versions=30", judge=constant_for(2),
    )  # fmt: skip
    run.check()
    assert len(run.batches) == 30
    assert run.reasons["zero_variance"] > 10
    assert set(run.reasons) <= {"zero_variance", "surplus"}
    assert all((batch.advantages[batch.trained] != 0).all() for batch in run.batches), (
        "every group has something to say"
    )
    assert 0.3 < run.run.window.filtered_rate < 0.7
    if depth == 0:
        assert run.lags.max() == 0
    admitted = run.run.recorder.ledgers.as_dict()["groups"]["admitted"]
    assert admitted == 60 + sum(run.reasons.values())
    if oversample == 1.0:
        assert "surplus" not in run.reasons


def test_oversampling_saves_the_rounds_of_a_refill(tmp_path: Path) -> None:
    seconds = []
    for name, oversample in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        run = Simulated(
            tmp_path / name, "buffer.depth=0", 'buffer.filter=["zero_variance"]', f"buffer.oversample={oversample}",
            "run.versions=40", judge=constant_for(2),
        )  # fmt: skip
        seconds.append(run.run.seconds)
    assert seconds[1] < 0.9 * seconds[0]


def test_depth_zero_is_a_function_of_the_seed_with_filters_too(tmp_path: Path) -> None:
    tokens = []
    for name, seconds in (("a", 0.01), ("b", 0.04)):
        (tmp_path / name).mkdir()
        run = Simulated(
            tmp_path / name, "buffer.depth=0", 'buffer.filter=["zero_variance"]', "buffer.oversample=2",
            lengths=slow_groups(3, 9), judge=constant_for(2), token_seconds=seconds,
        )  # fmt: skip
        tokens.append(np.concatenate([batch.token_ids for batch in run.batches]))
    np.testing.assert_array_equal(tokens[0], tokens[1])


def test_overlong_answers_leave_their_group(tmp_path: Path) -> None:
    def length(request: Request) -> int:
        return 50 if request.sampling.seed % 3 == 0 else 5

    run = Simulated(
        tmp_path, 'buffer.filter=["overlong"]', "rollouts.max_tokens=20", "rollouts.group_size=4", lengths=length
    )
    run.check()
    assert all(rollout.ending != "truncated" for rollout in run.rollouts("state = 'trained'"))
    left = run.rollouts("state = 'dropped' AND group_id IN (SELECT id FROM groups WHERE state = 'trained')")
    assert left and all(rollout.ending == "truncated" for rollout in left)
    assert {len(batch.lengths) for batch in run.batches} != {8}


def test_a_group_is_closed_without_its_stragglers(tmp_path: Path) -> None:
    def length(request: Request) -> int:
        return 200 if request.id.split("/")[1] == "3" else 5

    run = Simulated(
        tmp_path, "rollouts.group_size=4", "rollouts.min_group=3", "rollouts.straggler_seconds=0.5", lengths=length
    )
    run.check()
    stragglers = run.rollouts("state = 'dropped'")
    assert {rollout.index for rollout in stragglers} == {3}
    assert all(rollout.reason == "straggler" and 40 <= rollout.sampled_tokens <= 60 for rollout in stragglers)
    reasons = run.run.recorder.ledgers.as_dict()["rollouts"]["reasons"]["dropped"]
    assert reasons == {"straggler": len(stragglers)} and len(stragglers) == 24
    assert {len(batch.lengths) for batch in run.batches} == {6}


def test_a_run_that_filters_everything_ends_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FILTERED_IN_A_ROW", 30)
    with pytest.raises(HeadraceError, match=r"the last 40 groups were all filtered, the last one as zero_variance"):
        Simulated(tmp_path, 'buffer.filter=["zero_variance"]', judge=lambda prompt, completion: 1.0)


def test_every_end_is_in_the_metrics_with_length_difficulty_and_age(tmp_path: Path) -> None:
    run = Simulated(tmp_path, 'buffer.filter=["zero_variance"]', judge=constant_for(1), lengths=slow_groups(4, 40))
    ends = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "group"]
    assert Counter(end["outcome"] for end in ends) == {"trained": 24, **run.reasons}
    for end in ends:
        assert end["tokens"] == (40 if end["group"] % 5 == 0 else 4)
        assert end["reward"] == (1.0 if end["outcome"] == "zero_variance" else 0.5)
        assert end["age"] >= end["lag"] >= 0
    assert max(end["age"] for end in ends) == run.lags.max()


@pytest.mark.parametrize("options", [(), ("buffer.max_lag=2", "buffer.on_stale=salvage")])
@pytest.mark.parametrize("killed", [1, 4, 7])
def test_a_crash_at_any_batch_leaves_books_that_the_next_run_goes_on_with(
    tmp_path: Path, options: tuple[str, ...], killed: int
) -> None:
    settings = ("buffer.depth=2", *options, 'buffer.filter=["zero_variance"]', "buffer.oversample=2")
    shared: dict[str, Any] = {"lengths": slow_groups(4, 60), "judge": constant_for(1)}
    with pytest.raises(HeadraceError, match="killed"):
        Simulated(tmp_path, *settings, stop_after=killed, **shared)
    run = Simulated(tmp_path, *settings, **shared)
    run.check()
    done = run.run.controller.parts.first_step
    assert killed - 2 <= done < killed and [batch.step for batch in run.batches] == list(range(done + 1, 13))
    with open_readonly(tmp_path / "journal.db") as journal:
        versions = [row["id"] for row in journal.rows("SELECT id FROM versions ORDER BY published")]
        steps = journal.rows("SELECT step, groups FROM steps WHERE objective = 'policy'")
        trained = journal.rows("SELECT COUNT(*) AS n FROM groups WHERE state = 'trained'")[0]["n"]
    assert versions == sorted(set(versions)), "a version id is never used again"
    assert trained == sum(step["groups"] for step in steps) == 24
