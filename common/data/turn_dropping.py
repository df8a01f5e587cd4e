"""--turn_dropping: chats that end after one of their earlier answers."""

from collections.abc import Callable

from common.data.examples import Examples
from common.data.order import Shuffled
from common.data.types import Example, Sequence
from common.errors import UserError
import numpy as np


class ShortChats(Shuffled):
    """Training data in which each chat ends after one of its earlier answers with some probability. The
    choice is a function of (seed, epoch, example)."""

    def __init__(self, train: Shuffled, probability: float):
        """Raises UserError for a stream."""
        if not isinstance(train, Shuffled):
            raise UserError("--dataset_streaming: no --turn_dropping: it needs all rows at hand")
        super().__init__(train.examples, train.order, train.data)
        self.probability = probability

    def apply(self, function: Callable[[Examples], Examples]) -> "ShortChats":
        return ShortChats(super().apply(function), self.probability)

    def __getitem__(self, position: int) -> Example:
        rng = np.random.default_rng((self.order.seed, position // len(self), self.order[position]))
        return [shorten(sequence, self.probability, rng) for sequence in super().__getitem__(position)]


def shorten(sequence: Sequence, probability: float, rng: np.random.Generator) -> Sequence:
    """With the given probability, truncate the sequence after a random trained turn other than its last."""
    wanted, which = rng.random(2)
    mask = sequence["loss_mask"].astype(np.int8)
    steps = np.diff(mask)
    ends, starts = np.flatnonzero(steps < 0) + 1, np.flatnonzero(steps > 0) + 1
    earlier = ends[ends <= starts[-1]] if len(starts) else ends[:0]
    if wanted >= probability or not len(earlier):
        return sequence
    end = earlier[int(which * len(earlier))]
    return {name: value[:end] if np.ndim(value) else value for name, value in sequence.items()}
