"""Rows of tables: csv, tsv and parquet files, save_to_disk folders and datasets of the Hub."""

from collections.abc import Iterator
import csv
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.data.types import Row
from common.errors import UserError
from common.files import lines

if TYPE_CHECKING:
    from common.data.sources import Source

MAX_FIELD = 1 << 27  # characters of a .csv field; a longer one indicates an unclosed quote


def read_table(path: Path, suffix: str) -> Iterator[Row]:
    """The rows of a file. All values of .csv and .tsv are strings."""
    if suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        rows = _read_csv(path, "," if suffix == ".csv" else "\t")
    for number, columns in enumerate(rows, 1):
        yield Row(columns, f"{path} row {number}")


def _read_csv(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    """The records of a table whose first line has the column names."""
    csv.field_size_limit(MAX_FIELD)
    table = csv.DictReader((text for _, text in lines(path)), delimiter=delimiter, strict=True)
    names = [name for name in table.fieldnames or () if name]
    if len(set(names)) < len(names):
        raise UserError(f"{path}:1: several columns have one name: {', '.join(names)}")
    for columns in table:
        if None in columns:
            raise UserError(
                f"{path}:{table.line_num}: more fields than columns: {', '.join(table.fieldnames)}"
            )
        yield columns


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        decode = None
        if b'"Json"' in (file.schema_arrow.metadata or {}).get(b"huggingface", b""):
            from datasets import Features

            decode = Features.from_arrow_schema(file.schema_arrow).decode_example
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                yield decode(row) if decode else row


def read_dataset(source: "Source", at: int) -> Iterator[Row]:
    """The rows of a save_to_disk folder or a Hub dataset after the first `at`."""
    table = load_table(source)
    if hasattr(table, "__len__") and at >= len(table):  # skip() refuses to skip everything
        return
    number = at
    try:
        for number, columns in enumerate(table.skip(at) if at else table, at + 1):
            yield Row(dict(columns), f"{source.path} row {number}")
    except Exception as error:  # the library and the network raise many kinds
        raise UserError(f"dataset {source.path} row {number + 1}: cannot be read: {error}") from None


def load_table(source: "Source", optional: bool = False) -> Any:
    """A split as a table of the datasets library. An absent one is None if it is optional, else UserError."""
    try:
        return _load(source.path, source.name, source.split, source.streaming)
    except Exception as error:  # as above
        if optional and any(words in str(error) for words in ("nknown split", "Bad split")):
            return None
        where = "" if Path(source.path).expanduser().exists() else "no file or folder here, and on the Hub: "
        raise UserError(f"dataset {source.path}: {where}{error}") from None


@functools.lru_cache(maxsize=16)  # each load contacts the Hub and verifies files
def _load(path: str, name: str | None, split: str, streaming: bool) -> Any:
    import datasets

    folder = Path(path).expanduser()
    if not folder.is_dir():
        return datasets.load_dataset(path, name, split=split, streaming=streaming)
    try:
        table = datasets.load_from_disk(str(folder))
    except IndexError:  # there is no file to read
        raise ValueError("it has a split without rows, which the library cannot read: leave it out") from None
    if not isinstance(table, datasets.DatasetDict):
        table = {"train": table}  # without splits it is training data
    if split not in table:
        raise ValueError(f"Unknown split {split}; found {', '.join(table)}")
    return table[split]
