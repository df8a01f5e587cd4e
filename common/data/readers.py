"""Readers: the rows of a file, or of a table of the datasets library, one by one, starting at any place."""

import bz2
import csv
import functools
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator
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


def read_file(path: Path, at: int, number: int) -> Iterator[Position]:
    """The rows of a file after the first `at` bytes or rows, which contain its first `number` lines or rows."""
    suffix = kind(path)
    if suffix == ".parquet" and path.suffix not in COMPRESSED:
        return _read_parquet(path, at)
    if suffix in (".csv", ".tsv"):
        return _read_csv(path, at, number, "," if suffix == ".csv" else "\t")
    if suffix == ".txt":
        return _read_paragraphs(path, at, number)
    if suffix in (".json", ".jsonl"):
        return _read_json_array(path, at) if _is_json_array(path) else _read_json_lines(path, at, number)
    raise UserError(f"{path}: unknown kind of file; expected {', '.join(SUFFIXES)}, all but the last also .gz, .bz2, .xz")


def _read_json_lines(path: Path, at: int, number: int) -> Iterator[Position]:
    for line in _lines(path, at):
        at, number = at + len(line), number + 1
        text = _decode(line, path, number)
        try:
            columns = json.loads(text, object_pairs_hook=_once_each)
        except (ValueError, RecursionError) as error:
            if not text.strip():
                continue
            reason = getattr(error, "msg", error)
            raise UserError(f"{path}:{number}: not valid JSON: {reason}; expected one object in each line") from None
        yield _object(f"{path}:{number}", columns), at, number


def _read_json_array(path: Path, at: int) -> Iterator[Position]:
    text = "".join(_decode(line, path, number) for number, line in enumerate(_lines(path, 0), 1))
    try:
        values = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{getattr(error, 'lineno', 1)}: not valid JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(values, list):
        raise UserError(f"{path}: expected a list of rows, [{{...}}, ...], found {type(values).__name__}")
    for row in range(at, len(values)):
        yield _object(f"{path} row {row + 1}", values[row]), row + 1, row + 1


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys, of which the parser would silently keep only the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def _is_json_array(path: Path) -> bool:
    """Whether a file is one JSON value, whatever its name: it starts with [, or does not have two lines that start with
    {."""
    starts = (line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] for line in _lines(path, 0))
    first, second = itertools.islice(itertools.chain((start for start in starts if start), [b"", b""]), 2)
    return first == b"[" or (kind(path) == ".json" and first == b"{" and second != b"{")


def _object(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object {{column: value}}, found {type(value).__name__}")
    return Row(value, where)


def _read_paragraphs(path: Path, at: int, number: int) -> Iterator[Position]:
    """Blocks between blank lines. One of more than MAX_BLOCK bytes ends at a line break."""
    block, start = [], at
    for line in _lines(path, at):
        at, number = at + len(line), number + 1
        text = _decode(line, path, number)
        if text.strip():
            if not block:
                first, start = number, at - len(line)
            block.append(text.rstrip("\r\n"))
            if at - start < MAX_BLOCK:
                continue
        if block:
            yield Row({"text": "\n".join(block)}, f"{path}:{first}"), at, number
            block = []
    if block:
        yield Row({"text": "\n".join(block)}, f"{path}:{first}"), at, number


def _read_csv(path: Path, at: int, number: int, delimiter: str) -> Iterator[Position]:
    """The records of a table whose first line has the column names."""
    csv.field_size_limit(MAX_FIELD)

    def records() -> Iterator[tuple[int, list[str]]]:
        """(first line, fields) of the records from `at` on; updates `at` and `number`."""

        def lines() -> Iterator[str]:
            nonlocal at, number
            for line in _lines(path, at):
                at, number = at + len(line), number + 1
                yield _decode(line, path, number)

        first = number + 1
        try:
            for fields in csv.reader(lines(), delimiter=delimiter, strict=True):
                yield first, fields
                first = number + 1
        except csv.Error as error:
            hint = "a quote that opens is closed, and one inside a quoted field is written twice"
            reason = str(error).replace("\t", "\\t")
            raise UserError(f"{path}:{first}: not a valid table: {reason} ({hint})") from None

    start, at, number = (at, number), 0, 0
    _, names = next(records(), (1, []))
    if len(set(names)) < len(names):
        raise UserError(f"{path}:1: expected the names of the columns, each one once; found {', '.join(names)}")
    if len(names) == 1 and (other := next((mark for mark in ",;\t|" if mark in names[0]), None)):
        raise UserError(
            f"{path}:1: one column, named {names[0]!r}: are the fields separated by {other!r}? "
            "A .csv has ',' between them, a .tsv tabs"
        )
    if start[0]:
        at, number = start
    for first, fields in records():
        if len(fields) > len(names):
            raise UserError(
                f"{path}:{first}: {len(fields)} fields, but the first line names {len(names)} columns "
                f'({", ".join(names)}); a field with {delimiter!r} in it stands in "quotes"'
            )
        if fields:
            yield Row(dict(itertools.zip_longest(names, fields)), f"{path}:{first}"), at, number


def _read_parquet(path: Path, at: int) -> Iterator[Position]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading it needs pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number + rows <= at:
                    number += rows
                    continue
                for batch in file.iter_batches(batch_size=256, row_groups=[group]):
                    skipped = min(max(at - number, 0), len(batch))
                    number += skipped
                    for columns in batch.slice(skipped).to_pylist():
                        number += 1
                        yield Row(columns, f"{path} row {number}"), number, number
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read as parquet: {error}") from None


def _lines(path: Path, at: int) -> Iterator[bytes]:
    """The lines of a file, decompressed, from byte `at` on."""
    try:
        with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
            file.seek(at)
            yield from file
    except GeneratorExit:  # a stream left unread when Python ends, with zlib gone already
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        broken = " (is it cut off, or not compressed at all?)" if path.suffix in COMPRESSED else ""
        raise UserError(f"{path}: cannot be read: {error}{broken}") from None


def _decode(line: bytes, path: Path, number: int) -> str:
    """A line as text, without a byte order mark at the start of a file."""
    try:
        return line.decode() if number > 1 else line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{path}:1: UTF-16 text; make UTF-8 of it: iconv -f UTF-16 -t UTF-8 {path} > new") from None
        raise UserError(
            f"{path}:{number}: byte {line[error.start]:#x} is not UTF-8; if the file is Latin-1: "
            f"iconv -f LATIN1 -t UTF-8 {path} > new"
        ) from None


# --- the datasets library -------------------------------------------------------------------------------------------


def read_dataset(path: str, name: str | None, split: str, streaming: bool, at: int) -> Iterator[Position]:
    """The rows of a save_to_disk folder or a Hub dataset after the first `at`."""
    table = load_table(path, name, split, streaming)
    if not streaming and at >= len(table):  # skip() refuses to skip everything
        return
    try:
        for number, columns in enumerate(table.skip(at) if at else table, at + 1):
            yield Row(dict(columns), f"{path} row {number}"), number, number
    except Exception as error:  # the library and the network raise many kinds, with long messages
        raise UserError(f"dataset {path}: cannot be read: {_short(error)}") from None


@functools.lru_cache(maxsize=16)  # each load contacts the Hub and verifies files
def load_table(path: str, name: str | None, split: str, streaming: bool, optional: bool = False) -> Any:
    """A split as a table of the datasets library. An absent one is None if it is optional, else UserError."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"dataset {path}: reading it needs the datasets library: pip install datasets") from None
    folder = Path(path).expanduser()
    try:
        if not folder.is_dir():
            return datasets.load_dataset(path, name, split=split, streaming=streaming)
        table = datasets.load_from_disk(str(folder))
        if isinstance(table, datasets.DatasetDict):
            if split not in table and not optional:
                raise ValueError(f"no split {split}; found {', '.join(table)}")
            return table.get(split)
        return None if optional else table  # a table without splits is read whole, as training data
    except Exception as error:  # as above
        reason = _short(error)
        if optional and ("nknown split" in reason or "Bad split" in reason):
            return None
        hint = "" if folder.exists() else " (no such file or folder here; as a Hub name it cannot be loaded)"
        if address := re.match(r"https?://(?:huggingface\.co|hf\.co)/datasets/([^/]+/[^/?#]+)", path):
            hint, reason = "", f"that is an address; the Hub's name is {address[1]}"
        elif "," in path and not folder.exists():
            hint, reason = "", "no such file or folder; several are separated by spaces: " + " ".join(path.split(","))
        raise UserError(f"dataset {path}{hint}: {reason}") from None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
