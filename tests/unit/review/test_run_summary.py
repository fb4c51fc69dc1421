import json
import sqlite3
from pathlib import Path

import pytest
from journals import JournalMaker

from headrace.errors import UserError
from headrace.observe.summary import describe
from headrace.review.summary import summarize, write_summary


def test_every_figure_equals_the_hand_computed_one(finished_run: JournalMaker):
    summary = summarize(finished_run.run_dir)
    assert (summary["name"], summary["outcome"]) == ("tiny", "finished")
    assert (summary["heldout_before"], summary["heldout_after"]) == (0.25, 0.75)
    assert summary["train_seconds"] == 20.0
    assert summary["tokens_generated"] == 10 * (7 + 8)
    assert summary["tokens_trained"] == 200
    assert summary["tokens_per_second"] == 10.0
    # Ten steps of (5 x 1 + 1 x 2) lag tokens over 200 tokens.
    assert summary["lag_mean"] == pytest.approx(70 / 200)
    assert (summary["lag_max"], summary["lag_bound"]) == (2, 2)
    # Busy: half of 2, all of 12, three quarters of 4, of 2 + 15 + 3 seconds.
    assert summary["trainer_idle_fraction"] == pytest.approx(1 - (1.0 + 12.0 + 3.0) / 20.0)
    assert summary["engine_idle_fraction"] == pytest.approx(0.25)
    assert summary["ledger"] == {"admitted": 10, "trained": 5, "dropped": 3, "failed": 1, "in_flight": 1}
    assert summary["ledger_rollouts"] == {"admitted": 20, "trained": 10, "dropped": 6, "failed": 2, "in_flight": 2}
    assert summary["reasons"] == {
        "dropped": {"equal rewards": 2, "too old": 1},
        "failed": {"reward raised <Error>": 1},
    }
    assert summary["reasons_rollouts"]["dropped"] == {"equal rewards": 4, "too old": 2}
    assert (summary["steps"], summary["warm_start_steps"], summary["versions"]) == (20, 2, 21)
    assert (summary["deliveries_proved"], summary["deliveries_rejected"]) == (21, 2)
    assert summary["reward_first"] == pytest.approx((0 / 20 + 1 / 20) / 2)
    assert summary["reward_last"] == pytest.approx((18 / 20 + 19 / 20) / 2)
    assert [(e["version"], e["moment"], e["pass_1"]) for e in summary["evaluations"]] == [
        (0, "before", 0.25),
        (10, "during", 0.5),
        (20, "after", 0.75),
    ]


def test_an_empty_journal_gives_nulls_not_guesses(journal: JournalMaker):
    summary = summarize(journal.run_dir)
    unknown = {key for key, value in summary.items() if value is None}
    assert unknown == {
        "name",
        "outcome",
        "heldout_before",
        "heldout_after",
        "reward_first",
        "reward_last",
        "train_seconds",
        "tokens_per_second",
        "trainer_idle_fraction",
        "engine_idle_fraction",
        "lag_mean",
        "lag_max",
        "lag_bound",
        "no_mps",
    }
    assert summary["ledger"] == {"admitted": 0, "trained": 0, "dropped": 0, "failed": 0, "in_flight": 0}
    assert "no end recorded" in describe(summary)


def test_a_cut_run_ends_where_its_journal_ends(journal: JournalMaker):
    journal.meta(train_started=100.0)
    journal.add("steps", step=1, trained_tokens=30, ended=104.0)
    journal.add("activity", process="trainer-0", started=100.0, ended=106.0, busy_seconds=3.0)
    summary = summarize(journal.run_dir)
    assert summary["train_seconds"] == 6.0
    assert summary["tokens_per_second"] == 5.0
    assert summary["trainer_idle_fraction"] == pytest.approx(0.5)
    assert summary["engine_idle_fraction"] is None


def test_a_run_that_is_still_writing_can_be_summarized(journal: JournalMaker):
    journal.db.execute("BEGIN IMMEDIATE")
    journal.add("groups", id=1, state="trained")
    assert summarize(journal.run_dir)["ledger"]["admitted"] == 0
    journal.db.execute("COMMIT")
    assert summarize(journal.run_dir)["ledger"]["admitted"] == 1


def test_reading_leaves_no_file_behind(finished_run: JournalMaker):
    finished_run.db.close()
    before = sorted(finished_run.run_dir.iterdir())
    summarize(finished_run.run_dir)
    assert sorted(finished_run.run_dir.iterdir()) == before


def test_written_summary_is_strict_json_and_equals_the_returned_one(finished_run: JournalMaker):
    finished_run.add("steps", step=99, loss=float("inf"), reward_mean=float("inf"))
    summary = write_summary(finished_run.run_dir)
    text = (finished_run.run_dir / "summary.json").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    written = json.loads(text, parse_constant=refuse)
    assert written["reward_last"] is None
    del written["reward_last"], summary["reward_last"]
    assert written == summary
    assert not list(finished_run.run_dir.glob("*.part"))


def test_description_is_aligned_and_names_the_main_figures(finished_run: JournalMaker):
    text = describe(summarize(finished_run.run_dir))
    lines = dict(line.split("  ", 1) for line in text.splitlines())
    assert lines["held-out"].strip() == "0.250 -> 0.750"
    assert lines["groups"].strip() == "10 admitted = 5 trained + 3 dropped + 1 failed + 1 in flight"
    assert lines["lag"].strip() == "mean 0.35, max 2, bound 2"
    starts = {len(line) - len(line.split("  ", 1)[1].lstrip()) for line in text.splitlines()}
    assert len(starts) == 1


@pytest.mark.parametrize("kind", ["missing", "text", "foreign"])
def test_what_is_no_run_directory_is_one_clear_line(tmp_path: Path, kind: str):
    if kind == "text":
        (tmp_path / "journal.db").write_text("not a database, and long enough to be looked at" * 20)
    if kind == "foreign":
        sqlite3.connect(tmp_path / "journal.db").execute("CREATE TABLE meta (x)").connection.close()
    with pytest.raises(UserError) as caught:
        summarize(tmp_path)
    assert "journal.db" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_resumed_run_counts_the_tokens_of_the_time_it_divides_by(journal: JournalMaker):
    journal.meta(train_started=1000.0, train_ended=1010.0)
    journal.add("steps", step=1, trained_tokens=5000, ended=200.0)
    journal.add("steps", step=2, trained_tokens=70, ended=1005.0)
    summary = summarize(journal.run_dir)
    assert (summary["tokens_trained"], summary["tokens_per_second"]) == (5070, 7.0)
