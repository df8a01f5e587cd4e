"""--turn_dropping: chats that end after one of their earlier answers."""

from collections.abc import Callable

from common.data.examples import Examples
from common.data.order import Shuffled
from common.data.types import Example
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
        sequences = []
        for chat in self.examples.chats(self.order[position]):
            sequences += shorten(chat, self.probability, rng)
        return sequences


def shorten(chat: Example, probability: float, rng: np.random.Generator) -> Example:
    """With the given probability, end the chat (its sequences in order, see tokens.tokenize_messages) after a
    random trained turn other than its last."""
    wanted, which = rng.random(2)
    turns: list[tuple[int, int]] = []  # the sequence of each trained turn, and its end there
    for s, sequence in enumerate(chat):
        mask = np.append(sequence["loss_mask"].astype(np.int8), 0)
        for end in np.flatnonzero(np.diff(mask) < 0) + 1:
            turns.append((s, int(end)))
    if wanted >= probability or len(turns) < 2:
        return chat
    s, end = turns[int(which * (len(turns) - 1))]
    last = {name: value[:end] if np.ndim(value) else value for name, value in chat[s].items()}
    return [*chat[:s], last]
