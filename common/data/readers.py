"""Readers: the rows of a file, or of a table of the datasets library, one by one, starting at any place."""

import bz2
from collections.abc import Iterator
import csv
import functools
import gzip
import itertools
import json
import lzma
from pathlib import Path
from typing import Any

from common.data.types import Row
from common.errors import UserError

SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet")
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
MAX_BLOCK = 1 << 20  # bytes of a .txt file without a blank line after which a document ends at the next line break
MAX_FIELD = 1 << 27  # characters of a .csv field; a longer one indicates an unclosed quote
Position = tuple[Row, int, int]  # a row, the bytes or rows of the file up to its end, and its line or row number


def kind(path: Path) -> str:
    """The suffix that determines how a file is read."""
    return plain(path).suffix.lower()


def plain(path: Path) -> Path:
    """The path without a compression suffix."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path


# --- files ----------------------------------------------------------------------------------------------------------


def read_file(path: Path, at: int, number: int, whole: bool = False) -> Iterator[Position]:
    """The rows of a file after the first `at` bytes or rows, which contain its first `number` lines or rows.

    .json is one array or an object per line, .txt a row {"text"} per paragraph, or for the whole file; all values of .csv
    and .tsv are strings. All but .parquet may be compressed. A row whose content cannot be read has a `problem`. Raises
    UserError for a broken file.
    """
    suffix = kind(path)
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path, at)
        elif suffix in (".csv", ".tsv"):
            yield from _read_csv(path, at, "," if suffix == ".csv" else "\t")
        elif suffix == ".txt" and whole:
            if not at:
                yield Row({"text": "".join(text for *_, text in _lines(path, 0, 0))}, str(path)), 1, 1
        elif suffix == ".txt":
            yield from _read_paragraphs(path, at, number)
        elif suffix not in (".json", ".jsonl"):
            raise UserError(f"{path}: unknown kind of file; expected {', '.join(SUFFIXES)}")
        elif _starts_a_list(path):
            yield from _read_json_array(path, at)
        else:
            yield from _read_json_lines(path, at, number)
    except Exception as error:  # of the system, a decompressor, pyarrow
        if isinstance(error, UserError):
            raise
        hint = "to read it: pip install datasets" if isinstance(error, ImportError) else f"cannot be read: {error}"
        raise UserError(f"{path}: {hint}") from None


def _starts_a_list(path: Path) -> bool:
    with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
        starts = (line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] for line in file)
        return next(filter(None, starts), b"") == b"["


def _read_json_lines(path: Path, at: int, number: int) -> Iterator[Position]:
    for end, line, text in _lines(path, at, number):
        if text.strip():
            yield _parsed(f"{path}:{line}", text), end, line


def _parsed(where: str, text: str) -> Row:
    """A line as a row. Raises UserError if it is not JSON, or not an object."""
    try:
        columns = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON: {error.msg}; expected one object in each line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nested too deep
        return Row({}, where, problem=str(error))
    return _object(where, columns)


def _read_json_array(path: Path, at: int) -> Iterator[Position]:
    try:
        values = json.loads("".join(text for *_, text in _lines(path, 0, 0)))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    for row in range(at, len(values)):
        yield _object(f"{path} row {row + 1}", values[row]), row + 1, row + 1


def _object(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object {{column: value}}, found {type(value).__name__}")
    return Row(value, where)


def _read_paragraphs(path: Path, at: int, number: int) -> Iterator[Position]:
    """Blocks between blank lines. One of more than MAX_BLOCK bytes ends at a line break."""
    block: list[str] = []
    first = start = line = 0
    for end, line, text in _lines(path, at, number):
        if text.strip():
            if not block:
                first, start = line, at
            block.append(text.rstrip("\r\n"))
        at = end
        if block and (not text.strip() or at - start >= MAX_BLOCK):
            yield Row({"text": "\n".join(block)}, f"{path}:{first}"), at, line
            block = []
    if block:
        yield Row({"text": "\n".join(block)}, f"{path}:{first}"), at, line


def _read_csv(path: Path, at: int, delimiter: str) -> Iterator[Position]:
    """The records of a table whose first line has the column names."""
    csv.field_size_limit(MAX_FIELD)
    table = csv.DictReader((text for *_, text in _lines(path, 0, 0)), delimiter=delimiter, strict=True)
    for row, columns in enumerate(table, 1):
        if None in columns:
            raise UserError(f"{path}:{table.line_num}: more fields than columns: {', '.join(table.fieldnames)}")
        if row > at:
            yield Row(columns, f"{path} row {row}"), row, row


def _read_parquet(path: Path, at: int) -> Iterator[Position]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        rows = (columns for batch in file.iter_batches(batch_size=256) for columns in batch.to_pylist())
        for row, columns in enumerate(itertools.islice(rows, at, None), at + 1):
            yield Row(columns, f"{path} row {row}"), row, row


def _lines(path: Path, at: int, number: int) -> Iterator[tuple[int, int, str]]:
    """From byte `at` on, decompressed: (bytes up to the line's end, its number, its text)."""
    with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
        file.seek(at)
        for line in file:
            at, number = at + len(line), number + 1
            try:
                yield at, number, line.decode("utf-8-sig" if number == 1 else "utf-8")  # a byte order mark at the start
            except UnicodeDecodeError as error:
                try:
                    line.decode("gb18030")
                    hint = "; as Chinese text it can be read: iconv -f GB18030 -t UTF-8, and look at the result"
                except UnicodeDecodeError:
                    hint = "; convert the file from the encoding it was written in"
                raise UserError(f"{path}:{number}: expected UTF-8: {error.reason}{hint}") from None


# --- the datasets library -------------------------------------------------------------------------------------------


def read_dataset(path: str, name: str | None, split: str, streaming: bool, at: int) -> Iterator[Position]:
    """The rows of a save_to_disk folder or a Hub dataset after the first `at`."""
    table = load_table(path, name, split, streaming)
    if hasattr(table, "__len__") and at >= len(table):  # skip() refuses to skip everything
        return
    number = at
    try:
        for number, columns in enumerate(table.skip(at) if at else table, at + 1):
            yield Row(dict(columns), f"{path} row {number}"), number, number
    except Exception as error:  # the library and the network raise many kinds, with long messages
        raise UserError(f"dataset {path} row {number + 1}: cannot be read: {_short(error)}") from None


@functools.lru_cache(maxsize=16)  # each load contacts the Hub and verifies files
def load_table(path: str, name: str | None, split: str, streaming: bool, optional: bool = False) -> Any:
    """A split as a table of the datasets library. An absent one is None if it is optional, else UserError."""
    folder = Path(path).expanduser()
    try:
        import datasets

        if not folder.is_dir():
            return datasets.load_dataset(path, name, split=split, streaming=streaming)
        table = datasets.load_from_disk(str(folder))
        if not isinstance(table, datasets.DatasetDict):
            return None if optional else table  # a table without splits is read whole, as training data
        if split not in table and not optional:
            raise ValueError(f"no split {split}; found {', '.join(table)}")
        return table.get(split)
    except ImportError:
        raise UserError(f"dataset {path}: to read it: pip install datasets") from None
    except Exception as error:  # as above
        reason = _short(error)
        if optional and ("nknown split" in reason or "Bad split" in reason):
            return None
        hint = "" if folder.exists() else " (no such file or folder here; as a Hub name it cannot be loaded)"
        raise UserError(f"dataset {path}{hint}: {reason}") from None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
