"""Examples in memory-mapped files: the form of a tokenised source."""

from bisect import bisect_right
from typing import Any, NamedTuple

from common.data.dropped import Dropped
from common.data.fields import Field, as_field, require_fields
from common.data.sources import Source
from common.data.types import Example, Sequence, whole
from common.errors import UserError

import numpy as np


class TokenFile(NamedTuple):
    """A tokenised source: S sequences of T tokens in total, end to end; memory-mapped if it comes from the cache."""

    ids: np.ndarray  # (T,) uint16 or uint32
    mask: np.ndarray | None  # (T,) uint8; None: all are trained
    starts: np.ndarray  # (S,) int64: offset of each sequence in the T tokens
    ends: np.ndarray  # (S,) int64
    per_example: int  # sequences per example
    rows: np.ndarray  # (examples,) int64: the row of each example
    difficulty: np.ndarray  # (examples,) float64, NaN without a curriculum column
    facts: dict[str, Any]
    per_token: dict[str, np.ndarray] = {}  # further fields, (T,) int64 or float32
    per_sequence: dict[str, np.ndarray] = {}  # further fields, (S,) int64 or float32

    def fields(self) -> dict[str, Field]:
        return {name: Field(True, str(values.dtype)) for name, values in self.per_token.items()} | {
            name: Field(False, str(values.dtype)) for name, values in self.per_sequence.items()
        }


class Examples:
    """The examples of several sources, one source after another. Indexing reads from the memory-mapped files."""

    def __init__(self, files: list[TokenFile], sources: list[Source]):
        """Raises UserError if the sources have different fields."""
        self.files, self.sources = files, sources
        self.counts = [len(file.starts) // file.per_example for file in files]  # examples of each source
        self._firsts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64).tolist()
        sizes = [(file.ends - file.starts).reshape(-1, file.per_example) for file in files]
        self.lengths = np.concatenate([size.sum(1) for size in sizes] or [np.zeros(0, np.int64)])  # (examples,) tokens
        self.longest = max((int(size.max()) for size in sizes if size.size), default=0)  # tokens of the longest sequence
        self.difficulty: np.ndarray | None = None  # (examples,), for a curriculum
        filled = [s for s, count in enumerate(self.counts) if count]
        for s in filled[1:]:
            first = filled[0]
            require_fields(files[s].fields(), files[first].fields(), sources[s].path, sources[first].path)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        s = bisect_right(self._firsts, index) - 1
        file = self.files[s]
        first = (index - self._firsts[s]) * file.per_example
        return [_sequence(file, i) for i in range(first, first + file.per_example)]

    def where(self, index: int) -> str:
        """The source and row of an example."""
        s = bisect_right(self._firsts, index) - 1
        return f"{self.sources[s].path} row {int(self.files[s].rows[index - self._firsts[s]]) + 1}"

    def add_field(self, name: str, values: np.ndarray) -> None:
        """Add a number for every sequence, (sequences,) over all sources, as the per-sequence field `name`."""
        numbers = as_field(name, values)
        borders = np.cumsum([len(file.starts) for file in self.files])[:-1]
        parts = np.split(numbers, borders)
        self.files = [
            file._replace(per_sequence=file.per_sequence | {name: part})
            for file, part in zip(self.files, parts, strict=True)
        ]

    def of_source(self, s: int) -> "Examples":
        """The examples of one source."""
        part = Examples([self.files[s]], [self.sources[s]])
        if self.difficulty is not None:
            part.difficulty = self.difficulty[self._firsts[s] : self._firsts[s + 1]]
        return part

    def digests(self) -> dict[str, str]:
        """{label: a hash of all data from that source}."""
        return {source.label: file.facts["digest"] for source, file in zip(self.sources, self.files, strict=True)}

    def facts(self) -> list[dict[str, Any]]:
        """For each source: its description, rows, examples, tokens, and what was left out and why."""
        described = []
        for source, file in zip(self.sources, self.files, strict=True):
            found = source.facts() | {"dropped": Dropped(file.facts["dropped"]).facts()}
            described.append(found | {name: file.facts[name] for name in ("rows", "examples", "tokens", "trained_tokens")})
        return described


def _sequence(file: TokenFile, i: int) -> Sequence:
    span = slice(file.starts[i], file.ends[i])
    ids = file.ids[span]
    sequence = whole(ids) if file.mask is None else {"input_ids": ids, "loss_mask": file.mask[span]}
    sequence |= {name: values[span] for name, values in file.per_token.items()}
    return sequence | {name: values[i].item() for name, values in file.per_sequence.items()}


def chunk_examples(examples: Examples, max_length: int, across: bool) -> Examples:
    """Documents as examples of one sequence of at most max_length tokens.

    across: cut each source as one long stream, across document boundaries; otherwise cut each document separately. A
    remainder of one token, which has nothing to predict, is left out. A piece has the difficulty and the per-sequence fields
    of the document in which it starts. Raises UserError for examples of several sequences.
    """
    files, difficulty = [], []
    for s, file in enumerate(examples.files):
        if file.per_example > 1:
            raise UserError(f"{examples.sources[s].path}: examples of {file.per_example} sequences are not cut into chunks")
        starts, ends = (file.starts[:1], file.ends[-1:]) if across else (file.starts, file.ends)
        pieces = -(-(ends - starts) // max_length)  # pieces per document
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = np.repeat(starts, pieces) + within * max_length
        end = np.minimum(begin + max_length, np.repeat(ends, pieces))
        kept = end - begin > 1
        begin, end = begin[kept], end[kept]
        of = np.searchsorted(file.ends, begin, side="right")  # the document in which a piece starts
        numbers = {name: values[of] for name, values in file.per_sequence.items()}
        cut = {"starts": begin, "ends": end, "rows": file.rows[of], "difficulty": file.difficulty[of]}
        files.append(file._replace(**cut, per_sequence=numbers))
        if examples.difficulty is not None:
            difficulty.append(examples.difficulty[sum(examples.counts[:s]) + of])
    chunks = Examples(files, examples.sources)
    chunks.difficulty = None if examples.difficulty is None else np.concatenate(difficulty)
    return chunks
