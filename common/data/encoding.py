"""Encoding rows into token sequences with a script's `encode`, chunk by chunk, in several processes."""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_all_start_methods, get_context, parent_process
from typing import Any, NamedTuple

from common.args import CommonArgs
from common.data.chat import per_tokenizer
from common.data.dropped import Dropped
from common.data.fields import Field, check_sequence, fields_of, require_fields
from common.data.tokens import tokenize_documents
from common.data.types import BadRow, Example, Row, Sequence, Tokenizer, whole
from common.errors import UserError
from common.processes import TimeLimitReached, time_limit

import numpy as np

ROW_SECONDS = 30  # time limit for a row
LONGEST_WORD = 10_000_000  # characters without white space; a single call of a tokenizer cannot be interrupted
CHUNK = 200  # rows per task of a worker
Encode = Callable[[Row, Tokenizer, CommonArgs], list[Sequence] | str]


class Job(NamedTuple):
    """How rows become examples."""

    encode: Encode  # the sequences of a row, which stay together, or its text, which becomes a document; may raise BadRow
    tokenizer: Tokenizer
    args: CommonArgs
    column: str | None = None  # the column with each row's difficulty


class Encoded(NamedTuple):
    """Rows as examples: S sequences of T tokens in total, end to end."""

    ids: np.ndarray  # (T,) uint16, or uint32 if the tokenizer has larger ids
    mask: np.ndarray  # (T,) uint8: 1 where trained
    lengths: np.ndarray  # (S,) int64
    rows: np.ndarray  # (examples,) int64: the row of each example
    difficulty: np.ndarray  # (examples,) float64, NaN without a curriculum column
    layout: "Layout | None"  # of every example; None: there are none
    fields: dict[str, np.ndarray]  # further fields, (T,) or (S,) according to the layout, int64 or float32
    dropped: Dropped


class Layout(NamedTuple):
    """The properties that all examples of a dataset share."""

    per_example: int  # sequences per example
    fields: dict[str, Field]  # besides ids and mask
    where: str  # the origin of one example


def agree(layout: Layout | None, other: Layout | None) -> Layout | None:
    """The common layout of both; None: neither has one. Raises UserError, naming row and field, if they differ."""
    if layout is None or other is None:
        return layout or other
    if layout.per_example != other.per_example:
        raise UserError(
            f"{other.where}: encode gave {other.per_example} sequences; expected {layout.per_example}, as in {layout.where}:"
            " rows give the same number"
        )
    require_fields(other.fields, layout.fields, other.where, layout.where)
    return layout


def encode_rows(rows: list[tuple[int, Row]], job: Job) -> Encoded:
    """Encode numbered rows as examples. Rows that cannot be used are counted.

    Raises UserError, naming the row, if `encode` does, and for sequences that cannot be trained on.
    """
    kind = np.uint16 if _largest_id(job.tokenizer) < 2**16 else np.uint32
    made: list[tuple[int, float, str, Example | str]] = []
    dropped = Dropped()
    for number, row in rows:
        where = row.where
        try:
            if (longest := _longest_word(row)) > LONGEST_WORD:
                raise BadRow(f"a word of {longest:,} characters")
            with time_limit(ROW_SECONDS):
                example = job.encode(row, job.tokenizer, job.args)
            difficulty = float("nan") if job.column is None else number_in(row, job.column)
            if not isinstance(example, str):
                example = _checked(example, np.iinfo(kind).max)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except TimeLimitReached:
            raise UserError(
                f"{where}: this row takes more than {ROW_SECONDS} s to tokenise: a chat template that "
                "never ends, or a very long word?"
            ) from None
        except BadRow as reason:
            dropped.add(str(reason), where)
        else:
            made.append((number, difficulty, where, example))
    documents = iter(tokenize_documents([example for *_, example in made if isinstance(example, str)], job.tokenizer))
    layout, sequences = None, []
    for _, _, where, example in made:
        example = [whole(next(documents))] if isinstance(example, str) else example
        layout = agree(layout, Layout(len(example), fields_of(example[0]), where))
        for sequence in example[1:]:
            require_fields(fields_of(sequence), layout.fields, where, layout.where)
        sequences += example
    fields = {
        name: (np.concatenate if field.per_token else np.array)([sequence[name] for sequence in sequences])
        for name, field in (layout.fields.items() if layout else ())
    }
    none = [np.zeros(0, np.uint8)]
    return Encoded(
        np.concatenate([sequence["input_ids"] for sequence in sequences] or none).astype(kind),
        np.concatenate([sequence["loss_mask"] for sequence in sequences] or none).astype(np.uint8),
        np.array([len(sequence["input_ids"]) for sequence in sequences], np.int64),
        np.array([number for number, *_ in made], np.int64),
        np.array([difficulty for _, difficulty, *_ in made], np.float64),
        layout,
        fields,
        dropped,
    )


def _longest_word(value: Any) -> int:
    """Length of the longest word in those texts of a row that are longer than LONGEST_WORD characters; else 0."""
    if isinstance(value, str):
        return max(map(len, value.split()), default=0) if len(value) > LONGEST_WORD else 0
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_longest_word, values), default=0)


def _checked(example: object, largest_id: int) -> Example:
    if not isinstance(example, list | tuple) or not example:
        raise UserError(f"encode gave {type(example).__name__}; expected a list of sequences, or a text")
    return [check_sequence(sequence, largest_id) for sequence in example]


@per_tokenizer
def _largest_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab().values())  # not its size: some ids may be unused


def number_in(row: Row, column: str) -> float:
    """The number in a column. Raises UserError for a missing column, BadRow for a value that is not a number."""
    if column not in row:
        raise UserError(f"--curriculum_column {column}: no such column; found {', '.join(row)}")
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = float("nan")
    if value != value:
        raise BadRow(f"{column} is not a number")
    return value


# --- in several processes -------------------------------------------------------------------------------------------


def encode_all(rows: Iterable[tuple[int, Row]], job: Job, num_proc: int | None) -> Iterator[tuple[int, Encoded]]:
    """Yield (number of rows, their examples) in order, chunk by chunk; several processes share more than one chunk."""
    rows = iter(rows)
    chunks = iter(lambda: list(islice(rows, CHUNK)), [])
    some = list(islice(chunks, 2))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = num_proc or cores
    chunks = chain(some, chunks)
    if workers < 2 or len(some) < 2:
        yield from ((len(chunk), encode_rows(chunk, job)) for chunk in chunks)
        return
    # Forked workers already have the tokenizer; without fork, they get copies.
    context = get_context("fork" if "fork" in get_all_start_methods() and sys.platform == "linux" else "spawn")
    waiting: deque = deque()  # bounds the chunks in memory
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
            time.sleep(0.5)  # a Ctrl-C may reach the workers first: it shows here then
            raise UserError(
                f"a process that tokenises was killed, for lack of memory? Fewer than {workers}: --dataset_num_proc"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_job: Job  # a worker's job


def _start_worker(job: Job) -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the workers, too: they exit without tracebacks
    parent = parent_process()
    if parent is not None:  # a killed run must not leave its workers behind
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(chunk: list[tuple[int, Row]]) -> Encoded:
    return encode_rows(chunk, _job)
