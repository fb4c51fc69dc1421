"""The recorded rollouts of a run, for people and programs: shown as a table, or exported with their tokens.

An export holds one record for each trace, in JSON lines or Parquet. The file is written whole or not at all. A rollout
without kept tokens is a record too, with nulls for its arrays.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from headrace.buffer.reader import JournalReader
from headrace.config.hub import model_dir
from headrace.errors import UserError
from headrace.observe.records import RolloutRecord
from headrace.observe.summary import aligned
from headrace.review.scores import as_rows, has_components, in_words
from headrace.run_dir import RunDir
from headrace.tasks.chat import ChatFormat
from headrace.training.checkpoints.base import latest
from headrace.types import NO_VERSION, Trace

COLUMNS = (
    "id", "group_id", "prompt", "state", "reason", "ending", "reward", "step", "tokens", "sampled_tokens",
    "oldest_version", "newest_version",
)  # fmt: skip
"""The columns of a rollout that is shown or exported. `prompt` is the prompt of its group. If the run has several
tasks, there is a column `task` too."""
Row = dict[str, Any]
Writer = Callable[[Path, Iterator[Row]], int]
_LONGEST_TEXT = 100
_BATCH = 1000


def _documented(record: RolloutRecord) -> Row:
    found = {column: getattr(record, column) for column in COLUMNS}
    return found if record.task is None else {**found, "task": record.task}


def load_chat(run_dir: Path) -> ChatFormat:
    """Load the tokenizer of the run's model: that of a checkpoint in the run directory, or else the model's own."""
    paths, config = RunDir.open(run_dir)
    return ChatFormat.load(latest(paths.checkpoints) or model_dir(config.model), config.model.chat_template)


def changed_tokenizer(journal: JournalReader, chat: ChatFormat) -> str:
    """Return a line if this is not the tokenizer that the run began with; empty if it is, or if nothing is recorded."""
    recorded = journal.meta().get("tokenizer")
    if recorded in (None, chat.digest):
        return ""
    return f"{journal.path.parent}: its tokenizer.json has changed since the run began, so texts may be wrong"


def _completion(trace: Trace, chat: ChatFormat) -> str:
    """Return the text of a trace from its first sampled token on, including special tokens and answers of tools."""
    sampled = (trace.versions != NO_VERSION).nonzero()[0]
    return chat.decode(trace.token_ids[sampled[0] :], skip_special=False) if len(sampled) else ""


def _opening(trace: Trace, chat: ChatFormat) -> str:
    """Return the text of a trace before its first sampled token: the prompt as the policy saw it."""
    sampled = (trace.versions != NO_VERSION).nonzero()[0]
    return chat.decode(trace.token_ids[: sampled[0] if len(sampled) else None], skip_special=False)


def shown(journal: JournalReader, records: Iterable[RolloutRecord], chat: ChatFormat | None) -> Iterator[Row]:
    """Yield rows for people and programs: the documented columns, `scores`, and `metrics`, the further numbers.

    With a tokenizer, there are `prompt_text` and `text` too, with one text for each trace, and scores of parts have the
    `text` of their tokens.
    """
    for record in records:
        rollout = journal.tokens(record)
        entry = _documented(record) | {"metrics": None if rollout is None else rollout.metrics}
        if chat is not None:
            traces = None if rollout is None else rollout.traces
            entry["prompt_text"] = None if traces is None else [_opening(trace, chat) for trace in traces]
            entry["text"] = None if traces is None else [_completion(trace, chat) for trace in traces]
        entry["scores"] = None if rollout is None else as_rows(rollout, chat)
        yield entry


def table(entries: Iterable[Row]) -> list[str]:
    """Return aligned lines under a heading. With texts, the scores of an answer's parts follow below its line."""
    entries = list(entries)
    with_scores = any(has_components(entry.get("scores") or []) for entry in entries)
    with_text = bool(entries) and "text" in entries[0]
    with_numbers = any(_numbers(entry) for entry in entries)
    scored = ["scores"] if with_scores else []
    numbers, texts = ["numbers"] if with_numbers else [], ["prompt", "text"] if with_text else []
    with_task = bool(entries) and "task" in entries[0]
    lines = [
        [
            "id",
            *(["task"] if with_task else []),
            "step",
            "state",
            "ending",
            "reward",
            *scored,
            *numbers,
            "tokens",
            "versions",
            *texts,
        ]
    ]
    for entry in entries:
        reason = f" ({entry['reason']})" if entry["reason"] else ""
        reward = None if entry["reward"] is None else f"{entry['reward']:.4g}"
        oldest, newest = entry["oldest_version"], entry["newest_version"]
        cells = [
            entry["id"],
            *([entry["task"]] if with_task else []),
            entry["step"],
            entry["state"] + reason,
            entry["ending"],
            reward,
        ]
        cells += [in_words(entry.get("scores") or [])] if with_scores else []
        cells += [*([_numbers(entry)] if with_numbers else []), entry["sampled_tokens"]]
        cells.append(oldest if oldest == newest else f"{oldest}-{newest}")
        lines.append(
            [_cell(cell) for cell in cells]
            + ([_text(entry.get("prompt_text")), _text(entry["text"])] if with_text else [])
        )
    heading, *found = aligned(lines)
    below = [_part_lines(entry) if with_text else [] for entry in entries]
    return [heading, *(line for row, more in zip(found, below, strict=True) for line in (row, *more))]


def _part_lines(entry: Row) -> list[str]:
    """Return a line for each score of a part of the answer: who gave it, and the text of the part."""
    parts = [score for score in entry.get("scores") or [] if score["level"] != "rollout"]
    return [f"    {each['scorer']} {each['level']} {each['value']:.4g}  {_text([each['text']])}" for each in parts]


def _cell(value: Any) -> str:
    """Return a value on one line. Text of a model or a judge may hold control characters, which are escaped."""
    if value is None:
        return "-"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def _numbers(entry: Row) -> str | None:
    """Return the numbers that a reward function or an environment gave beside the reward."""
    found = {name: value for name, value in (entry.get("metrics") or {}).items() if name != "turns"}
    return " ".join(f"{name}={value:.4g}" for name, value in found.items()) or None


def _text(texts: list[str] | None) -> str:
    if texts is None:
        return "-"
    text = _cell(" | ".join(texts))
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


# ---- export


def writer_for(path: Path) -> Writer:
    """Return the writer for a file of this name. Raises `UserError` if there is none, before any work is done."""
    if path.suffix == ".jsonl":
        return _write_json_lines
    if path.suffix != ".parquet":
        raise UserError(f"--export {path}: the name must end in .jsonl or .parquet")
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UserError(f'--export {path}: needs the package pyarrow (pip install "headrace[parquet]")') from error
    return _write_parquet


def export(path: Path, journal: JournalReader, found: Iterable[RolloutRecord], chat: ChatFormat | None = None) -> int:
    """Write these rollouts, and their text if a tokenizer is given. Returns the number of records written."""
    write = writer_for(path)
    part = path.with_name(f".{path.name}.part")
    try:
        written = write(part, _records(journal, found, chat))
        part.replace(path)
    except OSError as error:
        raise UserError(f"--export {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return written


def _records(journal: JournalReader, found: Iterable[RolloutRecord], chat: ChatFormat | None) -> Iterator[Row]:
    """Yield a record for each trace: the columns of its rollout, its number in the rollout, and its arrays."""
    for record in found:
        base = _documented(record)
        rollout = journal.tokens(record)
        for number, trace in enumerate([None] if rollout is None else rollout.traces):
            entry = {**base, "trace": None if trace is None else number}
            entry["metrics"] = None if rollout is None else rollout.metrics
            for name in ("token_ids", "logprobs", "versions", "trained"):
                entry[name] = None if trace is None else getattr(trace, name).tolist()
            if chat is not None:
                entry["prompt_text"] = None if trace is None else _opening(trace, chat)
                entry["text"] = None if trace is None else _completion(trace, chat)
            yield entry


def _write_json_lines(path: Path, entries: Iterator[Row]) -> int:
    written = 0
    with path.open("wb") as file:
        for entry in entries:
            file.write(msgspec.json.encode(entry) + b"\n")
            written += 1
    return written


def _write_parquet(path: Path, entries: Iterator[Row]) -> int:
    import pyarrow
    import pyarrow.parquet

    written, batch = 0, list(islice(entries, _BATCH))
    further = [name for name in ("task", "prompt_text", "text") if batch and name in batch[0]]
    schema = _parquet_schema(pyarrow, further)
    with pyarrow.parquet.ParquetWriter(path, schema) as file:
        while batch:
            for entry in batch:  # The names of the numbers differ from task to task, so they are one JSON text.
                entry["metrics"] = None if entry["metrics"] is None else json.dumps(entry["metrics"])
            file.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            written += len(batch)
            batch = list(islice(entries, _BATCH))
    return written


def _parquet_schema(pa: Any, further: Iterable[str]) -> Any:
    """Return the schema. Types do not depend on the rows: a column that is all null keeps its type.

    The `further` columns hold text.
    """
    integers = ("group_id", "step", "tokens", "sampled_tokens", "oldest_version", "newest_version")
    kinds = {column: pa.int64() if column in integers else pa.string() for column in COLUMNS}
    kinds |= {"reward": pa.float64(), "trace": pa.int32(), "metrics": pa.string(), "token_ids": pa.list_(pa.int32())}
    kinds |= {"logprobs": pa.list_(pa.float32()), "versions": pa.list_(pa.int32()), "trained": pa.list_(pa.bool_())}
    return pa.schema(kinds | dict.fromkeys(further, pa.string()))
