"""Readers: the rows of a file one by one, starting at any place. Tables are read by common/extras/tables.py."""

import bz2
from collections.abc import Iterator
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

from common.data.types import Row
from common.errors import UserError
from common.extras import extra

SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet")
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
MAX_BLOCK = 1 << 20  # bytes of a .txt file without a blank line after which a document ends at the next line break
Position = tuple[Row, int, int]  # a row, the bytes or rows of the file up to its end, and its line or row number


def kind(path: Path) -> str:
    """The suffix that determines how a file is read."""
    return plain(path).suffix.lower()


def plain(path: Path) -> Path:
    """The path without a compression suffix."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def read_file(path: Path, at: int, number: int, whole: bool = False) -> Iterator[Position]:
    """The rows of a file after the first `at` bytes or rows, which contain its first `number` lines or rows.

    .json is one array or an object per line, .txt a row {"text"} per paragraph, or for the whole file. All but .parquet may
    be compressed. Raises UserError for a broken file.
    """
    suffix = kind(path)
    try:
        if suffix == ".txt" and whole:
            if not at:
                yield Row({"text": "".join(text for *_, text in lines(path))}, str(path)), 1, 1
        elif suffix == ".txt":
            yield from _read_paragraphs(path, at, number)
        elif suffix in (".json", ".jsonl"):
            yield from _read_json_array(path, at) if _starts_a_list(path) else _read_json_lines(path, at, number)
        elif suffix in SUFFIXES:
            yield from extra("tables").read_table(path, suffix, at)
        else:
            raise UserError(f"{path}: unknown kind of file; expected {', '.join(SUFFIXES)}")
    except UserError:
        raise
    except Exception as error:  # of the system, a decompressor, pyarrow
        raise UserError(f"{path}: cannot be read: {error}") from None


def _starts_a_list(path: Path) -> bool:
    with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
        starts = (line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] for line in file)
        return next(filter(None, starts), b"") == b"["


def _read_json_lines(path: Path, at: int, number: int) -> Iterator[Position]:
    for end, line, text in lines(path, at, number):
        if text := text.strip():
            yield _object(f"{path}:{line}", _parsed(f"{path}:{line}", text)), end, line


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None


def _read_json_array(path: Path, at: int) -> Iterator[Position]:
    values = _parsed(str(path), "".join(text for *_, text in lines(path)))
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
    for end, line, text in lines(path, at, number):
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


def lines(path: Path, at: int = 0, number: int = 0) -> Iterator[tuple[int, int, str]]:
    """From byte `at` on, decompressed: (bytes up to the line's end, its number, its text)."""
    with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
        file.seek(at)
        for line in file:
            at, number = at + len(line), number + 1
            try:
                yield at, number, line.decode("utf-8-sig" if number == 1 else "utf-8")  # a byte order mark at the start
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: expected UTF-8: {error.reason}; convert it: iconv -t UTF-8") from None
