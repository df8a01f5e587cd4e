"""nanoGPT's two recipes for Shakespeare by characters, with train_pretrain.py: is the curve the known one?

    python benchmarks/shakespeare.py --text input.txt                               # 4 layers of 128: val 1.88, 3 minutes
    python benchmarks/shakespeare.py --text input.txt --nanogpt ../nanoGPT          # beside nanoGPT itself
    python benchmarks/shakespeare.py --text input.txt --nanogpt ../nanoGPT --only speed --rounds 5
    python benchmarks/shakespeare.py --text input.txt --recipe gpu --rounds 1       # 10.65M parameters: val 1.4697

--text: char-rnn's `data/tinyshakespeare/input.txt`, which is not shipped here. The first nine tenths are
trained on, as one stream; the loss is that of all of the rest. For it, a round is a seed, of the weights and
of the order; for speed and memory, a run of each side of 100 steps. Both sides take the same windows in the
same order, rows of T characters with T - 1 targets (nanoGPT draws its windows at random, and has T targets of
T + 1 characters). nanoGPT runs with initial weights of its own and without biases, as in its recipe, and from
our weights: ours is transformers' GPT-2, with nanoGPT's exact GELU, and with biases. A 66th token ends the
text. The published figures: nanoGPT's README. The losses are drawn to docs/shakespeare.png.
"""

from collections.abc import Callable
import hashlib
import json
from pathlib import Path
import sys
from typing import Any

from compare import ROOT, WORK, Result, arguments, compare, ours, peer, save, wanted
from curves import draw

sys.path.insert(0, str(ROOT))

import accelerate  # noqa: E402
from common.data import Tokenizer, chunk, load_data  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import train_pretrain  # noqa: E402

SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
END = "<|endoftext|>"
LEARNING_RATE, WARM_UP_STEPS = 1e-3, 100
SPEED_STEPS = 100
FOLDER = WORK / "shakespeare"
SAME_WEIGHTS = "nanoGPT from our weights"  # with biases, which its recipe leaves out
RECIPES: dict[str, dict[str, Any]] = {
    "cpu": {
        "config": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "dropout": 0.0},
        "batch": 12, "steps": 2000, "eval_steps": 250, "published": 1.88,
    },
    "gpu": {
        "config": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "dropout": 0.2},
        "batch": 64, "steps": 5000, "eval_steps": 250, "published": 1.4697,
    },
}  # fmt: skip


def write_text(path: Path) -> Tokenizer:
    """FOLDER/train.jsonl and validation.jsonl, one document each, and the tokenizer of the text's
    characters."""
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise SystemExit(f"{path}: not char-rnn's data/tinyshakespeare/input.txt (its SHA-256 is another)")
    return write_characters(text.decode())


def write_characters(text: str) -> Tokenizer:
    cut = len(text) * 9 // 10
    for name, part in {"train": text[:cut], "validation": text[cut:]}.items():
        (FOLDER / f"{name}.jsonl").write_text(json.dumps({"text": part}) + "\n")
    vocabulary = {character: i for i, character in enumerate([*sorted(set(text)), END])}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=END))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=END, pad_token=END)


def write_model(config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """FOLDER/model: the configuration of a GPT-2, and the tokenizer."""
    rates = {name: config["dropout"] for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    sizes = {name: config[name] for name in ("n_layer", "n_head", "n_embd")} | {
        "n_positions": config["block_size"]
    }
    transformers.GPT2Config(activation_function="gelu", **sizes, **rates).save_pretrained(FOLDER / "model")
    tokenizer.save_pretrained(FOLDER / "model")


def write_windows(recipe: dict[str, Any], seed: int, tokenizer: Tokenizer) -> None:
    """FOLDER/train.npy and validation.npy: rows (N, T) of token ids in the order in which our run takes them,
    padded with -1."""
    length, needed = recipe["config"]["block_size"], recipe["steps"] * recipe["batch"]
    args = train_pretrain.Args(
        dataset_name=[str(FOLDER / "train.jsonl")], eval_dataset_name=[str(FOLDER / "validation.jsonl")],
        dataset_cache_dir=str(WORK / "cache"), dataset_num_proc=1, seed=seed,
    )  # fmt: skip
    train, held_out = load_data(args, accelerate.Accelerator(), train_pretrain.encode, tokenizer)
    train, held_out = chunk(train, length), chunk(held_out, length)
    for name, data, count in (("train", train, needed), ("validation", held_out, len(held_out))):
        rows = np.full((count, length), -1, np.int64)
        for i in range(count):
            ids = data[i][0]["input_ids"]
            rows[i, : len(ids)] = ids
        np.save(FOLDER / f"{name}.npy", rows)


def our_words(recipe: dict[str, Any], seed: int) -> list[Any]:
    return [
        "--config_name", FOLDER / "model", "--dataset_name", FOLDER / "train.jsonl",
        "--eval_dataset_name", FOLDER / "validation.jsonl", "--max_length", recipe["config"]["block_size"],
        "--per_device_train_batch_size", recipe["batch"], "--max_steps", recipe["steps"], "--eval_steps", recipe["eval_steps"],
        "--lr_scheduler_type", "cosine", "--learning_rate", LEARNING_RATE, "--min_lr_ratio", 0.1, "--warmup_steps", WARM_UP_STEPS,
        "--weight_decay", 0.1, "--adam_beta2", 0.99, "--seed", seed, "--output_dir", FOLDER / "ours",
    ]  # fmt: skip


def write_start(recipe: dict[str, Any], seed: int) -> None:
    """FOLDER/start: the weights that ours starts from."""
    still = ["--max_steps", 1, "--learning_rate", 0, "--eval_steps", 0, "--output_dir", FOLDER / "start"]
    ours("train_pretrain.py", *our_words(recipe, seed), *still)()


def sides_of(
    recipe: dict[str, Any], nanogpt: str | None, seed: int, vocab_size: int
) -> dict[str, Callable[[], Result]]:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"} if torch.cuda.is_available() else None
    sides = {"ours": ours("train_pretrain.py", *our_words(recipe, seed), env=env)}
    for name, weights in (("nanoGPT", None), (SAME_WEIGHTS, str(FOLDER / "start"))) if nanogpt else ():
        sides[name] = peer(
            "nanogpt", Path(nanogpt).resolve(), str(FOLDER / "train.npy"), recipe["steps"], recipe["batch"], "peer_nanogpt.py",
            config=recipe["config"] | {"vocab_size": vocab_size}, held_out=str(FOLDER / "validation.npy"), seed=seed,
            learning_rate=LEARNING_RATE, warmup=WARM_UP_STEPS, eval_steps=recipe["eval_steps"], weights=weights,
        )  # fmt: skip
    return sides


def losses(
    title: str, recipe: dict[str, Any], nanogpt: str | None, seeds: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Whole runs, a seed after the other: the validation losses of each, [step, loss], and the lowest."""
    curves: dict[str, list[list[list[float]]]] = {}
    for seed in range(seeds):
        write_windows(recipe, seed, tokenizer)
        write_start(recipe, seed)
        for name, side in sides_of(recipe, nanogpt, seed, len(tokenizer)).items():
            curve = side().get("evaluations")
            if name == "ours":
                lines = map(json.loads, (FOLDER / "ours" / "metrics.jsonl").read_text().splitlines())
                curve = [[line["step"], line["eval_loss"]] for line in lines if "eval_loss" in line]
            curves.setdefault(name, []).append(curve)
            print(f"seed {seed}, {name}: {lowest(curve):.4f}", file=sys.stderr, flush=True)
    found = {name: [lowest(curve) for curve in of_seeds] for name, of_seeds in curves.items()}
    rows = [
        "| validation loss | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + " |",
        "|---" * (seeds + 1) + "|",
    ]
    rows += [
        f"| {name} | " + " | ".join(f"{loss:.4f}" for loss in values) + " |" for name, values in found.items()
    ]
    markdown = "\n".join([f"### {title}", "", *rows, "", f"nanoGPT's README: {recipe['published']}.", ""])
    return {
        "title": title,
        "published": recipe["published"],
        "val_loss": found,
        "curves": curves,
        "markdown": markdown,
    }


def lowest(curve: list[list[float]]) -> float:
    return min(loss for _, loss in curve)


def main() -> None:
    args = arguments(
        __doc__,
        text={"required": True},
        nanogpt={"help": "folder of a checkout"},
        recipe={"choices": RECIPES, "default": "cpu"},
    )
    recipe, name = RECIPES[args.recipe], f"Shakespeare by characters, {args.recipe}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer = write_text(Path(args.text))
    write_model(recipe["config"], tokenizer)
    tables = []
    if wanted(args.only, "loss"):
        tables.append(losses(f"{name}: loss", recipe, args.nanogpt, args.rounds, tokenizer))
        if args.recipe == "cpu":
            draw(
                "shakespeare",
                "Shakespeare by characters",
                "step",
                "validation loss",
                tables[0]["curves"],
                ylim=(1.8, 2.8),
            )
    if args.nanogpt and wanted(args.only, "speed"):
        short = recipe | {"steps": SPEED_STEPS, "eval_steps": 0}
        write_windows(short, 0, tokenizer)
        tokens = [recipe["batch"] * recipe["config"]["block_size"]] * SPEED_STEPS
        write_start(short, 0)
        sides = sides_of(short, args.nanogpt, 0, len(tokenizer))
        tables.append(
            compare(f"{name}: speed", "tokens/s", sides, args.rounds, amounts=lambda side, found: tokens)
        )
    save("shakespeare", tables, only=[args.recipe])


if __name__ == "__main__":
    main()
