"""The rows of data files and of datasets on the hub, by number.

JSON lines, JSON and CSV files are read as a whole. Parquet files and datasets of the hub are read through `datasets`,
which keeps them in files that are mapped into memory, so their size is not limited by memory.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.errors import DataError, one_line

INSTALL = 'pip install "headrace[data]"'


class Table(NamedTuple):
    """Rows, and how messages name them."""

    rows: Sequence[Any]
    """What should be objects, each with a prompt. Only rows of a file that is not in memory are known to be objects."""
    origin: str
    noun: str = "row"
    first: int = 1
    """The number of the first row, as people count them in this kind of file."""
    ids: str = ""
    """The beginning of the ids of rows, followed by the row's number. If it is empty, ids are hashes of the content."""

    def where(self, index: int) -> str:
        """Return how a message names a row."""
        return f"{self.origin}, {self.noun} {index + self.first}"


def read_file(path: Path) -> Table:
    """Read a file of rows, by the end of its name. A file with another end is taken for JSON lines."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    readers = {".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    return readers.get(path.suffix, _read_lines)(path)


def read_dataset(directory: Path, name: str, subset: str | None, split: str) -> Table:
    """Read one split of a dataset of the hub whose files are in this directory."""
    rows = _load(name, str(directory), subset, split=split)
    return Table(rows, f"{name}, split {split}", ids=f"{split}-")


def _read_lines(path: Path) -> Table:
    content = _content(path)
    return Table(_Lines(content.removesuffix(b"\n").split(b"\n"), path), str(path), noun="line")


class _Lines(Sequence[Any]):
    """The lines of a JSON lines file. A line is decoded when it is asked for."""

    def __init__(self, lines: list[bytes], path: Path) -> None:
        self._lines = lines
        self._path = path

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        line, where = self._lines[index], f"{self._path}, line {index + 1}"
        if not line.strip():
            raise DataError(f"{where}: the line is empty")
        return _decoded(line, where)


def _read_json(path: Path) -> Table:
    found = _decoded(_content(path), str(path))
    if not isinstance(found, list):
        raise DataError(f"{path} must be a list of objects (objects on lines of their own are a .jsonl file)")
    if not found:
        raise DataError(f"{path} is empty")
    return Table(found, str(path))


def _read_csv(path: Path) -> Table:
    """Read a CSV file with a header. All its values are texts."""
    try:
        reader = csv.DictReader(io.StringIO(_content(path).decode(), newline=""), strict=True)
        rows = list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a CSV file: {one_line(str(error), 200)}") from error
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise DataError(f"{path}, row {number} has another number of values than the header has names")
    if not rows:
        raise DataError(f"{path} has no rows")
    return Table(rows, str(path))


def _read_parquet(path: Path) -> Table:
    return Table(_load(str(path), "parquet", None, data_files=str(path), split="train"), str(path), ids="row-")


def _load(name: str, source: str, subset: str | None, **options: Any) -> Sequence[Any]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"[task] path: {name} is read through the package datasets: {INSTALL}") from error
    datasets.disable_progress_bars()
    try:
        # With the files here, nothing is fetched, and no code of the dataset's is run.
        rows: Sequence[Any] = datasets.load_dataset(source, subset, **options)
    except (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"[task] path: {name} cannot be read: {one_line(str(error), 300)}") from error
    if not len(rows):
        raise DataError(f"[task] path: {name} has no rows")
    return rows


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not content.strip():
        raise DataError(f"{path} is empty")
    return content


def _decoded(content: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def renamed(row: Mapping[str, Any], fields: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return a row with the fields that `[task] fields` names under their new names. The prompt's field is moved."""
    found = dict(row)
    for new, old in fields.items():
        if old not in row:
            raise DataError(f"{where} has no {old!r}, which [task] fields calls {new!r} (it has: {_names(row)})")
        found[new] = row[old]
    if (moved := fields.get("prompt", "prompt")) != "prompt" and moved not in fields:
        del found[moved]
    return found


def _names(names: Iterable[str]) -> str:
    return one_line(", ".join(map(str, names)), 200) or "nothing"
