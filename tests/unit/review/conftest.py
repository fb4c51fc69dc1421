"""A journal to fill, and one whose every figure is computed by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from journals import JournalMaker


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[JournalMaker]:
    maker = JournalMaker(tmp_path)
    yield maker
    maker.db.close()


@pytest.fixture
def finished_run(journal: JournalMaker) -> JournalMaker:
    """Twenty policy steps after two supervised ones, with every kind of row; its figures are computed by hand."""
    journal.meta(name="tiny", outcome="finished", started=90.0, train_started=100.0, train_ended=120.0, lag_bound=2)
    for step in (1, 2):
        journal.add("steps", step=step, objective="imitation", trained_tokens=500, lag_histogram='{"9": 500}')
    for step in range(3, 23):
        journal.add(
            "steps",
            step=step,
            version=step - 3,
            trained_tokens=10,
            lag_histogram='{"0": 4, "1": 5, "2": 1}' if step % 2 else '{"0": 10}',
            reward_mean=(step - 3) / 20,
            loss=-0.1,
            grad_norm=0.5,
            seconds=0.8,
            ended=100.0 + step - 2,
        )
    for version in range(21):
        journal.add("versions", id=version, parent=version - 1, step=version)
        journal.add("deliveries", version=version, time=100.0 + version)
    journal.add("deliveries", version=20, engine="engine-1", accepted=0, reason="staged digest differs")
    journal.add("deliveries", version=20, engine="engine-2", accepted=1, quarantined=1, reason="canary")
    states = ["trained"] * 5 + ["dropped"] * 3 + ["failed", "in_flight"]
    reasons = [""] * 5 + ["equal rewards", "equal rewards", "too old"] + ["reward raised <Error>", ""]
    for index, (state, reason) in enumerate(zip(states, reasons, strict=True)):
        journal.add("groups", id=index, state=state, reason=reason)
        for rollout in range(2):
            journal.add(
                "rollouts",
                id=f"{index}/{rollout}",
                group_id=index,
                state=state,
                reason=reason,
                sampled_tokens=7 + rollout,
            )
    journal.add("evaluations", version=0, moment="before", pass_1=0.25, ended=95.0)
    journal.add("evaluations", version=10, moment="during", pass_1=0.5, ended=110.0)
    journal.add("evaluations", version=20, moment="after", pass_1=0.75, ended=125.0)
    # Half of the first interval lies before training, a quarter of the last after it, the third outside.
    journal.add("activity", process="trainer-0", started=98.0, ended=102.0, busy_seconds=2.0)
    journal.add("activity", process="trainer-0", started=102.0, ended=117.0, busy_seconds=12.0)
    journal.add("activity", process="trainer-0", started=117.0, ended=121.0, busy_seconds=4.0)
    journal.add("activity", process="trainer-0", started=130.0, ended=140.0, busy_seconds=0.0)
    journal.add("activity", process="engine-0", started=100.0, ended=110.0, busy_seconds=10.0)
    journal.add("activity", process="engine-1", started=100.0, ended=110.0, busy_seconds=5.0)
    for moment, reward in (("before", 0.0), ("after", 1.0)):
        journal.add("samples", moment=moment, prompt="h1", question="1 < 2?", answer=f"<i>{moment}</i>", reward=reward)
    (journal.run_dir / "config.toml").write_text('[run]\nname = "tiny" # <&>\n')
    return journal
