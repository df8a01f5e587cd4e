"""The reward of the GRPO benchmark, in TRL's signature, which is also ours."""

import re
from typing import Any


def right_and_in_form(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float]:
    """1 for the right last number, and 0.1 for ending on `Answer: <number>`."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        numbers = re.findall(r"-?\d+", text)
        right = bool(numbers) and numbers[-1] == wanted
        rewards.append(float(right) + 0.1 * bool(re.search(r"Answer: -?\d+$", text)))
    return rewards
