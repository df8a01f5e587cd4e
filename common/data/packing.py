"""Grouping examples: best-fit packing into rows, cutting into rows, and distribution over micro-batches."""

import bisect
import heapq
from collections.abc import Sequence as SequenceOf
from typing import Any

from common.data.examples import Examples, chunk_examples
from common.data.order import BANDS, Shuffled
from common.data.sources import Source
from common.data.stream import Stream
from common.data.types import Example
from common.errors import UserError

import numpy as np


def pack(data: Shuffled | Stream | Examples, max_length: int) -> "Shuffled | Stream | Packs":
    """The same kind of data, with each example made of several of the original ones: at most max_length tokens together.

    No example is split, each is in exactly one pack, and each pack is from one source. In a curriculum only examples of
    similar difficulty share a pack. A stream is packed block by block. Raises UserError for an example of more than
    max_length tokens.
    """
    if isinstance(data, Shuffled | Stream):
        return data.apply(lambda examples: pack(examples, max_length))
    bands = 1 if data.difficulty is None else BANDS
    members, counts, first = [], [], 0
    for count in data.counts:
        these = np.arange(first, first + count)
        if data.difficulty is not None:
            these = these[np.argsort(data.difficulty[these], kind="stable")]
        before = len(members)
        for part in np.array_split(these, bands):
            members += [part[chosen] for chosen in best_fit(data.lengths[part], max_length)]
        counts.append(len(members) - before)
        first += count
    return Packs(data, members, counts, max_length)


def chunk(data: Shuffled | Stream | Examples, max_length: int, across: bool = True) -> Shuffled | Stream | Examples:
    """The same kind of data, with documents cut into rows of at most max_length tokens: see chunk_examples."""
    if isinstance(data, Shuffled | Stream):
        return data.apply(lambda examples: chunk(examples, max_length, across))
    return chunk_examples(data, max_length, across)


class Packs:
    """Packed Examples: `packs[i]` holds the sequences of several examples."""

    def __init__(self, examples: Examples, members: list[np.ndarray], counts: list[int], max_length: int):
        """members: the examples in each pack. counts: packs per source."""
        self.examples, self.members, self.counts, self.max_length = examples, members, counts, max_length
        self.sources: list[Source] = examples.sources
        self.longest: int = examples.longest  # tokens of the longest sequence
        self.lengths = np.array([examples.lengths[pack].sum() for pack in members], np.int64)  # (packs,)
        self.difficulty = examples.difficulty
        if self.difficulty is not None:
            self.difficulty = np.array([examples.difficulty[pack].mean() for pack in members])

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, i: int) -> Example:
        return [sequence for j in self.members[i] for sequence in self.examples[int(j)]]

    def where(self, i: int) -> str:
        """The source and row of each example in a pack."""
        return ", ".join(self.examples.where(int(j)) for j in self.members[i])

    def of_source(self, s: int) -> "Packs":
        """The packs of one source."""
        first = sum(self.counts[:s])
        return Packs(self.examples, self.members[first : first + self.counts[s]], [self.counts[s]], self.max_length)

    def facts(self) -> list[dict[str, Any]]:
        """See Examples.facts, for the examples before packing."""
        return self.examples.facts()

    @property
    def utilisation(self) -> float:
        """The filled share of the packs' capacity."""
        return float(self.lengths.sum() / max(1, len(self) * self.max_length))


def best_fit(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: the indices of the examples in each pack. O(N log N).

    lengths: (N,) tokens. Raises UserError for an example longer than max_length.
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free room -> packs with that much
    rooms: list[int] = []  # the keys of by_room, sorted
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        if length > max_length:
            raise UserError(f"--max_length {max_length}: an example of {length} tokens does not fit in a pack")
        at = bisect.bisect_left(rooms, length)  # the smallest room in which it fits
        if at == len(rooms):
            packs.append([i])
            chosen, room = len(packs) - 1, max_length - length
        else:
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
            packs[chosen].append(i)
            room -= length
        if room not in by_room:
            by_room[room] = []
            bisect.insort(rooms, room)
        by_room[room].append(chosen)
    return packs


def balance(sizes: SequenceOf[int], parts: int, max_tokens: int) -> list[list[int]]:
    """Distribute examples of these sizes (in tokens) over micro-batches of at most max_tokens and about equal cost.

    Largest first, each to the cheapest micro-batch with room. Micro-batches are ordered by cost, so that processes work on
    equal ones at the same time. Returns the indices of the examples in each part.
    """
    # The cost of attention in a sequence of n tokens relative to everything else: n / 12 D, here for D = 1024.
    costs = [size + size * size / 12288 for size in sizes]
    dearest_first = sorted(range(len(sizes)), key=lambda i: -costs[i])
    # If that finds no room: in order, each to the emptiest one, which is how `Windows` made sure that they fit.
    for order, by in ((dearest_first, costs), (range(len(sizes)), sizes)):
        members: list[list[int]] = [[] for _ in range(parts)]
        loads = [0] * parts
        cheapest = [(0.0, k) for k in range(parts)]  # a heap
        for i in order:
            full = []  # cheaper ones without room: few, as cheap ones are mostly empty
            while cheapest and loads[cheapest[0][1]] + sizes[i] > max_tokens:
                full.append(heapq.heappop(cheapest))
            if not cheapest:
                break
            total, k = cheapest[0]
            heapq.heapreplace(cheapest, (total + by[i], k))
            members[k].append(i)
            loads[k] += sizes[i]
            for one in full:
                heapq.heappush(cheapest, one)
        else:
            totals = {k: total for total, k in cheapest}
            return [sorted(members[k]) for k in sorted(range(parts), key=lambda k: -totals[k])]
    raise UserError(f"--max_tokens_per_batch {max_tokens}: {sum(sizes)} tokens do not fit in {parts} micro-batches")
