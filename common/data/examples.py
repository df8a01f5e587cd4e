"""Units in memory-mapped files: what a source is once it is tokenised."""

from bisect import bisect_right
from typing import Any, NamedTuple

from common.collators import Unit, whole
from common.data.sources import Dropped, Source

import numpy as np


class TokenFile(NamedTuple):
    """A tokenised source, memory-mapped."""

    ids: np.ndarray  # (T,) uint16 or uint32
    mask: np.ndarray | None  # (T,) uint8; None: all are trained
    starts: np.ndarray  # (sequences,) int64
    ends: np.ndarray  # (sequences,) int64
    per_unit: int
    rows: np.ndarray
    difficulty: np.ndarray
    facts: dict[str, Any]


class Units:
    """The units of several sources, one source after the other. Indexing reads from the memory-mapped files."""

    def __init__(self, files: list[TokenFile], sources: list[Source]):
        self.files, self.sources = files, sources
        self.counts = [len(file.starts) // file.per_unit for file in files]
        self._firsts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64).tolist()
        sizes = [(file.ends - file.starts).reshape(-1, file.per_unit) for file in files]
        self.lengths = np.concatenate([size.sum(1) for size in sizes] or [np.zeros(0, np.int64)])  # (units,)
        self.longest = max((int(size.max()) for size in sizes if size.size), default=0)  # tokens of a sequence
        self.difficulty: np.ndarray | None = None  # (units,), for a curriculum
        self.fields: dict[str, list[np.ndarray]] = {}  # name -> for each source, a number for each sequence

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Unit:
        if not 0 <= index < len(self):
            raise IndexError(index)
        s = bisect_right(self._firsts, index) - 1
        file = self.files[s]
        first = (index - self._firsts[s]) * file.per_unit
        unit = []
        for i in range(first, first + file.per_unit):
            ids = file.ids[file.starts[i] : file.ends[i]]
            sequence = (
                whole(ids)
                if file.mask is None
                else {"input_ids": ids, "loss_mask": file.mask[file.starts[i] : file.ends[i]]}
            )
            unit.append(sequence | {name: values[s][i] for name, values in self.fields.items()})
        return unit

    def where(self, index: int) -> str:
        """The source and row that a unit comes from."""
        s = bisect_right(self._firsts, index) - 1
        return f"{self.sources[s].path} row {int(self.files[s].rows[index - self._firsts[s]]) + 1}"

    def add_field(self, name: str, values: np.ndarray) -> None:
        """Give every sequence a number, (sequences,) over all sources, as the per-sequence field `name`."""
        borders = np.cumsum([len(file.starts) for file in self.files])[:-1]
        self.fields[name] = np.split(values, borders)

    def of_source(self, s: int) -> "Units":
        part = Units([self.files[s]], [self.sources[s]])
        if self.difficulty is not None:
            part.difficulty = self.difficulty[self._firsts[s] : self._firsts[s + 1]]
        part.fields = {name: [values[s]] for name, values in self.fields.items()}
        return part

    def facts(self) -> list[dict[str, Any]]:
        """Of each source: what it is, rows, units, tokens, what was left out and why."""
        described = []
        for source, file in zip(self.sources, self.files, strict=True):
            found = {"source": source.label, "path": source.path, "split": source.split, "format": source.format}
            found |= {"weight": source.weight, "dropped": Dropped(file.facts["dropped"]).facts()}
            described.append(found | {name: file.facts[name] for name in ("rows", "units", "tokens", "trained_tokens")})
        return described

    def cut(self, max_length: int, across: bool) -> "Units":
        """Whole documents as sequences of at most max_length tokens: across their borders, as one long stream, or each by
        itself. A rest of one token, which has nothing to predict, is left out. A piece is as difficult as the document in
        which it begins."""
        files, difficulty = [], []
        for s, file in enumerate(self.files):
            starts, ends = (file.starts[:1], file.ends[-1:]) if across else (file.starts, file.ends)
            pieces = -(-(ends - starts) // max_length)  # of each document
            within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            begin = np.repeat(starts, pieces) + within * max_length
            end = np.minimum(begin + max_length, np.repeat(ends, pieces))
            kept = end - begin > 1
            begin, end = begin[kept], end[kept]
            of = np.searchsorted(file.ends, begin, side="right")  # the document in which a piece begins
            files.append(file._replace(starts=begin, ends=end, rows=file.rows[of], difficulty=file.difficulty[of]))
            if self.difficulty is not None:
                difficulty.append(self.difficulty[self._firsts[s] + of])
        cut = Units(files, self.sources)
        cut.difficulty = None if self.difficulty is None else np.concatenate(difficulty)
        return cut
