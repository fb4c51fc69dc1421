"""The controller's real loops, driven without a process: order, bounds, failures, an early stop."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from controller_parts import FakeRun

from headrace.errors import DeliveryError, HeadraceError, StallError
from lengths import lognormal_lengths


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("publish_every", [1, 2])
async def test_every_batch_is_trained_in_order_within_the_bound(tmp_path: Path, depth: int, publish_every: int) -> None:
    run = FakeRun(
        tmp_path, f"buffer.depth={depth}", f"delivery.publish_every={publish_every}", "run.versions=8",
        engine={"lengths": lognormal_lengths(4, 1.0, seed=1)},
    )  # fmt: skip
    await run.run()
    steps = 8 * publish_every
    assert [batch.step for batch in run.trainer.batches] == list(range(1, steps + 1))
    assert [batch.version for batch in run.trainer.batches] == [step // publish_every for step in range(steps)]
    assert run.trainer.acknowledged == list(range(9))
    lags = np.concatenate([batch.lags() for batch in run.trainer.batches])
    assert lags.max() <= run.window.lag_bound
    if depth == 0:
        assert lags.max() == 0
    else:
        assert lags.max() > 0, "an asynchronous run has lag, or it was not asynchronous"
    ledger = run.recorder.ledgers.as_dict()["groups"]
    assert (ledger["admitted"], ledger["trained"], ledger["in_flight"]) == (2 * steps, 2 * steps, 0)
    assert run.trainer.saved == [8]


async def test_several_engines_share_the_groups(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "buffer.depth=2", "run.versions=10", engines=2)
    await run.run()
    for engine in run.engines:
        assert engine.version == 10
    assert all(count > 0 for count in run.generated.values())
    proofs = Counter(row["engine"] for row in run.journal("SELECT engine FROM deliveries WHERE accepted"))
    assert proofs == {"engine-0": 11, "engine-1": 11}


async def test_a_failed_group_is_replaced(tmp_path: Path) -> None:
    def judge(prompt, completion):
        if prompt.id in ("1", "2", "3"):
            raise RuntimeError(f"no judgement for {prompt.id}")
        return 1.0

    run = FakeRun(tmp_path, "run.versions=20", judge=judge)
    await run.run()
    ledger = run.recorder.ledgers.as_dict()["groups"]
    assert ledger["trained"] == 40
    assert ledger["failed"] >= 1
    assert ledger["admitted"] == 40 + ledger["failed"]
    assert all("no judgement for" in reason for reason in ledger["reasons"]["failed"])


async def test_a_run_whose_groups_all_fail_ends(tmp_path: Path) -> None:
    def judge(prompt, completion):
        raise RuntimeError("the judge is on holiday")

    run = FakeRun(tmp_path, judge=judge)
    with pytest.raises(HeadraceError, match=r"groups all failed.*the judge is on holiday"):
        await run.run()


async def test_a_refused_version_ends_the_run_and_is_never_served(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, engine={"loads": {3: "reject"}})
    with pytest.raises(DeliveryError, match="version 3 was refused 3 times"):
        await run.run()
    assert run.controller.versions.proved == 2
    refused = run.journal("SELECT version FROM deliveries WHERE NOT accepted")
    assert [row["version"] for row in refused] == [3, 3, 3]
    assert max(int(batch.versions.max()) for batch in run.trainer.batches) <= 2


async def test_evaluations_run_beside_training_and_never_enter_the_buffer(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "evaluate.prompts=6", "evaluate.every=2", "run.versions=6", heldout=6)
    await run.run()
    rows = run.journal("SELECT moment, version, prompts FROM evaluations ORDER BY started")
    assert (rows[0]["moment"], rows[0]["version"]) == ("before", 0)
    assert (rows[-1]["moment"], rows[-1]["version"]) == ("after", 6)
    assert any(row["moment"] == "during" for row in rows)
    trained = {row["prompt"] for row in run.journal("SELECT prompt FROM groups")}
    assert not {prompt for prompt in trained if prompt.startswith("h")}


async def test_the_warm_start_is_journalled_as_imitation(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "warm_start.steps=3", "warm_start.batch=4")
    await run.run()
    rows = run.journal("SELECT step, objective FROM steps ORDER BY step")
    assert [row["step"] for row in rows] == list(range(-2, 6))
    assert [row["objective"] for row in rows] == ["imitation"] * 3 + ["policy"] * 5


async def test_stop_finishes_what_is_in_training_and_drops_the_rest(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "buffer.depth=2", "run.versions=1000", train_seconds=0.02)

    run.trainer.on_batch = lambda: run.controller.stop() if len(run.trainer.batches) == 4 else None
    await run.run()
    trained = len(run.trainer.batches)
    assert 4 <= trained <= 7
    assert run.controller.versions.proved == trained, "what was trained is delivered"
    assert run.trainer.saved == [trained]
    ledger = run.recorder.ledgers.as_dict()["groups"]
    assert ledger["trained"] == 2 * trained
    assert ledger["dropped"] == ledger["admitted"] - ledger["trained"] > 0
    assert set(ledger["reasons"]["dropped"]) == {"interrupted"}


async def test_a_stalled_run_says_who_waits_for_whom(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    serving = asyncio.create_task(run.controller.serve())
    await run.controller.begin()
    run.engines[0].gate.clear()
    training = asyncio.create_task(run.controller.train())
    await asyncio.sleep(0.3)
    with pytest.raises(StallError) as caught:
        run.waits.check(limit=0.2)
    line = str(caught.value)
    assert "admit waits for a slot (nothing is admitted: all 4 slots are taken" in line
    assert "train waits for a batch (no batch: 0 of 2 groups are ready" in line
    assert "group 0, in flight since version 0" in line
    assert "deliver waits for trainer-0 to publish version 1" in line
    training.cancel()
    serving.cancel()
    await asyncio.gather(training, serving, return_exceptions=True)
    await run.engines[0].close()
    run.recorder.abandon("test over")
    run.recorder.close("failed")


async def test_depth_zero_is_a_function_of_the_seed(tmp_path: Path) -> None:
    tokens = []
    for name, engine in (("a", {}), ("b", {"token_seconds": 0.002})):
        (tmp_path / name).mkdir()
        run = FakeRun(tmp_path / name, "buffer.depth=0", engine=engine)
        await run.run()
        tokens.append(np.concatenate([batch.token_ids for batch in run.trainer.batches]))
    np.testing.assert_array_equal(tokens[0], tokens[1])
