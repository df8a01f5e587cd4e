"""Evaluation that the stages share: the loss on held-out units, and scored completions of fixed prompts.

Sums and counts are reduced over the processes, fillers have weight 0: the result is that of the whole set, on any number
of processes and for any batch size.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common.collators import eval_batches
from common.data.examples import Units
from common.data.formats import as_prompt
from common.data.sources import BadRow, Source, convert, load_rows, read_rows
from common.data.tokens import tokenize_row
from common.errors import UserError
from common.losses import nll
from common.model.flat_model import LogProbModel
from common.sampling.generate import sample

import torch


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """No gradients, no dropout; training mode again afterwards."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def evaluate_nll(accelerator: Any, model: Any, data: Units, batch_size: int) -> dict[str, float]:
    """eval_loss (nats per trained token), eval_perplexity, eval_mean_token_accuracy, eval_entropy; nothing without data.

    With several sources also eval_<source>_loss; the others are then means over all trained tokens, or, where the sources
    have weights, means of the sources' values by their weights.
    """
    sums = torch.zeros(len(data.sources), 4, device=accelerator.device)
    with evaluating(model):
        for s in range(len(data.sources)):
            for batch in eval_batches(data.of_source(s), accelerator, batch_size):
                logps, entropy, correct = model(batch, stats=True)
                mask = batch["loss_mask"]
                sums[s] += torch.stack([nll(logps, mask), (correct * mask).sum(), (entropy * mask).sum(), mask.sum()])
    table = accelerator.reduce(sums, "sum").tolist()
    means = mean_over_sources(data.sources, [row[:3] for row in table], [row[3] for row in table])
    if not means:
        return {}
    loss, accuracy, entropy = means
    values = {
        "eval_loss": loss,
        "eval_perplexity": math.exp(min(loss, 700.0)),
        "eval_mean_token_accuracy": accuracy,
        "eval_entropy": entropy,
    }
    if len(table) > 1:
        values |= {f"eval_{source.label}_loss": row[0] / row[3] for source, row in zip(data.sources, table, strict=True)}
    return values


def mean_over_sources(sources: list[Source], sums: list[list[float]], counts: list[float]) -> list[float]:
    """For each column of sums (of a row per source): over everything, or by the weights of the sources if they have them."""
    if not sources:
        return []
    weights = [source.weight for source in sources]
    if None in weights:
        weights = counts
    total = sum(weights)
    return [
        sum(weight * row[k] / count for weight, row, count in zip(weights, sums, counts, strict=True)) / total
        for k in range(len(sums[0]))
    ]


def load_prompts(name: str, tokenizer: Any) -> list[dict[str, Any]]:
    """The prompts of a file, each {"prompt", "prompt_ids"} with its other columns for the scores."""
    return convert(load_rows(name), lambda columns: tokenize_row(as_prompt(columns), tokenizer), "prompts")[0]


def first_prompts(
    sources: list[Source], tokenizer: Any, most: int, prompt_of: Callable[[dict[str, Any]], dict[str, Any]] = as_prompt
) -> list[dict[str, Any]]:
    """What is completed where no prompts are named: those of the first rows that have one, without other columns."""
    prompts: list[dict[str, Any]] = []
    for row, _ in itertools.islice((found for source in sources for found in read_rows(source)), 50 * most):
        with contextlib.suppress(BadRow, UserError):  # a row without a prompt is no mistake here
            prompts.append(tokenize_row({"prompt": prompt_of(row.columns)["prompt"]}, tokenizer))
        if len(prompts) == most:
            break
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
                if rows  # sharded weights are gathered by all processes, also those that have none of them
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
