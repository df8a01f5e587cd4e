"""What a run will train on, and how, before it starts: on the console with --dry_run, and in dataset.json."""

import json
from pathlib import Path
from typing import Any

from common.data.tokens import show_trained
from common.errors import say
from common.memory import SHARDED, memory, tokens_at_once
from common.model.flat_model import count_parameters
from common.run.estimate import needs, show_memory, show_size

import numpy as np

BINS = 8  # of the histogram
SHOWN = 3000  # characters of an example


def describe(
    accelerator: Any,
    args: Any,
    model: Any,
    tokenizer: Any,
    samples: Any,
    eval_data: Any,
    plan: dict[str, Any],
    unit: str,
    reference: bool = False,
) -> bool:
    """Say what will be trained on. Returns args.dry_run: whether that is all that is wanted.

    samples: order.Shuffled or stream.Stream; for GRPO, whose samples are prompts, samples.Items. plan: see Windows.plan.
    unit: what it counts. reference: a frozen model stands beside this one. A dry run says everything; a run says a little
    and writes dataset.json.
    """
    data, packs = getattr(samples, "data", samples), getattr(samples, "units", samples)
    trained, parameters = count_parameters(model)
    facts = {
        "sources": with_shares(data.facts()),
        "eval_sources": eval_data.facts() if hasattr(eval_data, "facts") else [],
        "lengths": lengths(data.lengths),
        "packing": None,
        "unit": unit,
        "batched_as": unit if packs is data else "row",
        "plan": {name: value for name, value in plan.items() if name != "largest_micro_batch"},
        "parameters": {"trained": trained, "all": parameters},
    }
    if hasattr(packs, "utilisation"):
        facts["packing"] = {"rows": len(packs), "max_length": packs.max_length, "utilisation": packs.utilisation}
    at_once = tokens_at_once(accelerator, model)
    facts["tokens_at_once"] = at_once if sum(plan["largest_micro_batch"]) >= 2 * at_once else None
    facts["memory_gib"], helps = None, []
    if args.dry_run or accelerator.distributed_type not in SHARDED:
        if not args.dry_run:
            model.to(accelerator.device)  # where it is going anyway, and where a look at it is quick
        shape = plan["largest_micro_batch"], trained_share(facts["sources"])
        facts["memory_gib"], helps = needs(accelerator, model, *shape, reference)
    limit = memory(accelerator.device).limit
    if args.dry_run:
        show(facts, data, tokenizer, limit, helps, args.dataset_streaming)
        return True
    if helps:
        say(f"memory: this run needs about {facts['memory_gib']['total']:.1f} GiB, and there are {limit:.1f}")
        show_savings(helps)
    show_examples(data, tokenizer, unit, 1)
    say(
        f"{trained:,} of {parameters:,} parameters trained; {len(data):,} {unit}s"
        f"{' in the first block' if args.dataset_streaming else ''}, {len(eval_data):,} held out; "
        f"{plan['steps']} steps of {plan['units_per_step']:g} {facts['batched_as']}s"
    )
    if accelerator.is_main_process:
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        Path(args.output_dir, "dataset.json").write_text(text, encoding="utf-8")
    return False


def show(facts: dict[str, Any], data: Any, tokenizer: Any, limit: float, helps: list, streaming: bool) -> None:
    """All facts and two examples on the console."""
    unit = facts["unit"]
    say(f"\ndata{' (what is in the first block of the stream)' if streaming else ''}")
    show_sources(facts["sources"])
    if facts["eval_sources"]:
        say("held out")
        show_sources(facts["eval_sources"])
    found = facts["lengths"]
    marks = ", ".join(f"{name} {found[name]:,}" for name in ("min", "p50", "p90", "p99", "max"))
    say(f"\ntokens of a {unit}: {marks}, mean {found['mean']:,.1f}")
    most = max(count for _, _, count in found["histogram"])
    for low, high, count in found["histogram"]:
        say(f"    {low:>7,} - {high:<7,} {'#' * round(40 * count / most):<40} {count:,}")
    if facts["packing"]:
        rows, max_length, share = facts["packing"].values()
        say(f"packed into {rows:,} rows of up to {max_length:,} tokens, {share:.1%} full")
    plan = facts["plan"]
    each = f"{plan['units_per_step']:g} {facts['batched_as']}s, about {plan['tokens_per_step']:,} tokens"
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
    show_examples(data, tokenizer, unit, 2)
    say("\ndry run: nothing was trained, and nothing written in output_dir")


def show_sources(sources: list[dict[str, Any]]) -> None:
    """A line for each source, and one for each reason for which rows were left out."""
    say(f"    {'source':20} {'format':17} {'rows':>9} {'used':>9} {'tokens':>13} {'trained':>8} {'share':>7}")
    for found in sources:
        trained = f"{found['trained_tokens'] / max(found['tokens'], 1):.1%}" if "trained_tokens" in found else "-"
        share = f"{found['share']:.1%}" if "share" in found else "-"
        numbers = f"{found['rows']:>9,} {found['units']:>9,} {found['tokens']:>13,} {trained:>8} {share:>7}"
        say(f"    {found['source']:20} {found['format']:17} {numbers}")
        for reason, dropped in found["dropped"].items():
            say(f"        left out: {dropped['count']:,}, {reason} ({', '.join(dropped['first'])})")


def show_savings(helps: list[tuple[str, float]]) -> None:
    """What would make the run smaller, by how much."""
    for what, gain in helps:
        say(f"    about {show_size(gain)} less with {what}")


def show_examples(data: Any, tokenizer: Any, unit: str, most: int) -> None:
    """The first units as text with what is trained marked."""
    for i in range(min(most, len(data))):
        example = data[i]
        if isinstance(example, dict):  # a prompt
            say(f"{unit} {i + 1}:\n{tokenizer.decode(example['prompt_ids']).rstrip()}\n")
            continue
        names = ("chosen", "rejected") if len(example) == 2 else ("",)
        for name, sequence in zip(names, example, strict=True):
            say(f"{' '.join(filter(None, (unit, str(i + 1), name)))}, with what is trained marked:")
            shown = show_trained(sequence, tokenizer).rstrip("\n")
            say(f"{shown if len(shown) <= SHOWN else f'{shown[:SHOWN]} ...'}\n")


def with_shares(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sources with their share of an epoch: of its units where they have weights, else of its tokens."""
    weighted = all(found["weight"] for found in sources)
    parts = [found["weight"] if weighted else found["tokens"] for found in sources]
    return [found | {"share": part / max(sum(parts), 1)} for found, part in zip(sources, parts, strict=True)]


def lengths(sizes: np.ndarray) -> dict[str, Any]:
    """Percentiles of the tokens of the units, and a histogram as [low, high, units]."""
    marks = np.percentile(sizes, [0, 50, 90, 99, 100]).astype(int).tolist()
    edges = np.unique(np.geomspace(max(marks[0], 1), marks[-1] + 1, BINS + 1).round().astype(int))
    counts = np.histogram(sizes, edges)[0].tolist()
    bins = [[low, high - 1, count] for low, high, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True)]
    named = dict(zip(("min", "p50", "p90", "p99", "max"), marks, strict=True))
    return named | {"mean": float(sizes.mean()), "histogram": bins}


def trained_share(sources: list[dict[str, Any]]) -> float:
    """The share of the tokens that are trained, as far as it is known."""
    known = [found for found in sources if "trained_tokens" in found]
    return sum(f["trained_tokens"] for f in known) / max(1, sum(f["tokens"] for f in known)) if known else 1.0
