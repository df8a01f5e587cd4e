"""Describe what a run will train on before it starts: on the console with --dry_run, and in dataset.json."""

import json
from typing import Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.data.examples import Examples
from common.data.load import Rows
from common.data.tokens import show_trained, trained_parts
from common.data.types import Example, Tokenizer
from common.errors import say
from common.model.flat_model import FlatModel, base_lm, check_positions, count_parameters
from common.model.save import base_dtype, final_dtype
from common.run.dry_run import show_facts, show_memory
import numpy as np

BINS = 8  # of the length histogram
SHOWN = 3000  # characters shown of an example


def describe(
    run: Any, model: FlatModel, held_out: Examples | Rows, example_name: str, reference: bool
) -> str:
    """Print what will be trained on: everything in a dry run, else a summary. Returns the text of
    dataset.json.

    run: the Run, with args, accelerator, tokenizer and windows. example_name: the word for one example.
    reference: whether a frozen model is loaded as well. Raises UserError if a sequence is longer than the
    model's positions.
    """
    args, accelerator, tokenizer, windows = run.args, run.accelerator, run.tokenizer, run.windows
    plan, train = windows.plan(), windows.train
    limits = " and ".join(
        f"--{name}" for name in vars(args) if name.startswith("max_") and name.endswith("_length")
    )
    check_positions(model, max(windows.longest, held_out.longest), limits)
    data, packs = getattr(train, "data", train), getattr(train, "examples", train)
    about_model = describe_model(args, accelerator, model, tokenizer)
    counts, ends = about_model["parameters"], " or ".join(about_model["stop_tokens"])
    kind = f"{about_model['class']}, {counts['trained']:,} of {counts['all']:,} parameters trained"
    say(
        f"model: {kind}; {about_model['dtype']['weights']}; {about_model['called_on']}; answers end with {ends}"
    )
    if accelerator.device.type == "cuda" and accelerator.mixed_precision == "no" and args.dtype == "float32":
        say(
            "precision: float32 on a GPU is several times slower than bf16: "
            "accelerate launch -q --config_file accelerate_configs/single_gpu.yaml"
        )
    largest = plan.pop("largest_micro_batch")
    facts = {
        "sources": with_shares(data.facts()),
        "eval_sources": held_out.facts(),
        "lengths": describe_lengths(data.lengths),
        "packing": None,
        "example": example_name,
        "batched_as": example_name if packs is data else "row",
        "plan": plan,
        "model": about_model,
    }
    if getattr(packs, "max_length", 0):
        filled = float(packs.lengths.sum() / (len(packs) * packs.max_length))
        facts["packing"] = {"rows": len(packs), "max_length": packs.max_length, "utilisation": filled}
    if args.dry_run:
        show_facts(facts)
        show_memory(args, accelerator, model, largest, reference)
    show_example(data[0], tokenizer, example_name, most=len(data[0]) if args.dry_run else 2)
    if args.dry_run:
        say("dry run: nothing was trained, and nothing written in output_dir")
        return ""
    block = " in the first block" if args.dataset_streaming else ""
    steps = f"{plan['steps']} steps of {plan['examples_per_step']:g} {facts['batched_as']}s"
    say(f"{len(data):,} {example_name}s{block}, {len(held_out):,} held out; {steps}")
    facts["marked"] = marked(data[0], tokenizer, example_name)
    return json.dumps(facts, indent=1, ensure_ascii=False)


# --- the facts ----------------------------------------------------------------------------------------------


def describe_model(
    args: CommonArgs, accelerator: Accelerator, model: FlatModel, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Class, parameters, precision, calling convention, parts left out, adapted or frozen, chat template,
    stop tokens."""
    lm = base_lm(model.lm)
    trained, parameters = count_parameters(model)
    names = tokenizer.convert_ids_to_tokens(model.stop_ids)
    return {
        "class": type(lm).__name__,
        "parameters": {"trained": trained, "all": parameters},
        "dtype": {
            "base": base_dtype(model),
            "weights": str(lm.dtype).removeprefix("torch."),
            "export": final_dtype(args, base_dtype(model)),
        },
        "called_on": "padded batches" if model.padded else "flat rows",
        "adapted_layers": sorted(
            {name.split(".")[-1] for name, m in model.lm.named_modules() if hasattr(m, "lora_A")}
        ),
        "chat_template": args.chat_template or ("the tokenizer's" if tokenizer.chat_template else None),
        "stop_tokens": [str(token or i) for i, token in zip(model.stop_ids, names, strict=True)],
    }


def with_shares(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sources with their share of an epoch: by examples if they have weights, else by tokens."""
    weighted = all(found["weight"] for found in sources)
    parts = [found["weight"] if weighted else found["tokens"] for found in sources]
    return [found | {"share": part / max(sum(parts), 1)} for found, part in zip(sources, parts, strict=True)]


def describe_lengths(sizes: np.ndarray) -> dict[str, Any]:
    """Percentiles of the examples' token counts, and a histogram as [low, high, examples]."""
    marks = np.percentile(sizes, [0, 50, 90, 99, 100]).astype(int).tolist()
    edges = np.unique(np.geomspace(max(marks[0], 1), marks[-1] + 1, BINS + 1).round().astype(int))
    counts = np.histogram(sizes, edges)[0].tolist()
    bins = [
        [low, high - 1, count]
        for low, high, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True)
    ]
    named = dict(zip(("min", "p50", "p90", "p99", "max"), marks, strict=True))
    return named | {"mean": float(sizes.mean()), "histogram": bins}


def sides(example: Example | dict[str, Any], example_name: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, sequence) of each sequence of an example. A prompt is a sequence of which nothing is trained."""
    if isinstance(example, dict):
        ids = np.asarray(example["prompt_ids"])
        return [("", {"input_ids": ids, "loss_mask": np.zeros(len(ids), np.uint8)})]
    if example_name == "pair":
        return list(zip(("chosen", "rejected"), example, strict=True))
    count = len(example)
    return [(f"context {i} of {count}" if count > 1 else "", one) for i, one in enumerate(example, 1)]


def marked(example: Any, tokenizer: Tokenizer, example_name: str) -> list[dict[str, Any]]:
    """An example for dataset.json: {"side", "parts": [(text, whether it is trained)]} for each of its
    sequences."""
    found = []
    for side, sequence in sides(example, example_name):
        short = {name: sequence[name][:SHOWN] for name in ("input_ids", "loss_mask")}
        found.append({"side": side, "parts": trained_parts(short, tokenizer)})
    return found


# --- what is printed ----------------------------------------------------------------------------------------


def show_example(example: Any, tokenizer: Tokenizer, name: str, most: int) -> None:
    """Print the first `most` sequences of an example as text with the trained tokens marked."""
    for side, sequence in sides(example, name)[:most]:
        is_prompt = isinstance(example, dict)
        say(
            f"{' '.join(filter(None, (name, '1', side)))}{'' if is_prompt else ', with what is trained marked'}:"
        )
        text = show_trained(sequence, tokenizer).rstrip("\n")
        say(f"{text if len(text) <= SHOWN else f'{text[:SHOWN]} ...'}\n")
