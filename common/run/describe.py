"""Describe what a run will train on before it starts: on the console with --dry_run, and in dataset.json."""

import json
from typing import Any

from common.args import CommonArgs
from common.collators import Windows
from common.data.examples import Examples
from common.data.load import Rows
from common.data.tokens import show_trained, trained_parts
from common.data.types import Tokenizer
from common.errors import say
from common.memory import SHARDED, memory, tokens_at_once
from common.model.flat_model import FlatModel, check_positions
from common.run import gpu_advice
from common.run.estimate import needs, show_memory, show_size
from common.run.load_report import in_a_line, load_report
from common.sampling import RolloutSchedule, why_no_cache

import numpy as np
from accelerate import Accelerator

BINS = 8  # of the length histogram
SHOWN = 3000  # characters shown of an example


def describe(
    args: CommonArgs,
    accelerator: Accelerator,
    model: FlatModel,
    tokenizer: Tokenizer,
    windows: Windows | RolloutSchedule,
    held_out: Examples | Rows,
    example_name: str,
    reference: bool = False,
) -> str:
    """Print what will be trained on: everything in a dry run, else a summary. Returns the text of dataset.json.

    example_name: the word for one example. reference: whether a frozen model is loaded as well. Raises UserError if a
    sequence is longer than the model's positions.
    """
    plan, train = windows.plan(), windows.train
    limits = " and ".join(f"--{name}" for name in vars(args) if name.startswith("max_") and name.endswith("_length"))
    check_positions(model, max(windows.longest, held_out.longest), limits)
    if reason := why_no_cache(model):
        say(f"sampling is slow, each token costs a pass over all before it: {reason}")
    data, packs = getattr(train, "data", train), getattr(train, "examples", train)
    report = load_report(args, accelerator, model, tokenizer)
    say(in_a_line(report))
    gpu_advice.advise(args, accelerator, model)
    facts = {
        "sources": with_shares(data.facts()),
        "eval_sources": held_out.facts(),
        "lengths": lengths(data.lengths),
        "packing": None,
        "example": example_name,
        "batched_as": example_name if packs is data else "row",
        "plan": {name: value for name, value in plan.items() if name != "largest_micro_batch"},
        "parameters": report["parameters"],
        "model": report,
    }
    if getattr(packs, "max_length", 0):
        facts["packing"] = {"rows": len(packs), "max_length": packs.max_length, "utilisation": packs.utilisation}
    at_once = tokens_at_once(accelerator, model)
    facts["tokens_at_once"] = at_once if sum(plan["largest_micro_batch"]) >= 2 * at_once else None
    facts["memory_gib"], helps = None, []
    if args.dry_run or accelerator.distributed_type not in SHARDED:
        shape = plan["largest_micro_batch"], trained_share(facts["sources"])
        facts["memory_gib"], helps = needs(accelerator, model, *shape, reference, optim=args.optim)
    limit = memory(accelerator.device).limit
    if args.dry_run:
        show(facts, data, tokenizer, limit, helps, args.dataset_streaming)
        return ""
    if helps:
        say(f"memory: this run needs about {facts['memory_gib']['total']:.1f} GiB, and there are {limit:.1f}")
        show_savings(helps)
    show_examples(data, tokenizer, example_name, 1)
    say(
        f"{len(data):,} {example_name}s"
        f"{' in the first block' if args.dataset_streaming else ''}, {len(held_out):,} held out; "
        f"{plan['steps']} steps of {plan['examples_per_step']:g} {facts['batched_as']}s"
    )
    facts["marked"] = marked(data, tokenizer)
    return json.dumps(facts, indent=1, ensure_ascii=False)


def typical_length(windows: Windows | RolloutSchedule) -> float:
    """Length of the sequence that a token is in, averaged over tokens: it determines the cost of attention per token."""
    if isinstance(windows, RolloutSchedule):
        return windows.longest
    data = windows.train.data
    sizes = np.minimum(data.lengths / len(data[0]), windows.longest)  # approximate if an example has two sequences
    return float((sizes**2).sum() / sizes.sum())


def show(
    facts: dict[str, Any],
    data: Examples | Rows,
    tokenizer: Tokenizer,
    limit: float,
    helps: list[tuple[str, float]],
    streaming: bool,
) -> None:
    """Print all facts and two examples."""
    example = facts["example"]
    say(f"\ndata{' (what is in the first block of the stream)' if streaming else ''}")
    show_sources(facts["sources"])
    if facts["eval_sources"]:
        say("held out")
        show_sources(facts["eval_sources"])
    found = facts["lengths"]
    marks = ", ".join(f"{name} {found[name]:,}" for name in ("min", "p50", "p90", "p99", "max"))
    say(f"\ntokens of a {example}: {marks}, mean {found['mean']:,.1f}")
    most = max(count for _, _, count in found["histogram"])
    for low, high, count in found["histogram"]:
        say(f"    {low:>7,} - {high:<7,} {'#' * round(40 * count / most):<40} {count:,}")
    if facts["packing"]:
        rows, max_length, share = facts["packing"].values()
        say(f"packed into {rows:,} rows of up to {max_length:,} tokens, {share:.1%} full")
    plan = facts["plan"]
    each = f"{plan['examples_per_step']:g} {facts['batched_as']}s, about {plan['tokens_per_step']:,} tokens"
    say(f"\nsteps: {plan['steps']:,}, each of {each}")
    if plan.get("utilisation"):
        say(f"micro-batches: {plan['utilisation']:.1%} of max_tokens_per_batch used")
    if facts["tokens_at_once"]:
        say(f"about {facts['tokens_at_once']:,} of them or some more go through the model together: a CPU wants no more")
    if plan["steps_per_epoch"]:
        say(f"an epoch: {plan['steps_per_epoch']:,g} steps")
    say(f"parameters: {facts['parameters']['trained']:,} of {facts['parameters']['all']:,} trained")
    if facts["memory_gib"]:
        say(f"\n{show_memory(facts['memory_gib'], limit)}\n")
        show_savings(helps)
    show_examples(data, tokenizer, example, 2)
    say("\ndry run: nothing was trained, and nothing written in output_dir")


def show_sources(sources: list[dict[str, Any]]) -> None:
    """Print a line for each source, and one for each reason why rows were left out."""
    say(f"    {'source':20} {'format':17} {'rows':>9} {'used':>9} {'tokens':>13} {'trained':>8} {'share':>7}")
    for found in sources:
        trained = f"{found['trained_tokens'] / max(found['tokens'], 1):.1%}" if "trained_tokens" in found else "-"
        share = f"{found['share']:.1%}" if "share" in found else "-"
        numbers = f"{found['rows']:>9,} {found['examples']:>9,} {found['tokens']:>13,} {trained:>8} {share:>7}"
        say(f"    {found['source']:20} {found['format']:17} {numbers}")
        for reason, dropped in found["dropped"].items():
            say(f"        left out: {dropped['count']:,}, {reason} ({', '.join(dropped['first'])})")


def show_savings(helps: list[tuple[str, float]]) -> None:
    """Print the changes that would save memory, and how much each saves."""
    for what, gain in helps:
        say(f"    about {show_size(gain)} less with {what}")


def show_examples(data: Examples | Rows, tokenizer: Tokenizer, name: str, most: int) -> None:
    """Print the first examples as text with the trained tokens marked."""
    for i in range(min(most, len(data))):
        example = data[i]
        if isinstance(example, dict):  # a prompt
            say(f"{name} {i + 1}:\n{tokenizer.decode(example['prompt_ids']).rstrip()}\n")
            continue
        sides = ("chosen", "rejected") if len(example) == 2 else ("",)
        for side, sequence in zip(sides, example, strict=True):
            say(f"{' '.join(filter(None, (name, str(i + 1), side)))}, with what is trained marked:")
            shown = show_trained(sequence, tokenizer).rstrip("\n")
            say(f"{shown if len(shown) <= SHOWN else f'{shown[:SHOWN]} ...'}\n", as_it_is=True)


def marked(data: Examples | Rows, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The first example for dataset.json: {"side", "parts": [(text, whether it is trained)]} for each of its sequences."""
    if not len(data):
        return []
    example = data[0]
    if isinstance(example, dict):  # a prompt
        return [{"side": "", "parts": [(tokenizer.decode(example["prompt_ids"])[:SHOWN], False)]}]
    sides = ("chosen", "rejected") if len(example) == 2 else ("",)
    found = []
    for side, sequence in zip(sides, example, strict=True):
        short = {name: sequence[name][:SHOWN] for name in ("input_ids", "loss_mask")}
        found.append({"side": side, "parts": trained_parts(short, tokenizer)})
    return found


def with_shares(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sources with their share of an epoch: by examples if they have weights, else by tokens."""
    weighted = all(found["weight"] for found in sources)
    parts = [found["weight"] if weighted else found["tokens"] for found in sources]
    return [found | {"share": part / max(sum(parts), 1)} for found, part in zip(sources, parts, strict=True)]


def lengths(sizes: np.ndarray) -> dict[str, Any]:
    """Percentiles of the examples' token counts, and a histogram as [low, high, examples]."""
    marks = np.percentile(sizes, [0, 50, 90, 99, 100]).astype(int).tolist()
    edges = np.unique(np.geomspace(max(marks[0], 1), marks[-1] + 1, BINS + 1).round().astype(int))
    counts = np.histogram(sizes, edges)[0].tolist()
    bins = [[low, high - 1, count] for low, high, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True)]
    named = dict(zip(("min", "p50", "p90", "p99", "max"), marks, strict=True))
    return named | {"mean": float(sizes.mean()), "histogram": bins}


def trained_share(sources: list[dict[str, Any]]) -> float:
    """The share of tokens that are trained, over the sources where it is known."""
    known = [found for found in sources if "trained_tokens" in found]
    return sum(f["trained_tokens"] for f in known) / max(1, sum(f["tokens"] for f in known)) if known else 1.0
