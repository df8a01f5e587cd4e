"""Sources: which ones the arguments name, the rows of each, read lazily, and which of them are selected.

A source is read row by row in bounded memory (only a .json array is loaded whole), and reading can continue
from any row. Tables are read by tables.py. formats.py interprets the columns.
"""

from collections.abc import Iterator
import dataclasses
from dataclasses import dataclass
import hashlib
import itertools
import json
import math
import os
from pathlib import Path
import re
from typing import Any

from common.args import CommonArgs
from common.data.tables import load_table, read_dataset, read_table
from common.data.types import Row, without_nulls
from common.errors import UserError, say
from common.files import lines

SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet")
# The names of splits, as the datasets library knows them, and of files that are held out.
SPLIT_NAMES = {
    "validation": ["validation", "valid", "val", "dev"],
    "test": ["test", "tests", "testing", "eval", "evaluation"],
}
HELD_OUT_NAMES = ["held.?out", "hold.?out", *SPLIT_NAMES["validation"], *SPLIT_NAMES["test"]]
HELD_OUT = re.compile(f"(^|[^a-z])({'|'.join(HELD_OUT_NAMES)})([^a-z]|$)", re.IGNORECASE)
# Files beside the data.
NOT_DATA = re.compile(
    "(licen[cs]e|notice|readme|requirements)([^a-z].*)?[.]txt|(dataset_infos?|metadata)[.]json", re.IGNORECASE
)
# A document of a .txt file ends at a blank line, or, after this many bytes, at the next line break.
MAX_BLOCK = 1 << 20
# Where reading continues in a source: [file number, rows read of that file, rows yielded so far].
Cursor = list[int]


@dataclass(frozen=True)
class Source:
    """One source of rows: a file, a folder, a save_to_disk folder, or a Hub name."""

    path: str
    name: str | None = None  # configuration of a Hub dataset
    split: str = "train"
    weight: float | None = None  # its share among the sources
    max_samples: int | None = None  # the first N rows, after hold-out
    columns: tuple[str, ...] = ()  # renames, "new=old"
    held_out: float = 0.0  # the fraction split off for evaluation, by a hash of the row
    part: str = "all"  # all, train, held_out
    label: str = ""  # short, unique among the sources
    streaming: bool = False  # if it is a Hub dataset: read from the network during training

    def facts(self) -> dict[str, Any]:
        """The facts about a source that a run records, as JSON."""
        return {"source": self.label, "path": self.path, "split": self.split, "weight": self.weight}


# --- which sources ------------------------------------------------------------------------------------------

# The keys that an item of --dataset_name may have.
ITEM = {"path": str, "name": str, "split": str, "max_samples": int, "columns": list}


def find_sources(args: CommonArgs) -> tuple[list[Source], list[Source]]:
    """The training and evaluation sources that the arguments name.

    Evaluation uses the held-out part of the training sources with eval_fraction; else eval_dataset_name; else
    the evaluation split of those training sources that have one.
    """
    train = training_sources(args)
    if args.eval_fraction and args.eval_dataset_name:
        raise UserError("--eval_fraction and --eval_dataset_name: evaluation is on one of the two")
    if args.eval_fraction:
        evaluation = []
        for source in train:
            part = dataclasses.replace(source, part="held_out", max_samples=args.max_eval_samples)
            if next(read_rows(part), None):
                evaluation.append(part)
        if not evaluation:
            raise UserError(
                f"--eval_fraction {args.eval_fraction}: no row is held out; a larger share is needed"
            )
        return train, evaluation
    if args.eval_dataset_name:
        return train, _sources(args, "eval_dataset_name", args.max_eval_samples)
    return train, _evaluation_splits(args, train)


def _evaluation_splits(args: CommonArgs, train: list[Source]) -> list[Source]:
    """The evaluation split of those training sources that have one whose files are not trained on."""
    split = args.dataset_eval_split
    trained = set()
    for source in train:
        trained |= _real_files(source)
    evaluation = []
    has_tests = False
    for source in train:
        other = dataclasses.replace(source, split=split, max_samples=args.max_eval_samples)
        if source.split == split or not trained.isdisjoint(_real_files(other)):
            continue
        if _has_split(other):
            evaluation.append(other)
        elif split == "validation":
            has_tests = has_tests or _has_split(dataclasses.replace(other, split="test"))
    if has_tests and not evaluation:
        say(
            "data: no validation split, so nothing is evaluated; there is a test split: --dataset_eval_split test"
        )
    if not evaluation and split != "validation":  # the default, which need not be there
        raise UserError(f"--dataset_eval_split {split}: no source has it, beside what is trained on")
    return evaluation


def _real_files(source: Source) -> set[Path]:
    return {file.resolve() for file in files_of(source) or ()}


def training_sources(args: CommonArgs) -> list[Source]:
    """The training sources that the arguments name. Raises UserError for settings that contradict each
    other."""
    sources = _sources(args, "dataset_name", args.max_train_samples)
    weights = args.dataset_weights
    if weights is None:
        weights = [None] * len(sources)
    if len(weights) != len(sources):
        raise UserError("--dataset_weights: expected one weight for each source of --dataset_name")
    settings = {"held_out": args.eval_fraction, "part": "train"} if args.eval_fraction else {}
    weighted = []
    for source, weight in zip(sources, weights, strict=True):
        weighted.append(dataclasses.replace(source, weight=weight, **settings))
    return weighted


def identity(source: Source) -> dict[str, Any]:
    """Everything that a source's rows depend on, as JSON: its settings, and its files or its dataset's
    fingerprint."""
    facts = dict(vars(source))
    for name in ("weight", "label", "streaming"):
        del facts[name]
    files = files_of(source)
    if files is None:
        # None for a dataset that is streamed from the Hub.
        facts["fingerprint"] = getattr(load_table(source), "_fingerprint", None)
    else:
        facts["files"] = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return facts


def _source(args: CommonArgs, flag: str, word: str, most: int | None) -> Source:
    """A source from a word of a flag: a path or name, or a JSON object with settings (a mapping in the YAML
    file)."""
    item: dict[str, Any] = {"path": word}
    if word.lstrip().startswith("{"):
        try:
            item = {"path": None} | json.loads(word)
        except ValueError as error:
            raise UserError(
                f'--{flag} {word}: not valid JSON: {error}; expected like {{"path": "a.jsonl"}}'
            ) from None
    for key, value in item.items():
        if type(value) is not ITEM.get(key) or value == "" or (key == "max_samples" and value < 1):
            expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in ITEM.items())
            raise UserError(f"--{flag} {word}: {key} is {value!r}; expected {expected} above 0")
    settings = {"name": args.dataset_config, "max_samples": most, "columns": args.columns or ()} | item
    settings["columns"] = tuple(map(str, settings["columns"]))
    source = Source(**settings, streaming=args.dataset_streaming)
    if "split" in item:
        return source
    if flag == "dataset_name":
        return dataclasses.replace(source, split=args.dataset_train_split)
    for split in (args.dataset_eval_split, "test"):
        part = dataclasses.replace(source, split=split)
        if _has_split(part):
            return part
    return source


def _sources(args: CommonArgs, flag: str, most: int | None) -> list[Source]:
    """The sources of a flag with labels: a file's stem or the last part of a name, with -2, -3 for
    duplicates."""
    labels = set()
    sources = []
    for word in getattr(args, flag):
        source = _source(args, flag, word, most)
        path = Path(source.path).expanduser()
        stem = plain(path).stem if path.is_file() else Path(os.path.abspath(path)).name
        label = stem
        number = 1
        while not label or label in labels:
            number += 1
            label = f"{stem}-{number}"
        labels.add(label)
        sources.append(dataclasses.replace(source, label=label))
    return sources


# --- rows of a source ---------------------------------------------------------------------------------------


def read_rows(source: Source, cursor: Cursor | None = None) -> Iterator[tuple[Row, Cursor]]:
    """The rows of a source one by one, each with the cursor after it, starting from `cursor` if given.

    Folders: the files named after the split; for train, if there are none, all files, unless the names of
    some say that they are held out (val, test, ...). Raises UserError if something cannot be read, and at the
    end for a source without rows.
    """
    first, at, given = cursor or [0, 0, 0]
    files = files_of(source)
    if files == []:
        raise UserError(
            f"{source.path}: no file for split {source.split}: {source.split}.jsonl, {source.split}-1.csv, ..."
        )
    most = math.inf if source.max_samples is None else source.max_samples
    renames = []
    for pair in source.columns:
        new, _, old = pair.partition("=")
        if not new or not old:
            raise UserError(
                f"--columns {' '.join(source.columns)}: expected new=old, for instance prompt=question"
            )
        renames.append((new, old))
    if given >= most:
        return
    for file in range(first, 1 if files is None else len(files)):
        if files is None:
            rows = read_dataset(source, at)
        else:
            rows = itertools.islice(read_file(files[file]), at, None)
        for number, row in enumerate(rows, at + 1):
            if source.part != "all" and _is_held_out(source, row) != (source.part == "held_out"):
                continue
            _rename(row, renames)
            given += 1
            yield row, [file, number, given]
            if given >= most:
                return
        at = 0
    if not given and source.part != "held_out":
        left = f", with --eval_fraction {source.held_out}" if source.held_out else ""
        raise UserError(f"no rows in {source.path} (split {source.split}{left}); at least one is needed")


def _rename(row: Row, renames: list[tuple[str, str]]) -> None:
    """Rename columns, all at the same time. Rows of several sources may have either name: nothing is replaced by
    null or an empty text. Raises UserError if both are there."""
    values = []
    for new, old in renames:
        if old in row:
            values.append((new, dict.get(row, old)))  # which does not count as read
        elif new == "unused":
            _leave_out(old, row)
        else:
            row.lacks.append(old)
    for _, old in renames:
        row.pop(old, None)
    for new, value in values:
        if new == "unused":
            continue
        if value in (None, "") and new in row:
            continue
        if dict.get(row, new) not in (None, ""):
            raise UserError(
                f"{row.where}: --columns: two columns would be called {new}: rename the other, or leave it out (unused=...)"
            )
        row[new] = value


def _leave_out(key: str, row: Row) -> None:
    """Remove a key, such as reasoning_content, from the messages of a row."""
    for messages in row.values():
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.keys() & {"role", "from"}:
                message.pop(key, None)


def load_rows(source: Source | str) -> list[Row]:
    """All rows of a source, or of a path or name, in memory. Raises UserError if there are none."""
    if isinstance(source, str):
        source = Source(source)
    return [row for row, _ in read_rows(source)]


def _is_held_out(source: Source, row: Row) -> bool:
    """Whether a row is held out. Depends on the row alone, by a hash, so that adding rows moves no others."""
    try:
        text = json.dumps(without_nulls(row), sort_keys=True, ensure_ascii=False, default=str)
    except RecursionError as error:
        row.problem = str(error)
        text = row.where
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < source.held_out


def files_of(source: Source) -> list[Path] | None:
    """The files of the source's split, [] if its folder has none; None if the datasets library reads the
    source."""
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        if suffix_of(path) in SUFFIXES or source.path.startswith((".", "~")) or path.is_absolute():
            raise UserError(f"{source.path}: there is no such file or folder")
        return None
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():  # written by save_to_disk
        return None
    files = _data_files(path)
    names = SPLIT_NAMES.get(source.split, [re.escape(source.split)])
    named = [file for file in files if _starts_with(names, file)]
    if source.split != "train":
        return named
    not_held_out = [file for file in files if not HELD_OUT.search(file.name)]
    if not not_held_out:
        return files  # all files are held out by their names: the folder is what was asked for
    named = [file for file in named if file in not_held_out]
    if not named and len(not_held_out) == len(files):
        return files  # named after no split: all of them are training data
    return named  # []: some names say held out, and none says train, so that one is asked for


def _data_files(folder: Path) -> list[Path]:
    """The files of a folder that hold rows; or those of its folder data, as in a copy of a Hub dataset, beside
    which there may be a stats.json."""
    splits = ["train", *HELD_OUT_NAMES]
    files = [file for file in _readable(folder) if not NOT_DATA.fullmatch(file.name)]
    if any(_starts_with(splits, file) or suffix_of(file) not in (".txt", ".json") for file in files):
        return files
    data = _readable(folder / "data")
    if not files or any(_starts_with(splits, file) for file in data):
        return data
    return files


def _readable(folder: Path) -> list[Path]:
    # macOS puts a hidden file ._data.jsonl beside data.jsonl, which is none of the kind that its name says
    files = sorted(file for file in folder.glob("[!.]*") if suffix_of(file) in SUFFIXES)
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: a link to a file that is not there")
    return files


def _starts_with(names: list[str], file: Path) -> bool:
    """Whether a file is named after one of the splits: train.jsonl, train-1.csv, train_2.csv."""
    return re.match(f"({'|'.join(names)})[^a-z]", file.name, re.IGNORECASE) is not None


def _has_split(source: Source) -> bool:
    """Whether the source is divided into splits and has this one. A single file is not."""
    if Path(source.path).expanduser().is_file():
        return False
    files = files_of(source)
    if files is None:
        return load_table(source, optional=True) is not None
    return bool(files)


# --- rows of a file -----------------------------------------------------------------------------------------


def suffix_of(path: Path) -> str:
    """The suffix that determines how a file is read."""
    return plain(path).suffix.lower()


def plain(path: Path) -> Path:
    """The path without a compression suffix."""
    return path.with_suffix("") if path.suffix == ".gz" else path


def read_file(path: Path) -> Iterator[Row]:
    """The rows of a file.

    .json is one array or an object per line, .txt a row {"text"} per paragraph. All but .parquet may be
    compressed. Raises UserError for a broken file.
    """
    suffix = suffix_of(path)
    try:
        if suffix == ".txt":
            yield from _read_paragraphs(path)
        elif suffix in (".json", ".jsonl"):
            yield from _read_json_array(path) if _starts_a_list(path) else _read_json_lines(path)
        elif suffix in SUFFIXES:
            yield from read_table(path, suffix)
        else:
            raise UserError(f"{path}: unknown kind of file; expected {', '.join(SUFFIXES)}")
    except Exception as error:  # of the system, a decompressor, pyarrow
        if isinstance(error, UserError):  # not `except UserError`, a name that is gone when Python ends
            raise
        raise UserError(f"{path}: cannot be read: {error}") from None


def _starts_a_list(path: Path) -> bool:
    for _, text in lines(path):
        if text.strip():
            return text.lstrip().startswith("[")
    return False


def _read_json_lines(path: Path) -> Iterator[Row]:
    for number, text in lines(path):
        where = f"{path}:{number}"
        try:
            if text := text.strip():
                yield _object(where, json.loads(text))
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON: {error}; expected one object in each line") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, nested too deep
            yield Row({}, where, problem=str(error))


def _read_json_array(path: Path) -> Iterator[Row]:
    for number, value in enumerate(json.loads("".join(text for _, text in lines(path))), 1):
        yield _object(f"{path} row {number}", value)


def _object(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object {{column: value}}, found {type(value).__name__}")
    return Row(value, where)


def _read_paragraphs(path: Path) -> Iterator[Row]:
    """Blocks between blank lines. One of more than MAX_BLOCK bytes ends at a line break."""
    block = []
    where = ""
    size = 0
    for number, text in itertools.chain(lines(path), [(0, "")]):
        if text.strip():
            if not block:
                where = f"{path}:{number}"
            block.append(text.rstrip("\r\n"))
            size += len(text.encode())
        if block and (not text.strip() or size >= MAX_BLOCK):
            yield Row({"text": "\n".join(block)}, where)
            block = []
            size = 0
