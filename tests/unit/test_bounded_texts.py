"""Texts that foreign code wrote reach ledger, journal, log and terminal as one short line."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.buffer.journal import Journal
from headrace.buffer.ledger import DISTINCT_REASONS, OTHER_REASONS, Ledger
from headrace.errors import one_line
from headrace.observe.progress import PlainProgress
from headrace.reference import describe
from headrace.review.summary import read_ledgers
from headrace.rollouts.groups import run_group
from headrace.scoring.base import Stage
from headrace.types import Group, Prompt, Rollout

SCREEN = "\x1b[2J\x1b]0;title\x07"


@given(st.text(st.characters(), max_size=200), st.integers(5, 60))
def test_friction_42_one_line_is_printable_and_short(text: str, limit: int) -> None:
    shown = one_line(text, limit)
    assert len(shown) <= limit and shown.isprintable()
    if text.isprintable() and " ".join(text.split()) == text and len(text) <= limit:
        assert shown == text


def test_friction_42_what_is_cut_says_so_and_escapes_are_visible() -> None:
    assert one_line("a\n\tb" + SCREEN) == r"a b\x1b[2J\x1b]0;title\x07"
    assert one_line("x" * 1_000_000, 10) == "x" * 9 + "…"
    assert one_line("x" * 10, 10) == "x" * 10


def test_friction_42_a_huge_exception_of_the_users_code_is_one_short_line() -> None:
    said = describe(ValueError(SCREEN + "x" * 100_000))
    assert len(said) < 600 and said.isprintable() and said.startswith(r"ValueError: \x1b[2J")


class FailedEpisode:
    """An episode that has failed with a reason of its own."""

    id, index, prompt, turns, cancelled = "7/0", 0, Prompt(id="p", text="p"), (), None

    async def run(self) -> Rollout:
        return Rollout(id=self.id, index=0, traces=[], ending="failed", reason=SCREEN + "x" * 100_000)


async def test_friction_42_the_reason_of_a_rollout_is_one_short_line() -> None:
    group = Group(id=7, prompt=FailedEpisode.prompt, version=0)
    ((rollout),) = (await run_group(group, [FailedEpisode()], Stage())).rollouts  # type: ignore[list-item]
    assert len(rollout.reason) <= 500 and rollout.reason.isprintable()


def test_friction_42_unlike_reasons_are_counted_together() -> None:
    ledger, unlike = Ledger("groups"), 5 * DISTINCT_REASONS
    for item in range(unlike):
        ledger.admit(item)
        ledger.end(item, "failed", f"unlike {item}")
    ledger.check()
    reasons = ledger.counts().reasons["failed"]
    assert len(reasons) == DISTINCT_REASONS + 1
    assert reasons[OTHER_REASONS] == unlike - DISTINCT_REASONS


def test_friction_42_unlike_reasons_of_a_journal_are_counted_together(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        for id in range(2 * DISTINCT_REASONS):
            journal.admitted(Group(id=id, prompt=Prompt(id=str(id), text="p"), version=0), [f"{id}/0"])
            journal.group_ended(id, "failed", "often" if id % 2 else f"unlike {id}")
    reasons = read_ledgers(tmp_path)["groups"]["reasons"]["failed"]
    assert reasons["often"] == DISTINCT_REASONS
    assert reasons[OTHER_REASONS] == 1
    assert len(reasons) == DISTINCT_REASONS + 1


@pytest.mark.parametrize("force", [True, False])
def test_friction_42_no_escape_sequence_reaches_the_terminal(force: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=force, color_system=None)
    PlainProgress(console).note(f"group 7 failed: {SCREEN}" + "x" * 100_000)
    assert "\x1b" not in written.getvalue() and "\x07" not in written.getvalue()
    assert r"\x1b[2J" in written.getvalue() and len(written.getvalue()) < 1100
