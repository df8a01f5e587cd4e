"""Evaluation that the stages share: the loss on held-out units, and scored completions of fixed prompts.

Sums and counts are reduced over the processes, fillers have weight 0: the result is that of the whole set, on any number
of processes and for any batch size.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common.collators import Unit, eval_batches
from common.data import BadRow, Row, as_prompt, convert, load_rows
from common.errors import UserError
from common.generate import sample
from common.losses import nll
from common.model import LogProbModel
from common.tokens import tokenize_row

import torch


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """No gradients, no dropout; training mode again afterwards."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def evaluate_nll(accelerator: Any, model: Any, units: Sequence[Unit], batch_size: int) -> dict[str, float]:
    """eval_loss (nats per trained token), eval_perplexity, eval_mean_token_accuracy, eval_entropy."""
    sums = torch.zeros(4, device=accelerator.device)
    with evaluating(model):
        for batch in eval_batches(units, accelerator, batch_size):
            logps, entropy, correct = model(batch, stats=True)
            mask = batch["loss_mask"]
            sums += torch.stack([nll(logps, mask), (correct * mask).sum(), (entropy * mask).sum(), mask.sum()])
    loss, correct, entropy, count = accelerator.reduce(sums, "sum").tolist()
    return {
        "eval_loss": loss / count,
        "eval_perplexity": math.exp(min(loss / count, 700.0)),
        "eval_mean_token_accuracy": correct / count,
        "eval_entropy": entropy / count,
    }


def load_prompts(name: str, tokenizer: Any) -> list[dict[str, Any]]:
    """The prompts of a file, each {"prompt", "prompt_ids"} with its other columns for the scores."""
    return convert(load_rows(name), lambda columns: tokenize_row(columns, tokenizer), "prompts")


def first_prompts(
    rows: list[Row], tokenizer: Any, most: int, prompt_of: Callable[[dict[str, Any]], dict[str, Any]] = as_prompt
) -> list[dict[str, Any]]:
    """What is completed where no prompts are named: those of the first rows that have one, without other columns."""
    prompts: list[dict[str, Any]] = []
    for row in rows:
        if len(prompts) < most:
            with contextlib.suppress(BadRow, UserError):  # a row without a prompt is no mistake here
                prompts.append(tokenize_row({"prompt": prompt_of(row.columns)["prompt"]}, tokenizer))
    return prompts


def complete_prompts(
    accelerator: Any,
    model: LogProbModel,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    score: Callable[[list[dict[str, Any]], list[list[int]]], dict[str, list[float | None]]] | None,
    *,
    stop_ids: Sequence[int],
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Complete fixed prompts at each temperature and score the completions: the generative part of an evaluation.

    rows: {"prompt", "prompt_ids", ...}. score: see rewards.scorer; None: nothing is scored. Returns the means,
    `eval_<name>` at temperature 0 (or the first one) and `eval_<name>_t<T>` at the others, and the samples, on all
    processes. Each process samples its share.
    """
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    mine = range(accelerator.process_index, len(rows), accelerator.num_processes)
    ids = [rows[i]["prompt_ids"] for i in mine]
    for temperature in temperatures:
        with accelerator.autocast():
            completions = (
                sample(
                    accelerator.unwrap_model(model),
                    ids,
                    [(seed, i) for i in mine],
                    stop_ids=stop_ids,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                )
                if ids
                else []
            )
        texts = gather_lists(accelerator, [(i, c.ids) for i, c in zip(mine, completions, strict=True)])
        all_ids = [ids for _, ids in sorted(texts, key=lambda pair: pair[0])]
        scores = score(rows, all_ids) if score else {}
        suffix = "" if temperature == temperatures[0] else f"_t{temperature:g}"
        for name, values in scores.items():
            known = [value for value in values if value is not None]
            metrics[f"eval_{name}{suffix}"] = sum(known) / max(len(known), 1)
        for i, (row, token_ids) in enumerate(zip(rows, all_ids, strict=True)):
            sample_row = {"temperature": temperature, "prompt": row["prompt"]}
            sample_row["completion"] = tokenizer.decode(token_ids, skip_special_tokens=True)
            sample_row |= {name: values[i] for name, values in scores.items()}
            samples.append(sample_row)
    return metrics, samples


def gather_lists(accelerator: Any, values: list[Any]) -> list[Any]:
    """The lists of all processes, end to end."""
    if accelerator.num_processes == 1:
        return values
    gathered: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(gathered, values)
    return [value for part in gathered for value in part]
