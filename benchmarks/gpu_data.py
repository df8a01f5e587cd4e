"""Random rows for the sections of gpu.py, and what stands for TRL's arithmetic: padded batches, log-probabilities of full logits."""

import math
from typing import Any

from gpu_bench import Bench

from common.data import Example, Sequence, whole  # isort: skip

import numpy as np
import torch


def lognormal(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Lengths as chats have them, with a long tail: the median is an eighth of the longest."""
    lengths = np.random.default_rng(seed).lognormal(math.log(longest / 8), 0.8, count)
    return np.clip(lengths, shortest, longest).astype(int).tolist()


def chats(bench: Bench, count: int, seed: int = 0) -> list[Sequence]:
    """Of which the second half is trained."""
    draw, V = np.random.default_rng(seed), bench.sizes["chat"]["vocab_size"]
    found = [whole(draw.integers(2, V, n)) for n in lognormal(count, 20, bench.sizes["longest"], seed)]
    for chat in found:
        chat["loss_mask"][: len(chat["loss_mask"]) // 2] = 0
    return found


def pad(bench: Bench, rows: list[Any], filler: int) -> torch.Tensor:
    tensors = [torch.as_tensor(np.asarray(row), dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler).to(bench.device)


def labels_of(chat: Sequence) -> np.ndarray:
    labels = np.where(chat["loss_mask"] == 1, chat["input_ids"], -100)
    labels[0] = -100
    return labels


def pairs(bench: Bench, count: int, seed: int) -> list[Example]:
    draw, V = np.random.default_rng(seed), bench.sizes["chat"]["vocab_size"]
    longest = bench.sizes["longest"] // 2
    found = []
    for prompt, *answers in zip(*(lognormal(count, 10, longest, 3 * seed + i) for i in range(3)), strict=True):
        start = draw.integers(2, V, prompt)
        ids = [np.concatenate([start, draw.integers(2, V, n)]) for n in answers]
        found.append([{"input_ids": i, "loss_mask": (np.arange(len(i)) >= prompt).astype(np.uint8)} for i in ids])
    return found


def selected(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(B, L, V), (B, L) -> (B, L): log-probabilities, row by row so that no second (B, L, V) is made."""
    rows = [row.log_softmax(-1).gather(-1, t[:, None])[:, 0] for row, t in zip(logits, tokens, strict=True)]
    return torch.stack(rows)


def padded_logps(bench: Bench, lm: Any, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L - 1) log-probabilities of the next tokens from full logits, and the mask of those that are trained."""
    ids, trained = (pad(bench, [s[name] for s in sequences], 0) for name in ("input_ids", "loss_mask"))
    mask = pad(bench, [np.ones(len(s["input_ids"])) for s in sequences], 0)
    logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return selected(logits, ids[:, 1:]).float(), trained[:, 1:].float()


def prompts_of(bench: Bench, groups: int) -> list[list[int]]:
    draw, G = np.random.default_rng(0), bench.sizes["G"]
    V = bench.sizes["chat"]["vocab_size"]
    return [row for n in draw.integers(*bench.sizes["prompt"], groups) for row in [draw.integers(2, V, n).tolist()] * G]


def some_stops(bench: Bench) -> list[int]:
    """Stop tokens that end a completion of random weights after about half of the most tokens, on average."""
    V, new = bench.sizes["chat"]["vocab_size"], bench.sizes["new"]
    return list(range(2, 2 + max(1, 2 * V // new)))
