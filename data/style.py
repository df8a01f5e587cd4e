"""Style metrics in the signature of a reward function: `f(prompts, completions, **columns) ->
list[float]`."""

from __future__ import annotations

import re
from typing import Any

Completion = str | list[dict[str, str]]  # plain text, or a list with one assistant message

EQUATION = re.compile(r"\d+[+-]\d+=\d+")
POLITE = re.compile(r"Sure!.*\d+[+-]\d+=\d+.*Answer: -?\d+", re.DOTALL)


def text_of(completion: Completion) -> str:
    """The text of a completion in either format."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def polite(prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float]:
    """1.0 for the preferred style: starts with "Sure!", shows working and ends with "Answer: <int>"."""
    return [float(POLITE.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def shows_working(prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float]:
    """1.0 for a completion with at least one equation such as 7+5=12, whether or not it is right."""
    return [float(EQUATION.search(text_of(completion)) is not None) for completion in completions]
