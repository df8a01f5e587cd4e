"""Tokenised data: each source is tokenised once, in parallel, into memory-mapped files that later runs use.

A source's folder holds the token ids of all its sequences end to end (uint16 or uint32), which are trained, where
each sequence starts and ends, and the facts of its making. Its name is a hash of everything that it depends on. It is
written under another name and then renamed: what a killed run leaves behind is never taken for whole.
"""

import contextlib
import hashlib
import inspect
import json
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_all_start_methods, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from common.collators import Unit, whole
from common.data import chat, formats, readers, tokens
from common.data import sources as data
from common.data.examples import TokenFile, Units
from common.data.formats import as_text
from common.data.sources import BadRow, Dropped, Row, Source, identity, read_rows
from common.data.tokens import tokenize_documents, train_tokenizer
from common.errors import UserError
from common.run.output_dir import flush

import numpy as np
import tokenizers
import transformers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

CHUNK = 200  # rows that a worker gets at a time
ROOMS = (readers, data, formats, chat, tokens)  # the code that tokenises


class Encoded(NamedTuple):
    """Rows as units: the sequences of all of them end to end."""

    ids: np.ndarray  # (T,)
    mask: np.ndarray  # (T,) uint8: 1 where trained
    lengths: np.ndarray  # (sequences,) int64
    per_unit: int  # sequences of a unit: 1, or 2 for a pair
    rows: np.ndarray  # (units,) int64: the row that each came from
    difficulty: np.ndarray  # (units,) float64, NaN without a curriculum column
    dropped: Dropped


def tokenize(
    accelerator: Any,
    sources: list[Source],
    make_units: Callable[..., str | list[Unit]],
    tokenizer: Any,
    settings: dict[str, Any],
    *,
    cache_dir: str,
    num_proc: int | None = None,
    strict: bool = False,
    curriculum_column: str | None = None,
) -> Units:
    """All rows of the sources as units, from the cache where it has them. Called on every process.

    make_units(columns, tokenizer, **settings): the units of a row, or its text, which becomes a document. A BadRow that it
    raises, or that stands in the place of a unit, is counted (with `strict`, an error); a UserError ends the run. It, the
    settings, the tokenizer, the source and the code that tokenises are the key of the cache. num_proc: processes that
    tokenise; None: one for each core.
    """
    column = None if curriculum_column == "length" else curriculum_column
    files = []
    for source in sources:
        job = (make_units, tokenizer, settings | {"dataset_format": source.format}, column)
        folder = Path(cache_dir, f"{source.label}-{cache_key(source, *job)}")
        # One process tokenises; on another node whose disk is not shared, one there, too.
        for mine in (accelerator.is_main_process, accelerator.is_local_main_process):
            if mine and not is_whole(folder):
                build(source, job, folder, num_proc, strict)
            accelerator.wait_for_everyone()
        file = open_folder(folder)
        dropped = Dropped(file.facts["dropped"])
        dropped.say(file.facts["rows"], f"rows of {source.label}", len(file.starts))
        if strict:
            refuse(dropped)
        files.append(file)
    units = Units(files, sources)
    if curriculum_column == "length":
        units.difficulty = units.lengths
    elif column:
        units.difficulty = np.concatenate([file.difficulty for file in files])
    return units


def encode(
    rows: list[tuple[int, Row]], make_units: Callable[..., Any], tokenizer: Any, settings: dict, column: str | None
) -> Encoded:
    """Rows, each with its number, as units. Rows that cannot be used are counted."""
    made: list[tuple[int, float, Any]] = []
    dropped = Dropped()
    for number, row in rows:
        try:
            units = make_units(row.columns, tokenizer, **settings)
            difficulty = float("nan") if column is None else number_in(row.columns, column)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
        except BadRow as reason:
            dropped.add(str(reason), row.where)
        else:
            for unit in units if isinstance(units, list) else [units]:
                if isinstance(unit, BadRow):
                    dropped.add(str(unit), row.where)
                else:
                    made.append((number, difficulty, unit))
    documents = iter(tokenize_documents([unit for _, _, unit in made if isinstance(unit, str)], tokenizer))
    units = [[whole(next(documents))] if isinstance(unit, str) else unit for _, _, unit in made]
    sequences = [sequence for unit in units for sequence in unit]
    kind = np.uint16 if _largest_id(tokenizer) < 2**16 else np.uint32
    none = [np.zeros(0, np.uint8)]
    return Encoded(
        np.concatenate([sequence["input_ids"] for sequence in sequences] or none).astype(kind),
        np.concatenate([sequence["loss_mask"] for sequence in sequences] or none).astype(np.uint8),
        np.array([len(sequence["input_ids"]) for sequence in sequences], np.int64),
        max((len(unit) for unit in units), default=1),
        np.array([number for number, _, _ in made], np.int64),
        np.array([difficulty for _, difficulty, _ in made], np.float64),
        dropped,
    )


@chat.per_tokenizer
def _largest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values())  # which its size does not tell: some ids may be left out


def number_in(columns: dict[str, Any], column: str) -> float:
    if column not in columns:
        raise UserError(f"--curriculum_column {column}: no such column; found {', '.join(columns)}")
    try:
        value = float(columns[column])
    except (TypeError, ValueError):
        value = float("nan")
    if value != value:
        raise BadRow(f"{column} is not a number")
    return value


def train_tokenizer_on(accelerator: Any, sources: list[Source], vocab_size: int, cache_dir: str, field: str) -> Any:
    """A tokenizer trained on the column `field` of the sources (tokens.train_tokenizer), from the cache if it is there."""
    parts = [[identity(source) for source in sources], vocab_size, field, *versions()]
    folder = Path(cache_dir, f"tokenizer-{digest(parts)}")

    def texts() -> Iterator[str]:
        for source in sources:
            for row, _ in read_rows(source):
                with contextlib.suppress(BadRow):  # counted where the row is tokenised
                    yield as_text(row.columns, field)

    for mine in (accelerator.is_main_process, accelerator.is_local_main_process):
        if mine and not is_whole(folder):
            with making(folder) as temporary:
                train_tokenizer(texts(), vocab_size).save_pretrained(temporary)
        accelerator.wait_for_everyone()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # how it was loaded, which would be saved with it
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


# --- building -------------------------------------------------------------------------------------------------------


def build(source: Source, job: tuple, folder: Path, num_proc: int | None, strict: bool) -> None:
    """Tokenise a source into its folder. Raises UserError for rows that end the run."""
    facts: dict[str, Any] = {"rows": 0, "units": 0, "tokens": 0, "trained_tokens": 0, "per_unit": 1}
    dropped, columns = Dropped(), []
    bar = tqdm(desc=f"tokenising {source.label}", unit=" rows", mininterval=1, delay=2)
    with making(folder) as temporary:
        with open(temporary / "ids.bin", "wb") as ids, open(temporary / "mask.bin", "wb") as mask, bar:
            for count, encoded in encode_all(enumerate(row for row, _ in read_rows(source)), job, num_proc):
                encoded.ids.tofile(ids)
                encoded.mask.tofile(mask)
                columns.append((encoded.lengths, encoded.rows, encoded.difficulty))
                facts["rows"] += count
                facts["units"] += len(encoded.rows)
                facts["tokens"] += len(encoded.ids)
                facts["trained_tokens"] += int(encoded.mask.sum(dtype=np.int64))
                facts["dtype"], facts["per_unit"] = str(encoded.ids.dtype), max(facts["per_unit"], encoded.per_unit)
                dropped.merge(encoded.dropped)
                bar.update(count)
                if strict:
                    refuse(dropped)
        if facts["trained_tokens"] == facts["tokens"]:
            (temporary / "mask.bin").unlink()
        for name, parts in zip(("lengths", "rows", "difficulty"), zip(*columns, strict=True), strict=True):
            np.save(temporary / f"{name}.npy", np.concatenate(parts))
        facts["dropped"] = dropped.reasons
        (temporary / "facts.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")


def refuse(dropped: Dropped) -> None:
    """With strict_data: the first row that cannot be used is an error."""
    for reason, found in dropped.reasons.items():  # in the order in which they came up
        raise UserError(f"{found['first'][0]}: {reason} (--strict_data)")


@contextlib.contextmanager
def making(folder: Path) -> Iterator[Path]:
    """A folder to write in, which gets its name, and the list of its files, when all of it is on the disk.

    Raises UserError where that cannot be done.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}-{time.time_ns()}.tmp")  # in a container all runs are pid 1
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # another run has removed it, or finished it
                if time.time() - max(path.stat().st_mtime for path in (old, *old.iterdir())) > 24 * 3600:
                    shutil.rmtree(old, ignore_errors=True)  # of a killed run
        temporary.mkdir()
        yield temporary
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        (temporary / "files.json").write_text(json.dumps(sizes))
        for file in temporary.iterdir():
            flush(file)
        if not is_whole(folder):  # else another run has made it in the meantime
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
    except OSError as error:
        raise UserError(f"--dataset_cache_dir {folder.parent}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def encode_all(rows: Iterable[tuple[int, Row]], job: tuple, num_proc: int | None) -> Iterator[tuple[int, Encoded]]:
    """(rows, their units), in order, chunk by chunk; by several processes where there is more than one chunk."""
    rows = iter(rows)
    chunks = iter(lambda: list(islice(rows, CHUNK)), [])
    some = list(islice(chunks, 2))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = num_proc or cores
    chunks = chain(some, chunks)
    if workers < 2 or len(some) < 2:
        yield from ((len(chunk), encode(chunk, *job)) for chunk in chunks)
        return
    # Forked workers have the tokenizer already; where there is no fork, they get copies.
    context = get_context("fork" if "fork" in get_all_start_methods() and os.uname().sysname == "Linux" else "spawn")
    waiting: deque = deque()  # bounds what is in memory at a time
    with ProcessPoolExecutor(workers, context, _start_worker, (job,)) as pool:
        try:
            for chunk in chunks:
                waiting.append((len(chunk), pool.submit(_work, chunk)))
                if len(waiting) > 2 * workers:
                    count, result = waiting.popleft()
                    yield count, result.result()
            for count, result in waiting:
                yield count, result.result()
        except BrokenProcessPool:
            time.sleep(0.5)  # a Ctrl-C may reach the workers first: then it shows here
            raise UserError(
                f"a process that tokenises was killed, for lack of memory? Fewer than {workers}: --dataset_num_proc"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_job: tuple = ()


def _start_worker(job: tuple) -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the workers, too: they end without a traceback each
    parent = parent_process()
    if parent is not None:  # a killed run does not leave its workers behind
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(chunk: list[tuple[int, Row]]) -> Encoded:
    return encode(chunk, *_job)


# --- reading --------------------------------------------------------------------------------------------------------


def is_whole(folder: Path) -> bool:
    """Whether a folder is there with all its files, each of its full size."""
    try:
        files = json.loads((folder / "files.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError):
        return False


def open_folder(folder: Path) -> TokenFile:
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    lengths, rows, difficulty = (np.load(folder / f"{name}.npy") for name in ("lengths", "rows", "difficulty"))
    ends = np.cumsum(lengths)
    ids, mask = np.zeros(0, facts["dtype"]), None
    if facts["tokens"]:
        ids = np.memmap(folder / "ids.bin", facts["dtype"], "r")
        mask = np.memmap(folder / "mask.bin", np.uint8, "r") if (folder / "mask.bin").exists() else None
    return TokenFile(ids, mask, ends - lengths, ends, facts["per_unit"], rows, difficulty, facts)


def cache_key(source: Source, make_units: Callable[..., Any], tokenizer: Any, settings: dict, column: str | None) -> str:
    """A hash of all that the tokens depend on: the data, the tokenizer and its template, the settings, and the code."""
    return digest([identity(source), settings, column, source_code(make_units), fingerprint(tokenizer), *versions()])


def digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def versions() -> list[str]:
    """Of the code that reads and tokenises: ours and the libraries'."""
    rooms = [hashlib.sha256(Path(room.__file__).read_bytes()).hexdigest() for room in ROOMS]
    return [*rooms, transformers.__version__, tokenizers.__version__]


def source_code(function: Callable[..., Any]) -> list[str]:
    """The code of a function, and of those of its module that it calls, directly or not."""
    found = [function]
    for f in found:  # which grows on the way
        codes = [f.__code__]
        for code in codes:
            codes += [const for const in code.co_consts if inspect.iscode(const)]  # functions and loops inside
            called = [f.__globals__.get(name) for name in code.co_names]
            found += [g for g in called if inspect.isfunction(g) and g.__module__ == f.__module__ and g not in found]
    return [inspect.getsource(f) for f in found]


def fingerprint(tokenizer: Any) -> str:
    """A hash of what a tokenizer does: its tables, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        tables = json.dumps(sorted(tokenizer.get_vocab().items()))
    else:
        backend.no_truncation()  # left behind by a call; not what it is
        backend.no_padding()
        tables = backend.to_str()
    state = [type(tokenizer).__name__, tables, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(state, default=str).encode()).hexdigest()
