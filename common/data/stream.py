"""Streaming: units of sources that are read while training, for data that fits neither on the disk nor in memory.

The rows are read in blocks. A block is a pure function of the place in each source at which it starts: its rows are
tokenised, packed and shuffled among themselves. So `stream[position]` is a function of (seed, position) like any other
order, and the places of a block are all that a checkpoint needs to go on there without reading from the start.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from common.collators import Unit
from common.data.cache import Encoded, encode_all
from common.data.examples import TokenFile, Units
from common.data.order import shares
from common.data.sources import Dropped, Place, Row, Source, read_rows
from common.errors import UserError, say

import numpy as np


class Block(NamedTuple):
    number: int
    first: int  # the position of its first unit
    places: list[Place | None]  # where its rows start in each source; None: at the beginning
    after: list[Place | None]  # where they end
    data: Units
    units: Any  # the data, arranged
    order: np.ndarray


class Stream:
    """`stream[position]`: the unit at a position of the run. Positions are asked for in order, or nearly."""

    def __init__(
        self,
        sources: list[Source],
        job: tuple,
        arrange: Callable[[Units], Any],
        seed: int,
        *,
        block_rows: int,
        num_proc: int = 1,
        strict: bool = False,
    ):
        """job: see cache.encode. arrange: packs or cuts the units of a block. block_rows: rows of a block, all sources
        together, in proportion to their weights (equal ones where they have none). A source that ends starts again."""
        self.sources, self.arrange, self.seed, self.strict, self.num_proc = sources, arrange, seed, strict, num_proc
        self.jobs = [(job[0], job[1], job[2] | {"dataset_format": source.format}, job[3]) for source in sources]
        self.quotas = shares([source.weight or 1.0 for source in sources], block_rows)
        self.dropped = [Dropped() for _ in sources]
        self.rows = [0 for _ in sources]
        self.longest = job[2].get("max_length", 0)  # tokens that a sequence may have
        self.blocks: list[Block] = []  # the last two that were read
        self._next: tuple[int, int, list[Place | None]] = (0, 0, [None for _ in sources])  # number, first, places
        self._known = [self._next]  # the same of all blocks so far, to go back to
        self._readers: list[Iterator[tuple[Row, Place]] | None] = [None for _ in sources]

    def __getitem__(self, position: int) -> Unit:
        block = self._block(position)
        return block.units[int(block.order[position - block.first])]

    def where(self, position: int) -> str:
        """The source of the unit at a position, and its row in the block."""
        block = self._block(position)
        return f"block {block.number}, {block.units.where(int(block.order[position - block.first]))}"

    def size(self, position: int) -> int:
        """Tokens of the unit at a position."""
        block = self._block(position)
        return int(block.units.lengths[block.order[position - block.first]])

    @property
    def units(self) -> Any:
        """The units that were read last, for a look at them; at first, those of the first block."""
        return (self.blocks or [self._block(self._next[1])])[-1].units

    @property
    def data(self) -> Units:
        """The same before they were packed or cut."""
        return (self.blocks or [self._block(self._next[1])])[-1].data

    def state(self, position: int) -> dict[str, Any]:
        """Where to go on at a position: the start of its block."""
        number, first, places = self._start(position)
        return {"number": number, "first": first, "places": places}

    def restore(self, state: dict[str, Any]) -> None:
        self.blocks, self._readers = [], [None for _ in self.sources]
        self._next = (state["number"], state["first"], state["places"])
        self._known = [self._next]

    def _start(self, position: int) -> tuple[int, int, list[Place | None]]:
        """The last known beginning of a block that does not lie behind a position."""
        if position < self._known[0][1]:
            raise IndexError(f"position {position} of a stream that goes on at {self._known[0][1]}")
        return self._known[bisect_right(self._known, position, key=lambda known: known[1]) - 1]

    def _block(self, position: int) -> Block:
        if position < (self.blocks[0].first if self.blocks else self._next[1]):  # back, further than what is held
            self.blocks, self._readers = [], [None for _ in self.sources]
            self._next = self._start(position)
        while position >= self._next[1]:
            self.blocks = [*self.blocks[-1:], self._read(*self._next)]
            self._next = (self.blocks[-1].number + 1, self._next[1] + len(self.blocks[-1].order), self.blocks[-1].after)
            if self._next[1] > self._known[-1][1]:
                self._known.append(self._next)
        return next(block for block in reversed(self.blocks) if block.first <= position)

    def _read(self, number: int, first: int, places: list[Place | None]) -> Block:
        after, files = list(places), []
        for s, quota in enumerate(self.quotas):
            rows, after[s] = self._rows(s, quota, places[s])
            encoded = [part for _, part in encode_all(enumerate(rows), self.jobs[s], self.num_proc)]
            files.append(self._file(s, len(rows), encoded, new=number == self._known[-1][0]))
        data = Units(files, self.sources)
        units = self.arrange(data)
        if not len(units):
            raise UserError(f"--dataset_streaming: no row can be used among {sum(self.quotas)} in succession")
        order = np.random.default_rng((self.seed, number)).permutation(len(units))
        return Block(number, first, places, after, data, units, order)

    def _rows(self, s: int, quota: int, place: Place | None) -> tuple[list[Row], Place | None]:
        """The next rows of a source, from its beginning again where it ends."""
        rows: list[Row] = []
        if self._readers[s] is None:
            self._readers[s] = read_rows(self.sources[s], place)
        while len(rows) < quota:
            found = next(self._readers[s], None)
            if found is None:
                if place is None:
                    raise UserError(f"{self.sources[s].path}: no rows any more")
                place, self._readers[s] = None, read_rows(self.sources[s])
            else:
                rows.append(found[0])
                place = found[1]
        return rows, place

    def _file(self, s: int, count: int, encoded: list[Encoded], new: bool) -> TokenFile:
        """A block's part of a source; what is left out for a reason that is new is said. new: not read before."""
        known = set(self.dropped[s].reasons)
        if new:
            for part in encoded:
                self.dropped[s].merge(part.dropped)
            self.rows[s] += count
        for reason, found in self.dropped[s].reasons.items():
            if self.strict:
                raise UserError(f"{found['first'][0]}: {reason} (--strict_data)")
            if reason not in known:
                say(f"data: rows of {self.sources[s].label} left out: {reason} (first: {found['first'][0]})")
        lengths, rows, difficulty = (np.concatenate([part[i] for part in encoded]) for i in (2, 4, 5))
        ends = np.cumsum(lengths)
        ids, mask = (np.concatenate([part[i] for part in encoded]) for i in (0, 1))
        facts = {
            "rows": self.rows[s],
            "units": len(rows),
            "tokens": len(ids),
            "trained_tokens": int(mask.sum(dtype=np.int64)),
            "dropped": self.dropped[s].facts(),
        }
        per_unit = max(part.per_unit for part in encoded)
        return TokenFile(ids, mask, ends - lengths, ends, per_unit, rows, difficulty, facts)
