"""Export of recorded rollouts for other programs: one record for each trace, in JSON lines or Parquet.

The file is written whole or not at all. A rollout without kept tokens is a record too, with nulls for its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from headrace.buffer.reader import JournalReader
from headrace.errors import UserError
from headrace.observe.records import RolloutRecord
from headrace.review.rollouts import COLUMNS, Row, completion, documented
from headrace.tasks.chat import ChatFormat

_BATCH = 1000
Writer = Callable[[Path, Iterator[Row]], int]


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
        written = write(part, records(journal, found, chat))
        part.replace(path)
    except OSError as error:
        raise UserError(f"--export {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return written


def records(journal: JournalReader, found: Iterable[RolloutRecord], chat: ChatFormat | None = None) -> Iterator[Row]:
    """Yield a record for each trace: the columns of its rollout, its number in the rollout, and its arrays."""
    for record in found:
        base = documented(record)
        rollout = journal.tokens(record)
        if rollout is None:
            arrays: Row = dict.fromkeys(("trace", "token_ids", "logprobs", "versions", "trained"))
            yield {**base, **arrays, **({} if chat is None else {"text": None})}
            continue
        for number, trace in enumerate(rollout.traces):
            yield {
                **base,
                "trace": number,
                "token_ids": trace.token_ids.tolist(),
                "logprobs": trace.logprobs.tolist(),
                "versions": trace.versions.tolist(),
                "trained": trace.trained.tolist(),
                **({} if chat is None else {"text": completion(trace, chat)}),
            }


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
    schema = _parquet_schema(pyarrow, text=bool(batch) and "text" in batch[0])
    with pyarrow.parquet.ParquetWriter(path, schema) as file:
        while batch:
            file.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            written += len(batch)
            batch = list(islice(entries, _BATCH))
    return written


def _parquet_schema(pa: Any, *, text: bool) -> Any:
    """Return the schema. Types do not depend on the rows: a column that is all null keeps its type."""
    integers = ("group_id", "step", "tokens", "sampled_tokens", "oldest_version", "newest_version")
    kinds = {column: pa.int64() if column in integers else pa.string() for column in COLUMNS}
    kinds |= {"reward": pa.float64(), "trace": pa.int32(), "token_ids": pa.list_(pa.int32())}
    kinds |= {"logprobs": pa.list_(pa.float32()), "versions": pa.list_(pa.int32()), "trained": pa.list_(pa.bool_())}
    return pa.schema(list((kinds | ({"text": pa.string()} if text else {})).items()))
