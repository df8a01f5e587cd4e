"""Rows -> examples by a script's `encode`, chunk by chunk, in several processes; what became of each row is
counted."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
import inspect
from itertools import chain, islice
import math
from multiprocessing import get_context, parent_process
import os
import signal
import sys
import threading
from typing import Any, NamedTuple, TypeVar

from common.args import CommonArgs
from common.data.chat_template import per_tokenizer
from common.data.sharing import shared_starts
from common.data.tokens import tokenize_documents
from common.data.types import (
    RESERVED,
    BadRow,
    Example,
    Row,
    Sequence,
    Tokenizer,
    all_trained,
    may_reject,
    notes,
    valid_text,
)
from common.errors import UserError, quoted, say
from common.files import loaded_code
import numpy as np

DTYPES = {"f": np.float32, "b": np.bool_, "i": np.int64, "u": np.int64}  # of fields, by numpy's kinds
CHUNK = 200  # rows per task of a worker, at most
# A task with so many characters gets no more rows: tokenizers need 60 bytes for each.
CHUNK_CHARACTERS = 1 << 21
REASONS = 20  # distinct reasons that are kept: some contain a value of the row, so there may be very many
FEW = 0.02  # the share of rows up to which a note on them is not printed
T = TypeVar("T")
# The sequences of a row, which stay together, or its text, which becomes a document; may raise BadRow.
Encode = Callable[[Row, Tokenizer, CommonArgs], list[Sequence] | str]
Reasons = dict[str, dict[str, Any]]  # {reason: {"count", "first": origins of some rows}}


class Account:
    """What became of rows: how many were kept, why others were left out, what is noted about those that were
    kept, and which columns were read."""

    def __init__(self, facts: dict[str, Any] | None = None):
        """facts: of an earlier account, to continue."""
        facts = facts or {"rows": 0, "examples": 0, "columns": [], "dropped": {}, "noted": {}}
        self.rows = facts["rows"]
        self.examples = facts["examples"]
        self.columns = set(facts["columns"])
        self.dropped: Reasons = facts["dropped"]
        self.noted: Reasons = facts["noted"]

    def attempt(self, function: Callable[[Row], T], row: Row) -> T | None:
        """function(row); None for a row that cannot be used. An error in the function names the row."""
        self.rows += 1
        row.read = set()
        notes.clear()
        try:
            if row.problem is not None:
                raise BadRow(row.problem)
            result = function(row)
        except BadRow as reason:
            _count(self.dropped, str(reason), [row.where])
            return None
        except (UserError, OSError) as error:
            raise UserError(f"{row.where}: {error}") from None
        except Exception as error:
            error.add_note(f"in the row {row.where}")
            raise
        self.examples += 1
        self.columns |= row.read & row.keys()
        for name in row.lacks:
            _count(self.noted, f"no column {name}, which --columns would rename", [row.where])
        filled = [name for name in sorted(row.keys() - row.read) if dict.get(row, name) is not None]
        for note in notes:
            _count(self.noted, note, [row.where])
        if filled:
            _count(self.noted, f"not read: {', '.join(filled)}", [row.where])
        return result

    def merge(self, other: "Account") -> None:
        """Add the counts of later rows."""
        self.rows += other.rows
        self.examples += other.examples
        self.columns |= other.columns
        for reasons, later in ((self.dropped, other.dropped), (self.noted, other.noted)):
            for reason, tally in later.items():
                _count(reasons, reason, tally["first"], tally["count"])

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return vars(self) | {"columns": sorted(self.columns)}

    def say(self, what: str) -> None:
        """Report the rows left out, and what is noted about more than a few. Raises UserError if no row is
        kept."""
        if not self.examples:
            reasons = [f"{reason} (first: {tally['first'][0]})" for reason, tally in self.dropped.items()]
            raise UserError(f"none of the {self.rows} {what} can be used: {', '.join(reasons)}")
        for reason, tally in self.dropped.items():
            say(
                f"data: {tally['count']} of {self.rows} {what} left out: {reason} (first: {tally['first'][0]})"
            )
        for note, tally in self.noted.items():
            if tally["count"] > FEW * self.examples:
                say(f"data: {tally['count']} of {self.rows} {what}: {note} (first: {tally['first'][0]})")


def _count(reasons: Reasons, reason: str, first: list[str], count: int = 1) -> None:
    if reason not in reasons and len(reasons) >= REASONS:
        reason = "other reasons"
    tally = reasons.setdefault(reason, {"count": 0, "first": []})
    tally["count"] += count
    tally["first"] = [*tally["first"], *first][:5]


def convert(rows: Iterable[Row], function: Callable[[Row], T], what: str) -> tuple[list[T], dict[str, Any]]:
    """Apply `function` to each row; rows that it rejects (BadRow) are left out, counted and reported.

    Returns the results and the facts of their account. Raises UserError, naming the row, if the function
    does, and if no row is left.
    """
    account = Account()
    results = [account.attempt(function, row) for row in rows]
    account.say(what)
    return [result for result in results if result is not None], account.facts()


@may_reject
def number_in(row: Row, column: str) -> float:
    """The number in a column. Raises BadRow for a row without one."""
    value = float(row[column])
    if math.isnan(value):
        raise BadRow(f"{column} is not a number")
    return value


# --- what encode returns ------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """What all examples of a dataset have in common."""

    fields: dict[str, tuple[str, str]]  # a number per "token" or per "sequence", and its dtype
    where: str  # the origin of one example


def check_sequence(sequence: Any, largest_id: int = 2**63 - 1) -> Sequence:
    """A sequence as arrays of int64, float32 or bool. Raises UserError, naming the field, for ids that are
    not 0 to largest_id, a mask that is not 0 or 1 for each of them, and other fields that are not finite
    numbers, one or one for each token."""
    if not isinstance(sequence, dict) or not {"input_ids", "loss_mask"} <= sequence.keys():
        raise UserError(
            f"found {quoted(sequence, 60)}; expected a sequence {{input_ids, loss_mask, ...}}, or a text"
        )
    n, checked = np.size(sequence["input_ids"]), {}
    for name in sorted(sequence):
        if name in RESERVED:
            raise UserError(f"the field {name} has the name of one that every batch has: rename it")
        try:
            array = np.asarray(sequence[name])
        # lists of different lengths, a tensor that numpy does not take
        except (ValueError, TypeError, RuntimeError):
            array = np.asarray(None)
        is_valid = _is_valid(name, array, n, largest_id)
        if is_valid:
            dtype = np.int64 if name == "loss_mask" else DTYPES[array.dtype.kind]
            with np.errstate(over="ignore"):
                checked[name] = array.astype(dtype)
        if not is_valid or not np.isfinite(checked[name]).all():
            raise UserError(
                f"the field {name} is {quoted(sequence[name], 60)}; expected finite numbers, one or one for each of {n} "
                f"tokens; input_ids of 0 to {largest_id}, a loss_mask of 0 and 1"
            )
    return checked


def _is_valid(name: str, array: np.ndarray, n: int, largest_id: int) -> bool:
    """Whether a field of n tokens has the kind, the shape and the range that it may have."""
    if name == "input_ids":
        if array.dtype.kind not in "ui" or array.shape != (n,) or n == 0:
            return False
        return array.min() >= 0 and array.max() <= largest_id
    if name == "loss_mask":
        return array.shape == (n,) and ((array == 0) | (array == 1)).all()
    return array.dtype.kind in DTYPES and array.shape in ((n,), ())


def layout_of(example: Example, where: str) -> Layout | None:
    """The layout of checked sequences; None: there are none. Raises UserError, naming the field, if they
    differ."""
    layout = None
    for sequence in example:
        fields = {}
        for name, array in sequence.items():
            fields[name] = ("token" if array.ndim else "sequence", str(array.dtype))
        layout = agree(layout, Layout(fields, where))
    return layout


def agree(layout: Layout | None, other: Layout | None) -> Layout | None:
    """The common layout of both; None: neither has one. Raises UserError, naming the row, if they differ."""
    if layout is None or other is None:
        return layout or other
    if layout.fields != other.fields:
        raise UserError(
            f"{other.where}: sequences with fields {other.fields}; expected, as in {layout.where}, {layout.fields}"
        )
    return layout


# --- chunks of rows -----------------------------------------------------------------------------------------


class Job(NamedTuple):
    """How rows become examples."""

    encode: Encode
    tokenizer: Tokenizer
    args: CommonArgs
    key: str = ""  # a hash of everything that encode depends on, besides rows and arguments (cache.py)
    column: str | None = None  # the column with each row's difficulty, or "length"


class Encoded(NamedTuple):
    """Rows as examples: S sequences of T tokens in total, end to end."""

    lengths: np.ndarray  # (S,) int64
    counts: np.ndarray  # (examples,) int64: sequences of each example
    sizes: np.ndarray  # (examples,) int64: tokens of each example in a row, where shared prefixes are once
    rows: np.ndarray  # (examples,) int64: the row of each example
    difficulty: np.ndarray  # (examples,) float64, NaN without a curriculum column
    layout: Layout | None  # of every example; None: there are none
    # (T,) or (S,) by the layout: input_ids uint16 (uint32 for large vocabularies), loss_mask uint8 (1 where
    # trained), others int64, float32 or bool; none without examples
    fields: dict[str, np.ndarray]
    account: Account
    read: set[str]  # names of the arguments that encode read
    code: dict[str, str]  # {path: hash} of the user's code, if something was imported meanwhile


def recorded(args: CommonArgs, read: set[str]) -> CommonArgs:
    """The same arguments; the name of each one that is looked at is added to `read`."""
    names = set(vars(args))

    class Recorded(type(args)):
        def __getattribute__(self, name: str) -> Any:
            if name in ("__dict__", "__getstate__"):
                read.update(names)
            elif name in names:
                read.add(name)
            return super().__getattribute__(name)

    copied = Recorded.__new__(Recorded)
    object.__getattribute__(copied, "__dict__").update(vars(args))
    return copied


def encode_rows(rows: list[tuple[int, Row]], job: Job) -> Encoded:
    """Encode numbered rows as examples. Rows that cannot be used are counted.

    Raises UserError, naming the row, if `encode` does, and for sequences that cannot be trained on.
    """
    id_dtype = np.uint16 if _largest_id(job.tokenizer) < 2**16 else np.uint32
    account = Account()
    read = set()
    num_modules = len(sys.modules)
    args = recorded(job.args, read)

    def encode(row: Row) -> tuple[Example | str, str, float]:
        example = job.encode(row, job.tokenizer, args)
        difficulty = math.nan if job.column in (None, "length") else number_in(row, job.column)
        if isinstance(example, str):
            example = valid_text(example)
        elif isinstance(example, list | tuple) and example:
            example = [check_sequence(sequence, np.iinfo(id_dtype).max) for sequence in example]
        else:
            raise UserError(f"encode gave {quoted(example, 60)}; expected a list of sequences, or a text")
        return example, row.where, difficulty

    results, numbers = [], []  # of the rows that are kept
    for number, row in rows:
        result = account.attempt(encode, row)
        if result is not None:
            results.append(result)
            numbers.append(number)
    texts = [example for example, *_ in results if isinstance(example, str)]
    documents = iter(tokenize_documents(texts, job.tokenizer))
    layout = None
    sequences = []
    lengths = []
    counts = []
    sizes = []
    difficulties = []
    for example, where, difficulty in results:
        if isinstance(example, str):
            example = [all_trained(next(documents))]
        layout = agree(layout, layout_of(example, where))
        own_lengths = [len(sequence["input_ids"]) for sequence in example]
        size = sum(own_lengths) - sum(shared_starts(example))
        sequences += example
        lengths += own_lengths
        counts.append(len(example))
        sizes.append(size)
        difficulties.append(size if job.column == "length" else difficulty)
    fields = {}
    for name, (_, dtype) in layout.fields.items() if layout else ():
        dtype = {"input_ids": id_dtype, "loss_mask": np.uint8}.get(name, dtype)
        values = [sequence[name] for sequence in sequences]
        fields[name] = np.hstack(values).astype(dtype)  # arrays or numbers
    code = {}
    if len(sys.modules) != num_modules:
        code = loaded_code(inspect.getsourcefile(job.encode))
    return Encoded(
        lengths=np.array(lengths, np.int64),
        counts=np.array(counts, np.int64),
        sizes=np.array(sizes, np.int64),
        rows=np.array(numbers, np.int64),
        difficulty=np.array(difficulties, np.float64),
        layout=layout,
        fields=fields,
        account=account,
        read=read,
        code=code,
    )


@per_tokenizer
def _largest_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab().values())  # not its size: some ids may be unused


def encode_all(
    rows: Iterable[tuple[int, Row]], job: Job, num_proc: int | None
) -> Iterator[tuple[int, Encoded]]:
    """Yield (number of rows, their examples) in order, chunk by chunk; several processes share more than one
    chunk.

    Not multiprocessing.Pool: it waits forever for a worker that was killed.
    """
    chunks = _chunks(rows)
    first = list(islice(chunks, 2))
    chunks = chain(first, chunks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = num_proc or cores
    if workers < 2 or len(first) < 2:
        for chunk in chunks:
            yield len(chunk), encode_rows(chunk, job)
        return
    # forked workers already have the tokenizer
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    waiting = deque()  # bounds the chunks in memory
    pool = ProcessPoolExecutor(workers, context, _start_worker, (job,))
    try:
        for chunk in chunks:
            waiting.append((len(chunk), pool.submit(_work, chunk)))
            if len(waiting) > 2 * workers:
                count, result = waiting.popleft()
                yield count, result.result()
        for count, result in waiting:
            yield count, result.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _chunks(rows: Iterable[tuple[int, Row]]) -> Iterator[list[tuple[int, Row]]]:
    chunk = []
    size = 0
    for number, row in rows:
        chunk.append((number, row))
        for value in dict.values(row):
            size += len(value) if isinstance(value, str) else 0
        if len(chunk) == CHUNK or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


_job: Job  # a worker's job


def _start_worker(job: Job) -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the workers, too: they end with the run
    parent = parent_process()
    if parent is not None:  # a killed run must not leave its workers behind
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(chunk: list[tuple[int, Row]]) -> Encoded:
    return encode_rows(chunk, _job)
