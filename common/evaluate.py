"""Evaluation shared by the stages: losses on held-out examples, and scored completions of fixed prompts.

Sums and counts are reduced over the processes, and fillers have weight 0: the result covers the whole set,
for any number of processes and any batch size.
"""

from collections.abc import Callable, Iterator
import contextlib
from functools import partial
import itertools
import math
import re
from typing import Any, NamedTuple

from accelerate import Accelerator
from common.args import CommonArgs
from common.collators import Batch, eval_batches
from common.data.encode import convert
from common.data.examples import Examples
from common.data.formats import as_prompt
from common.data.load import Rows
from common.data.order import Shuffled
from common.data.sources import Source, load_rows, read_rows
from common.data.tokens import tokenize_row
from common.data.types import BadRow, Row, Tokenizer
from common.errors import UserError, say
from common.processes import on_main_process
from common.sampling import ModelSampler, Reward, load_rewards, sample_shared, score_by_name
from common.sampling.rewards import check_columns
import numpy as np
import torch
from torch import Tensor, nn

BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character that a vocabulary lacks
PROMPT_COLUMNS = ("prompt", "tools", "chat_template_kwargs")  # of a held-out row that is completed


class EvalPrompts(NamedTuple):
    """The prompts completed at each evaluation, and their scoring."""

    rows: list[dict[str, Any]]  # {"prompt", "prompt_ids", and columns for the rewards}
    rewards: list[Reward]
    weights: list[float] | None  # of the rewards' sum; None: it is not scored


class Sums(NamedTuple):
    """Of a source's held-out examples."""

    totals: list[float]  # of each value, times the weights
    count: float  # of the weights


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context without gradients and dropout; training mode is restored afterwards."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()
    for module in model.modules():
        if hasattr(module, "reshard"):  # FSDP2 leaves the root module unsharded if no backward pass follows
            module.reshard()


def evaluate_nll(
    args: CommonArgs, accelerator: Accelerator, model: nn.Module, held_out: Examples
) -> dict[str, float]:
    """eval_loss (nats per trained token), eval_perplexity, eval_mean_token_accuracy, eval_entropy; {} without
    data.

    Several sources: see evaluate_means.
    """

    def per_token(batch: Batch) -> dict[str, Tensor]:
        out = model(batch, entropy=True)
        return {"loss": -out.logps, "mean_token_accuracy": out.correct, "entropy": out.entropy}

    values = evaluate_means(args, accelerator, model, held_out, per_token, weights="loss_mask")
    if not values:
        return {}
    loss = values["eval_loss"]
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))} | values


def evaluate_means(
    args: CommonArgs,
    accelerator: Accelerator,
    model: nn.Module,
    held_out: Examples,
    measure: Callable[[Batch], dict[str, Tensor]],
    weights: str = "sequence_mask",
) -> dict[str, float]:
    """The mean of each value of measure(batch) over the held-out examples, as eval_<name>; {} without data.

    measure(batch): values by name, (B,) for the examples of a batch, or, with weights="loss_mask", (T,) for
    its tokens. weights: the field of the batch that is 0 for items that do not count (a prompt, a filler).
    With several sources also eval_<source>_loss; the others are then means over everything, or, if the
    sources have weights, weighted means of the sources' values.
    """
    names = []
    table = []  # for each source: the sum of each value, and of the weights
    with evaluating(model):
        first = 0
        for count in held_out.counts:
            indices = range(first, first + count)
            first += count
            sums = 0.0
            for batch in eval_batches(held_out, accelerator, args.per_device_eval_batch_size, indices):
                values = measure(batch)
                names = list(values)
                num_items = len(values[names[0]])
                step = len(batch[weights]) // num_items  # 2 for pairs, whose sequences count together
                counts = batch[weights][::step]
                totals = [(value * counts).sum() for value in values.values()]
                sums = sums + torch.stack([*totals, counts.sum()])
            *totals, count = accelerator.reduce(sums, "sum").tolist()
            table.append(Sums(totals, count))
    means = {f"eval_{name}": _mean(held_out, table, k) for k, name in enumerate(names)}
    if len(table) > 1 and "loss" in names:
        k = names.index("loss")
        for source, row in zip(held_out.sources, table, strict=True):
            means[f"eval_{source.label}_loss"] = row.totals[k] / row.count
    return means


def _mean(held_out: Examples, table: list[Sums], k: int) -> float:
    """The mean of the k-th value over all sources, or, if they have weights, the weighted mean of the sources'
    means."""
    shares = [source.weight for source in held_out.sources]
    if None in shares:
        shares = [row.count for row in table]
    total = 0.0
    for share, row in zip(shares, table, strict=True):
        total += share * row.totals[k] / row.count
    return total / sum(shares)


def bytes_per_token(held_out: Examples, tokenizer: Tokenizer) -> float:
    """UTF-8 bytes of the held-out text for each predicted token (all but the first of a sequence; special
    tokens stand for no text), sources weighted as in eval_loss: eval_loss / (ln 2 · bytes_per_token) are bits per
    byte. 0 without held-out rows."""
    table = []
    first = 0
    for count in held_out.counts:
        size = 0
        predicted = 0
        for i in range(first, first + count):
            for sequence in held_out[i]:
                size += _bytes_predicted(sequence["input_ids"], tokenizer)
                predicted += len(sequence["input_ids"]) - 1
        first += count
        table.append(Sums([size], max(predicted, 1)))
    return _mean(held_out, table, 0) if table else 0.0


def _bytes_predicted(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text of all tokens but the first."""

    def text_of(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    text = text_of(ids)
    first = text_of(ids[:1])
    if "\ufffd" not in text + first:
        return len(text.encode("utf-8", "replace")) - len(first.encode("utf-8", "replace"))
    # The row begins or ends, or its second token begins, inside of a character: count token by token.
    is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    size = 0
    normal = [i for i in ids[1:].tolist() if i not in tokenizer.all_special_ids]
    for token in tokenizer.convert_ids_to_tokens(normal):
        if BYTE.fullmatch(token):
            size += 1
        elif is_byte_level:
            size += len(token)  # a letter of a token is a byte
        else:
            size += len(token.replace("▁", " ").encode())
    return size


# --- completions --------------------------------------------------------------------------------------------


def load_eval_prompts(
    args: CommonArgs,
    accelerator: Accelerator,
    tokenizer: Tokenizer,
    train: Shuffled | Rows,
    held_out: Examples | Rows,
    max_length: int | None = None,
    *,
    prompt_of: Callable[[Row], dict[str, Any]] = as_prompt,
    encode: Callable[[Row, Tokenizer, Any], dict[str, Any]] | None = None,
    rewards: list[Reward] | None = None,
    weights: list[float] | None = None,
) -> EvalPrompts:
    """The prompts of --eval_prompts; if no file is named, GRPO's held-out rows, or else the prompts of the
    first num_samples held-out (or training) rows that have one of at most max_length tokens, without other
    columns.

    prompt_of(row)["prompt"]: the prompt of a row. encode(row, tokenizer, args): converts a row of
    --eval_prompts for sampling, if training has its own way. rewards, weights: score the completions if
    --eval_reward_funcs is not given, and the weights of their sum. Raises UserError if a reward asks for a
    column that the rows, also those of training, do not have.
    """

    def with_ids(row: Row) -> dict[str, Any]:
        if encode is None:
            return tokenize_row(as_prompt(row), tokenizer)
        return encode(row, tokenizer, args)

    rewards = rewards or []
    if isinstance(train, Rows):
        check_columns(rewards, train.rows)
    if args.eval_reward_funcs:
        rewards = load_rewards(args.eval_reward_funcs, accelerator.device, "--eval_reward_funcs")
        weights = None
    if args.eval_prompts:
        source = Source(args.eval_prompts, columns=tuple(args.columns or ()))
        rows, _ = convert(load_rows(source), with_ids, "prompts of --eval_prompts")
    elif isinstance(held_out, Rows):
        rows = held_out.rows
    else:
        rows = _first_prompts(args, tokenizer, held_out.sources or train.sources, prompt_of, max_length)
        return EvalPrompts(rows, rewards, weights)
    if args.eval_steps and rows:
        check_columns(rewards, rows)
    return EvalPrompts(rows, rewards, weights)


def _first_prompts(
    args: CommonArgs,
    tokenizer: Tokenizer,
    sources: list[Source],
    prompt_of: Callable[[Row], dict[str, Any]],
    max_length: int | None,
) -> list[dict[str, Any]]:
    """The prompts of the first num_samples rows that have one, without other columns."""
    prompts = []
    rows = itertools.chain.from_iterable(map(read_rows, sources))
    for row, _ in itertools.islice(rows, 50 * args.num_samples):
        with contextlib.suppress(BadRow, UserError):  # a row without a prompt is not an error here
            prompt = prompt_of(row)
            columns = {name: prompt[name] for name in PROMPT_COLUMNS if prompt.get(name)}
            prompts.append(tokenize_row(columns, tokenizer, max_length))
        if len(prompts) == args.num_samples:
            break
    if args.num_samples and args.eval_steps and not prompts:
        say(
            "no samples: no row that was looked at has a prompt of at most max_length tokens (--eval_prompts FILE)"
        )
    return prompts


class Completed(NamedTuple):
    """The completion of a prompt."""

    ids: list[int]  # the sampled tokens
    text: str
    finished: bool  # ended with a stop token, rather than at its limit


def complete(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    *,
    max_new_tokens: int | list[int],
    temperature: float,
    seed: int = 0,
) -> list[Completed]:
    """Complete prompts (token ids). Each process samples its share, and gets all. max_new_tokens: one limit
    for all, or one each. A completion is a function of (weights, prompt, seed, its place)."""
    limits = max_new_tokens
    if isinstance(limits, int):
        limits = [limits] * len(prompts)
    sampler = ModelSampler(accelerator.unwrap_model(model), temperature=temperature)
    keys = [(seed, i) for i in range(len(prompts))]
    completions = []
    for s in sample_shared(accelerator, sampler, prompts, keys, limits):
        text = tokenizer.decode(s.ids, skip_special_tokens=True)
        completions.append(Completed(s.ids, text, s.finished))
    return completions


def complete_prompts(
    args: CommonArgs, accelerator: Accelerator, model: nn.Module, tokenizer: Tokenizer, prompts: EvalPrompts
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Complete fixed prompts at each of args.eval_temperatures and score the completions.

    Returns, on all processes, the means (`eval_<name>` at temperature 0 or the first one, `eval_<name>_t<T>`
    at the others) and the samples. Without prompts: nothing.
    """
    metrics = {}
    samples = []
    if not prompts.rows:
        return metrics, samples
    prompt_ids = [row["prompt_ids"] for row in prompts.rows]
    for temperature in args.eval_temperatures:
        completions = complete(
            accelerator,
            model,
            tokenizer,
            prompt_ids,
            max_new_tokens=args.eval_max_new_tokens,
            temperature=temperature,
            seed=args.seed,
        )
        texts = [completion.text for completion in completions]
        ids = [completion.ids for completion in completions]
        scored = partial(score_by_name, prompts.rewards, prompts.rows, texts, ids, prompts.weights)
        scores = on_main_process(accelerator, scored)
        new_metrics, new_samples = summarise(args, temperature, prompts.rows, texts, scores)
        metrics |= new_metrics
        samples += new_samples
    return metrics, samples


def summarise(
    args: CommonArgs,
    temperature: float,
    rows: list[dict[str, Any]],
    texts: list[str],
    scores: dict[str, list[float | None]],
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """For completions of `rows` at one of args.eval_temperatures: the mean of each score, ignoring None, as
    `eval_<name>` at the first temperature and `eval_<name>_t<T>` at the others, and a sample for each
    completion."""
    suffix = "" if temperature == args.eval_temperatures[0] else f"_t{temperature:g}"
    samples = []
    for row, text in zip(rows, texts, strict=True):
        samples.append({"temperature": temperature, "prompt": row["prompt"], "completion": text})
    means = {}
    for name, values in scores.items():
        numbers = [value for value in values if value is not None]
        if numbers:
            means[f"eval_{name}{suffix}"] = sum(numbers) / len(numbers)
        for line, value in zip(samples, values, strict=True):
            line[name] = value
    return means, samples
