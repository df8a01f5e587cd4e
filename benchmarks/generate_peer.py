"""Sampling alone: `common.sampling.sample` and generate(), alternately in one process (called by grpo.py).

python benchmarks/generate_peer.py model prompts.jsonl result.json rounds
"""

from collections.abc import Callable
import json
import os
from pathlib import Path
import sys
import time

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import accelerate  # noqa: E402
from common.args import CommonArgs  # noqa: E402
from common.model import load_model, load_tokenizer  # noqa: E402
from common.sampling import sample  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

PROMPTS, G, NEW = 16, 8, 56


def main() -> None:
    model_dir, prompt_file, result, rounds = sys.argv[1:]
    os.chdir(ROOT)
    args = CommonArgs(model_name_or_path=model_dir)
    tokenizer = load_tokenizer(args)
    model = load_model(args, accelerate.Accelerator(cpu=True), tokenizer)
    stop_ids = model.stop_ids
    peer = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    assert set(stop_ids) <= set(peer.generation_config.eos_token_id), "generate() would not stop"
    rows = [json.loads(line)["prompt"] for line in Path(prompt_file).read_text().splitlines()]

    def ids_of(turn: int) -> list[list[int]]:
        some = rows[turn * PROMPTS : (turn + 1) * PROMPTS]
        encoded = tokenizer.apply_chat_template(
            some, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return [ids for ids in encoded["input_ids"] for _ in range(G)]

    def ours(ids: list[list[int]], turn: int) -> list[int]:
        keys = [(0, turn, i) for i in range(len(ids))]
        found = sample(model, ids, keys, max_new_tokens=NEW)
        return [len(completion.ids) for completion in found]

    def generate(ids: list[list[int]], turn: int, **options) -> list[int]:
        torch.manual_seed(turn)
        longest = max(map(len, ids))
        pad = tokenizer.pad_token_id
        padded = torch.tensor([[pad] * (longest - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        with torch.no_grad():
            out = peer.generate(
                input_ids=padded, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW, disable_compile=True, **options,
            )  # fmt: skip
        new = out[:, longest:].tolist()
        return [next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row)) for row in new]

    sides: dict[str, Callable[[list[list[int]], int], list[int]]] = {
        "ours": ours,
        "generate()": generate,
        "generate(), static cache": lambda ids, turn: generate(ids, turn, cache_implementation="static"),
    }
    found: dict[str, list[dict]] = {name: [] for name in sides}
    for turn in range(-1, int(rounds)):  # the first is a warm-up
        ids = ids_of(max(turn, 0))
        for name, side in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            lengths = side(ids, turn + 1)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= 0:
                mean = sum(lengths) / len(lengths)
                found[name].append(
                    {"wall": wall, "cpu": cpu, "tokens": sum(lengths), "mean": mean, "longest": max(lengths)}
                )
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
