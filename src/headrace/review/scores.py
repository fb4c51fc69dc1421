"""The scores of recorded rollouts, for people: what each scorer gave to the whole answer, and to its parts."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from headrace.buffer.reader import JournalReader
from headrace.errors import HeadraceError
from headrace.tasks.chat import ChatFormat
from headrace.types import Rollout

Row = dict[str, Any]

MOST_ROLLOUTS = 6
"""The number of rollouts whose scores the report shows."""
SEARCHED_GROUPS = 4
"""The number of the newest trained groups among which the report looks for scores."""


class ScoredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with what each scorer gave to it, in words, and with the scores of its parts."""

    id: str
    reward: float | None
    components: str
    parts: list[Row]


def as_rows(rollout: Rollout, chat: ChatFormat | None = None) -> list[Row]:
    """Return the scores of a rollout as plain data: those of the whole rollout, then those of parts in their order.

    A score of a part names its tokens and, with a tokenizer, has their text.
    """
    rows: list[Row] = []
    for score in sorted(rollout.scores, key=lambda one: (one.level != "rollout", one.trace, one.start, one.end)):
        row: Row = {key: getattr(score, key) for key in ("scorer", "version", "level", "value", "metrics")}
        if score.level != "rollout":
            row |= {"trace": score.trace, "start": score.start, "end": score.end}
            if chat is not None:
                tokens = rollout.traces[score.trace].token_ids[score.start : score.end]
                row["text"] = chat.decode(tokens, skip_special=False)
        rows.append(row)
    return rows


def in_words(rows: Sequence[Row]) -> str:
    """Return what each scorer gave, such as `reward=1 letters=0.5 steps/step=0.9,0.2`."""
    found: dict[str, list[str]] = {}
    for row in rows:
        name = row["scorer"] if row["level"] == "rollout" else f"{row['scorer']}/{row['level']}"
        found.setdefault(name, []).append(f"{row['value']:.4g}")
    return " ".join(f"{name}={','.join(values)}" for name, values in found.items())


def has_components(rows: Sequence[Row]) -> bool:
    """Return whether the reward alone would not tell these scores: several scorers gave them, or some are of parts."""
    return len({row["scorer"] for row in rows}) > 1 or any(row["level"] != "rollout" for row in rows)


def newest_scored(journal: JournalReader, load_chat: Callable[[], ChatFormat]) -> list[ScoredRollout]:
    """Return some of the newest trained rollouts whose scores the reward alone would not tell.

    The tokenizer is loaded only if there are such rollouts. Without one, no part has a text.
    """
    rollouts: list[Rollout] = []
    with suppress(HeadraceError):  # A segment may be damaged. The audit says so.
        rollouts += [one for one in journal.newest(SEARCHED_GROUPS) if has_components(as_rows(one))][-MOST_ROLLOUTS:]
    if not rollouts:
        return []
    chat = None
    with suppress(HeadraceError):  # The model's directory may be gone. The scores are shown all the same.
        chat = load_chat()
    found = [(one, as_rows(one, chat)) for one in rollouts]
    return [
        ScoredRollout(
            id=one.id,
            reward=one.reward,
            components=in_words(rows),
            parts=[row for row in rows if row["level"] != "rollout"],
        )
        for one, rows in found
    ]
