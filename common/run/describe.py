"""Describe what a run will train on before it starts: on the console with --dry_run, and in dataset.json."""

import json
from typing import Any

from common.args import CommonArgs
from common.data.tokens import show_trained, trained_parts
from common.data.types import Example, Tokenizer
from common.errors import say
from common.model.flat_model import FlatModel, base_lm, check_positions, count_parameters
from common.model.save import base_dtype, final_dtype
from common.run.dry_run import show_facts, show_memory
import numpy as np

BINS = 8  # of the length histogram
SHOWN = 3000  # characters shown of an example
LIMITS = "--max_length, or in GRPO --max_prompt_length and --max_completion_length"


def describe(run: Any, model: FlatModel, example_name: str, reference: bool) -> str:
    """Print what will be trained on: everything in a dry run, else a summary. Returns the text of
    dataset.json.

    run: the Run, with args, accelerator, tokenizer, windows and held_out. example_name: the word for one
    example. reference: whether a frozen model is loaded as well. Raises UserError if a sequence is longer
    than the model's positions.
    """
    args = run.args
    windows = run.windows
    check_positions(model, max(windows.longest, run.held_out.longest), LIMITS)
    about_model = describe_model(args, model, run.tokenizer)
    show_model(about_model)
    on_gpu = run.accelerator.device.type == "cuda"
    if on_gpu and run.accelerator.mixed_precision == "no" and args.dtype == "float32":
        say(
            "precision: float32 on a GPU is several times slower than bf16: "
            "accelerate launch -q --config_file accelerate_configs/single_gpu.yaml"
        )
    data = getattr(windows.train, "data", windows.train)
    rows = getattr(windows.train, "examples", windows.train)  # the data, packed or cut
    packing = None
    if getattr(rows, "max_length", 0):
        utilisation = float(rows.sizes.sum() / (len(rows) * rows.max_length))
        packing = {"rows": len(rows), "max_length": rows.max_length, "utilisation": utilisation}
    plan = windows.plan()
    largest = plan.pop("largest_micro_batch")
    facts = {
        "sources": with_shares(data.facts()),
        "eval_sources": run.held_out.facts(),
        "lengths": describe_lengths(data.sizes),
        "packing": packing,
        "example": example_name,
        "batched_as": example_name if rows is data else "row",
        "plan": plan,
        "model": about_model,
    }
    if args.dry_run:
        show_facts(facts)
        show_memory(args, run.accelerator, model, largest, reference)
        show_example(data[0], run.tokenizer, example_name, most=len(data[0]))
        say("dry run: nothing was trained, and nothing written in output_dir")
        return ""
    show_example(data[0], run.tokenizer, example_name, most=2)
    block = " in the first block" if args.dataset_streaming else ""
    steps = f"{plan['steps']} steps of {plan['examples_per_step']:g} {facts['batched_as']}s"
    held_out = sum(source["examples"] for source in facts["eval_sources"])
    say(f"{len(data):,} {example_name}s{block}, {held_out:,} held out; {steps}")
    facts["marked"] = marked(data[0], run.tokenizer, example_name)
    return json.dumps(facts, indent=1, ensure_ascii=False)


# --- the facts ----------------------------------------------------------------------------------------------


def describe_model(args: CommonArgs, model: FlatModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Class, parameters, dtypes, how it is called, layers with adapters, chat template, stop tokens."""
    lm = base_lm(model.lm)
    trained, parameters = count_parameters(model)
    base = base_dtype(model)
    weights = str(lm.dtype).removeprefix("torch.")
    adapted = set()
    for name, module in model.lm.named_modules():
        if hasattr(module, "lora_A"):
            adapted.add(name.split(".")[-1])
    stop_tokens = []
    for i, name in zip(model.stop_ids, tokenizer.convert_ids_to_tokens(model.stop_ids), strict=True):
        stop_tokens.append(str(name or i))
    template = "the tokenizer's" if tokenizer.chat_template else None
    return {
        "class": type(lm).__name__,
        "parameters": {"trained": trained, "all": parameters},
        "dtype": {"base": base, "weights": weights, "export": final_dtype(args, base)},
        "called_on": "padded batches" if model.padded else "flat rows",
        "adapted_layers": sorted(adapted),
        "chat_template": args.chat_template or template,
        "stop_tokens": stop_tokens,
    }


def with_shares(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sources with their share of an epoch: by examples if they have weights, else by tokens."""
    measure = "weight" if all(source["weight"] for source in sources) else "tokens"
    total = sum(source[measure] for source in sources) or 1
    return [source | {"share": source[measure] / total} for source in sources]


def describe_lengths(sizes: np.ndarray) -> dict[str, Any]:
    """Percentiles of the examples' token counts, and a histogram as [low, high, examples]."""
    percentiles = np.percentile(sizes, [0, 50, 90, 99, 100]).astype(int).tolist()
    low, *_, high = percentiles
    edges = np.geomspace(max(low, 1), high + 1, BINS + 1).round().astype(int)
    edges = np.unique(edges).tolist()
    counts, _ = np.histogram(sizes, edges)
    histogram = []
    for i, count in enumerate(counts.tolist()):
        histogram.append([edges[i], edges[i + 1] - 1, count])
    lengths = dict(zip(("min", "p50", "p90", "p99", "max"), percentiles, strict=True))
    return lengths | {"mean": float(sizes.mean()), "histogram": histogram}


def sides(example: Example | dict[str, Any], example_name: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, sequence) of each sequence of an example. In a prompt, nothing is trained."""
    if isinstance(example, dict):
        ids = np.asarray(example["prompt_ids"])
        untrained = np.zeros(len(ids), np.uint8)
        return [("", {"input_ids": ids, "loss_mask": untrained})]
    if example_name == "pair":
        return list(zip(("chosen", "rejected"), example, strict=True))
    if len(example) == 1:
        return [("", example[0])]
    return [(f"context {i} of {len(example)}", sequence) for i, sequence in enumerate(example, 1)]


def marked(example: Any, tokenizer: Tokenizer, example_name: str) -> list[dict[str, Any]]:
    """An example for dataset.json: {"side", "parts": [(text, whether it is trained)]} for each of its
    sequences."""
    parts = []
    for side, sequence in sides(example, example_name):
        short = {name: sequence[name][:SHOWN] for name in ("input_ids", "loss_mask")}
        parts.append({"side": side, "parts": trained_parts(short, tokenizer)})
    return parts


# --- on the console -----------------------------------------------------------------------------------------


def show_example(example: Any, tokenizer: Tokenizer, name: str, most: int) -> None:
    """Print the first `most` sequences of an example as text with the trained tokens marked."""
    for side, sequence in sides(example, name)[:most]:
        title = f"{name} 1 {side}".rstrip()
        if isinstance(example, list):  # not a prompt
            title += ", with what is trained marked"
        say(f"{title}:")
        text = show_trained(sequence, tokenizer).rstrip("\n")
        if len(text) > SHOWN:
            text = f"{text[:SHOWN]} ..."
        say(f"{text}\n")


def show_model(model: dict[str, Any]) -> None:
    """model: by `describe_model`."""
    counts = model["parameters"]
    kind = f"{model['class']}, {counts['trained']:,} of {counts['all']:,} parameters trained"
    ends = " or ".join(model["stop_tokens"])
    say(f"model: {kind}; {model['dtype']['weights']}; {model['called_on']}; answers end with {ends}")
