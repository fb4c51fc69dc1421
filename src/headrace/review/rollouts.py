"""The recorded rollouts of a run, for people and programs: the documented columns, and the text of the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.buffer.reader import JournalReader
from headrace.observe.records import RolloutRecord
from headrace.run_dir import RunDir
from headrace.tasks.chat import ChatFormat
from headrace.training.checkpoints.base import latest
from headrace.types import NO_VERSION, Trace

COLUMNS = (
    "id", "group_id", "prompt", "state", "reason", "ending", "reward", "step", "tokens", "sampled_tokens",
    "oldest_version", "newest_version",
)  # fmt: skip
"""The columns of a rollout that is shown or exported. `prompt` is the prompt of its group."""
Row = dict[str, Any]
_LONGEST_TEXT = 100


def documented(record: RolloutRecord) -> Row:
    """Return the documented columns of a rollout."""
    return {column: getattr(record, column) for column in COLUMNS}


def load_chat(run_dir: Path) -> ChatFormat:
    """Load the tokenizer of the run's model: that of a checkpoint in the run directory, or else the model's own."""
    paths, config = RunDir.open(run_dir)
    return ChatFormat.load(latest(paths.checkpoints) or config.model.path)


def completion(trace: Trace, chat: ChatFormat) -> str:
    """Return the text of a trace from its first sampled token on, including special tokens and answers of tools."""
    sampled = (trace.versions != NO_VERSION).nonzero()[0]
    return chat.decode(trace.token_ids[sampled[0] :], skip_special=False) if len(sampled) else ""


def shown(journal: JournalReader, records: Iterable[RolloutRecord], chat: ChatFormat | None) -> Iterator[Row]:
    """Yield rows for people and programs: the documented columns and, with a tokenizer, `text` (one for each trace)."""
    for record in records:
        entry = documented(record)
        if chat is not None:
            rollout = journal.tokens(record)
            entry["text"] = None if rollout is None else [completion(trace, chat) for trace in rollout.traces]
        yield entry


def table(entries: Iterable[Row]) -> list[str]:
    """Return aligned lines under a heading."""
    entries = list(entries)
    heading = ["id", "step", "state", "ending", "reward", "tokens", "versions"]
    with_text = bool(entries) and "text" in entries[0]
    lines = [heading + (["text"] if with_text else [])]
    for entry in entries:
        reason = f" ({entry['reason']})" if entry["reason"] else ""
        cells = [entry["id"], entry["step"], entry["state"] + reason, entry["ending"]]
        cells += [_number(entry["reward"]), entry["sampled_tokens"], _versions(entry)]
        lines.append([_cell(cell) for cell in cells] + ([_text(entry["text"])] if with_text else []))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _versions(entry: Row) -> str | None:
    oldest, newest = entry["oldest_version"], entry["newest_version"]
    return None if oldest is None else f"{oldest}" if oldest == newest else f"{oldest}-{newest}"


def _cell(value: Any) -> str:
    """Return a value on one line. Text of a model or a judge may hold control characters, which are escaped."""
    if value is None:
        return "-"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def _text(texts: list[str] | None) -> str:
    if texts is None:
        return "-"
    text = _cell(" | ".join(texts))
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
