"""Example environments for experiments/train_tools.py: a stateless tool, and a game with state."""

import random
import re
from typing import Any


class Calculator:
    """One tool and no state: rewards read the last turn."""

    def reset(self, **columns: Any) -> None:
        """Nothing to prepare."""

    def calculate(self, expression: str) -> str:
        """
        Work out a sum.

        Args:
            expression: whole numbers with + and - between them, for instance 12+30-7

        Returns:
            The result.
        """
        if not re.fullmatch(r"\d{1,9}([+-]\d{1,9})*", expression):
            raise ValueError("expected whole numbers with + and - between them")
        return str(sum(int(number) for number in re.findall(r"[+-]?\d+", expression)))


class HigherOrLower:
    """The model guesses a hidden number. The fewer guesses, the higher the reward; 0 if it is not found."""

    LARGEST, GUESSES = 20, 6

    def reset(self, seed: int, **columns: Any) -> str:
        self._hidden, self._guesses, self._found = random.Random(seed).randint(1, self.LARGEST), 0, False
        return f" It is between 1 and {self.LARGEST}."

    def guess(self, number: str) -> str:
        """
        Guess the hidden number.

        Args:
            number: the guess, for instance 10

        Returns:
            Whether the hidden number is higher or lower, or that this is it.
        """
        if self._found or self._guesses == self.GUESSES:
            raise ValueError("the game is over")
        self._guesses += 1
        self._found = int(number) == self._hidden
        return "yes" if self._found else "higher" if int(number) < self._hidden else "lower"

    def get_reward(self) -> float:
        return 1 - (self._guesses - 1) / self.GUESSES if self._found else 0.0
