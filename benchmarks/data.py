"""The path of the data, beside `datasets.map` and a padding collator, in one run.

    python benchmarks/data.py                  # the table of docs/data.md, a few minutes
    python benchmarks/data.py --corpus_mb 500  # and a large corpus: time, resident memory, start from the cache

Both sides read the same file, tokenise it with two processes, and make every micro-batch of one epoch; rounds
alternate, the figures are medians. Writes benchmarks/data.json and benchmarks/data.md.
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # both sides use two processes instead

import accelerate  # noqa: E402
from common.args import CommonArgs  # noqa: E402
from common.collators import Windows  # noqa: E402
from common.data import Tokenizer, chunk, load_data  # noqa: E402
from common.model import load_tokenizer  # noqa: E402
import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import train_pretrain  # noqa: E402
import train_sft  # noqa: E402

PROCESSES, BATCH, MAX_LENGTH = 2, 8, 1024


def write_chats(path: Path, rows: int) -> None:
    """Chats of one to four exchanges with log-normal lengths, as people's chats have them."""
    rng = random.Random(0)
    words = (ROOT / "data" / "pretrain" / "train.txt").read_text().split()
    with path.open("w") as file:
        for _ in range(rows):
            messages = []
            for _ in range(rng.choice((1, 1, 2, 4))):
                for role, mean in (("user", 3.0), ("assistant", 4.0)):
                    at, n = rng.randrange(len(words)), max(1, min(400, int(rng.lognormvariate(mean, 0.8))))
                    messages.append({"role": role, "content": " ".join(words[at : at + n]) or "yes"})
            file.write(json.dumps({"messages": messages}) + "\n")


def write_text(path: Path, megabytes: int) -> None:
    """Documents of a few hundred words, one a line."""
    rng = random.Random(0)
    words = (ROOT / "data" / "pretrain" / "train.txt").read_text().split()
    written = 0
    with path.open("w") as file:
        while written < megabytes * 10**6:
            at = rng.randrange(len(words))
            text = json.dumps({"text": " ".join(words[at : at + rng.randrange(50, 600)])}) + "\n"
            written += file.write(text)


# --- ours ---------------------------------------------------------------------------------------------------


def ours(kind: str, path: Path, tokenizer: Tokenizer, work: Path) -> tuple[float, float, int]:
    """(seconds to tokenise and cache, seconds to make all micro-batches, useful tokens)."""
    accelerator = accelerate.Accelerator(cpu=True)
    script = train_sft if kind == "chats" else train_pretrain
    args = script.Args(
        dataset_name=[str(path)],
        dataset_cache_dir=str(work),
        dataset_num_proc=PROCESSES,
        max_length=MAX_LENGTH,
        per_device_train_batch_size=BATCH,
    )
    began = time.perf_counter()
    train, _ = load_data(args, accelerator, script.encode, tokenizer)
    tokenised = time.perf_counter()
    if kind == "text":
        train = chunk(train, MAX_LENGTH)
    windows = Windows(args, accelerator, train)
    tokens = sum(batch["input_ids"].numel() for step in range(len(windows)) for batch in windows[step])
    return tokenised - began, time.perf_counter() - tokenised, tokens


# --- the peer -----------------------------------------------------------------------------------------------


def peer(kind: str, path: Path, tokenizer: Tokenizer, work: Path) -> tuple[float, float, int]:
    """The same with datasets.map and a collator that pads: what a trainer does by default."""

    def encode_chat(row: dict) -> dict:
        found = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = found["input_ids"][:MAX_LENGTH], found["assistant_masks"][:MAX_LENGTH]
        return {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}

    def encode_texts(rows: dict) -> dict:
        found = tokenizer(rows["text"], add_special_tokens=False, return_attention_mask=False).input_ids
        return {"input_ids": [ids + [tokenizer.eos_token_id] for ids in found]}

    def rows_of(rows: dict) -> dict:  # end to end, cut into rows, as in transformers' run_clm.py
        stream = [token for ids in rows["input_ids"] for token in ids]
        return {"input_ids": [stream[i : i + MAX_LENGTH] for i in range(0, len(stream), MAX_LENGTH)]}

    def collate(rows: list[dict]) -> dict:
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(values: list[int], filler: int) -> list[int]:
            return values + [filler] * (longest - len(values))

        ids = torch.tensor([padded(row["input_ids"], tokenizer.pad_token_id) for row in rows])
        mask = torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows])
        labels = torch.tensor([padded(row.get("labels", row["input_ids"]), -100) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    began = time.perf_counter()
    table = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(work))
    if kind == "chats":
        table = table.map(encode_chat, remove_columns=table.column_names, num_proc=PROCESSES)
    else:
        table = table.map(encode_texts, batched=True, remove_columns=table.column_names, num_proc=PROCESSES)
        table = table.map(rows_of, batched=True, num_proc=PROCESSES)
    tokenised = time.perf_counter()
    loader = torch.utils.data.DataLoader(table, BATCH, shuffle=True, collate_fn=collate)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in loader)
    return tokenised - began, time.perf_counter() - tokenised, tokens


# --- a large corpus ------------------------------------------------------------------------------------------


def large_corpus(megabytes: int) -> dict[str, float]:
    """Tokenise a large corpus, and start a run from the cache beside one on a small corpus."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_text(work / "large.jsonl", megabytes)
        write_text(work / "small.jsonl", 1)
        common = "--tokenizer_name data/base_model --hidden_size 32 --num_layers 1 --num_heads 2 --max_length 256 --max_steps 1"
        common += " --eval_steps 0 --save_steps 0 --per_device_train_batch_size 1 --overwrite_output_dir"
        seconds = {}
        for name, file in (
            ("first", "large"),
            ("small_first", "small"),
            ("again", "large"),
            ("small", "small"),
        ):
            words = f"{common} --dataset_name {work / file}.jsonl --dataset_cache_dir {work / 'cache'} --output_dir {work / 'out'}"
            code = "import resource, runpy, sys; runpy.run_path('train_pretrain.py', run_name='__main__');"
            code += "print('RSS', *(resource.getrusage(w).ru_maxrss / 2**20 for w in (0, -1)))"
            began = time.perf_counter()
            found = subprocess.run(
                [sys.executable, "-c", code, *words.split()], cwd=ROOT, capture_output=True, text=True
            )
            if found.returncode:
                raise SystemExit(found.stdout + found.stderr)
            seconds[name] = time.perf_counter() - began
            if name == "first":
                main, worker = map(float, found.stdout.split("RSS")[1].split()[:2])
        return {
            "megabytes": megabytes,
            "first_run_s": round(seconds["first"], 1),
            "resident_gib_main": round(main, 2),
            "resident_gib_largest_worker": round(worker, 2),
            "again_s": round(seconds["again"], 1),
            "small_corpus_again_s": round(seconds["small"], 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--text_mb", type=int, default=10)
    parser.add_argument("--corpus_mb", type=int, default=0)
    args = parser.parse_args()
    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(CommonArgs(), "data/base_model")
    results: dict = {"rounds": args.rounds, "processes": PROCESSES, "batch": BATCH, "max_length": MAX_LENGTH}
    results["versions"] = {m.__name__: m.__version__ for m in (torch, transformers, datasets, accelerate)}
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    sides: dict[str, Callable] = {"ours": ours, "datasets.map": peer}
    with tempfile.TemporaryDirectory() as folder:
        for kind, write, size in (("chats", write_chats, args.chats), ("text", write_text, args.text_mb)):
            path = Path(folder, f"{kind}.jsonl")
            write(path, size)
            rounds: dict[str, list] = {name: [] for name in sides}
            for round_number in range(args.rounds):
                for name in list(sides) if round_number % 2 == 0 else list(sides)[::-1]:
                    work = Path(folder, "work")
                    rounds[name].append(sides[name](kind, path, tokenizer, work))
                    shutil.rmtree(work, ignore_errors=True)
            table = {}
            for name, found in rounds.items():
                table[name] = {
                    "tokenise_s": round(statistics.median(f[0] for f in found), 2),
                    "tokenise_s_range": [round(g(f[0] for f in found), 2) for g in (min, max)],
                    "batches_tokens_per_s": round(statistics.median(f[2] / f[1] for f in found)),
                    "tokens": found[0][2],
                }
            table["ratio_tokenise"] = round(
                statistics.median(
                    p[0] / o[0] for o, p in zip(rounds["ours"], rounds["datasets.map"], strict=True)
                ),
                2,
            )
            table["ratio_batches"] = round(
                table["ours"]["batches_tokens_per_s"] / table["datasets.map"]["batches_tokens_per_s"], 1
            )
            results[kind] = table
            print(kind, json.dumps(table), flush=True)
    if args.corpus_mb:
        results["corpus"] = large_corpus(args.corpus_mb)
        print(json.dumps(results["corpus"]), flush=True)

    out = ROOT / "benchmarks" / "data.json"
    if out.exists() and "corpus" not in results:
        results |= {k: v for k, v in json.loads(out.read_text()).items() if k == "corpus"}
    out.write_text(json.dumps(results, indent=1) + "\n")
    lines = ["| work | ours | datasets.map, padding collator | ratio |", "|---|---|---|---|"]
    for kind in ("chats", "text"):
        o, p = results[kind]["ours"], results[kind]["datasets.map"]
        lines.append(
            f"| {kind}: tokenise and cache | {o['tokenise_s']} s | {p['tokenise_s']} s | {results[kind]['ratio_tokenise']}× |"
        )
        lines.append(
            f"| {kind}: cache to micro-batches | {o['batches_tokens_per_s']:,} tokens/s | {p['batches_tokens_per_s']:,} tokens/s "
            f"| {results[kind]['ratio_batches']}× |"
        )
    (ROOT / "benchmarks" / "data.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
