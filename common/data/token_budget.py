"""--max_tokens_per_batch: micro-batches that are filled by tokens, and cost about the same on each
process."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
import heapq
from typing import Any

from common.errors import UserError
import numpy as np


class Budget:
    """Which examples each window of a run has; a window has `parts` micro-batches of up to max_tokens
    tokens. A longer example (a chat in several contexts may be one) has a micro-batch of its own."""

    def __init__(self, train: Any, parts: int, max_tokens: int, end: int | None):
        """train: see Windows; train.size(position) is read. end: the position at which the run ends; None:
        never."""
        self.train = train
        self.parts = parts
        self.max_tokens = max_tokens
        self.end = end
        self._borders = {0: 0}  # step -> position, as far as known

    def __len__(self) -> int:
        """The windows up to the end."""
        last = max(self._borders)
        while self.start(last) < self.end:
            last += 1
        return last

    def start(self, step: int) -> int:
        """The position at which a window starts."""
        first = step
        while first not in self._borders:
            first -= 1
        for earlier in range(first, step):
            self._borders[earlier + 1] = self._fill(self._borders[earlier])
        return self._borders[step]

    def restore(self, step: int, position: int) -> None:
        """A window starts at this position, whatever came before it."""
        self._borders = {0: 0, step: position}

    def dealt(self, step: int) -> list[list[int]]:
        """The examples of each micro-batch of a window."""
        positions = range(self.start(step), self.start(step + 1))
        return balance([self.train.size(position) for position in positions], self.parts, self.max_tokens)

    def _fill(self, position: int) -> int:
        """The end of the window that starts at a position: no micro-batch has room for the next example."""
        loads = [0] * self.parts  # a heap
        while self.end is None or position < self.end:
            size = self.train.size(position)
            if loads[0] + size > max(size, self.max_tokens):
                break
            heapq.heapreplace(loads, loads[0] + size)
            position += 1
        return position


def balance(sizes: SequenceOf[int], parts: int, max_tokens: int) -> list[list[int]]:
    """Distribute examples of these sizes (in tokens) over micro-batches of at most max_tokens and about equal
    cost. A longer example is alone in its micro-batch.

    Largest first, each to the cheapest micro-batch with room. Micro-batches are ordered by cost, so that
    processes work on equal ones at the same time. Returns the indices of the examples in each part.
    """
    # The cost of attention in a sequence of n tokens relative to everything else: n / 12 D, here for D =
    # 1024.
    costs = [size + size * size / 12288 for size in sizes]
    dearest_first = sorted(range(len(sizes)), key=lambda i: -costs[i])
    members = _distribute(dearest_first, sizes, costs, parts, max_tokens)
    # Largest first did not fit. `_fill` placed them in their order, each in the emptiest micro-batch: so this fits.
    if members is None:
        members = _distribute(range(len(sizes)), sizes, sizes, parts, max_tokens)
    if members is None:
        raise UserError(
            f"--max_tokens_per_batch {max_tokens}: {sum(sizes)} tokens do not fit in {parts} micro-batches"
        )
    return members


def _distribute(
    order: Iterable[int], sizes: SequenceOf[int], costs: SequenceOf[float], parts: int, max_tokens: int
) -> list[list[int]] | None:
    """The examples of each part, the dearest part first: each example, in this order, in the cheapest part
    with room. None: one has no room."""
    members = [[] for _ in range(parts)]
    loads, totals = np.zeros(parts, np.int64), np.zeros(parts)
    for i in order:
        has_room = loads + sizes[i] <= max(sizes[i], max_tokens)
        if not has_room.any():
            return None
        k = int(np.where(has_room, totals, np.inf).argmin())
        members[k].append(i)
        loads[k] += sizes[i]
        totals[k] += costs[i]
    return [sorted(members[k]) for k in np.argsort(-totals, kind="stable")]
