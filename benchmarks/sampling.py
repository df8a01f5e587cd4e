"""Sampling beside transformers' own: the same model, prompts and limits, alternating rounds, medians.

    python benchmarks/sampling.py                           # outputs/sft (else data/base_model), 16 prompts x 8 completions
    python benchmarks/sampling.py --hidden_size 384         # a random model of about 20M parameters
    python benchmarks/sampling.py --device cuda --model Qwen/Qwen3-0.6B --prompts 8 32 --max_new_tokens 512

On a GPU `generate_batch` (continuous batching) runs too, and the model is bfloat16. Figures are useful tokens, up to and with
the stop token, per second: wall clock on a GPU, and on a CPU the processor time of this process, which other processes
disturb less.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from common.chat import stop_token_ids  # noqa: E402
from common.generate import sample  # noqa: E402
from common.model import load_tokenizer, wrap  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402

Side = Callable[[int], int]  # number of a round -> useful tokens that it sampled


def useful(rows: list[list[int]], stop_ids: list[int]) -> int:
    return sum(next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row)) for row in rows)


def ours(lm: Any, prompts: list[list[int]], stop_ids: list[int], max_new_tokens: int) -> Side:
    model = wrap(lm)

    def run(number: int) -> int:
        keys = [(number, i) for i in range(len(prompts))]
        options = {"stop_ids": stop_ids, "max_new_tokens": max_new_tokens, "batch_size": len(prompts)}
        return sum(len(completion.ids) for completion in sample(model, prompts, keys, **options))

    return run


def _settings(stop_ids: list[int], max_new_tokens: int) -> transformers.GenerationConfig:
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": max_new_tokens}
    return transformers.GenerationConfig(**options, eos_token_id=stop_ids, pad_token_id=stop_ids[0])


def generate(lm: Any, prompts: list[list[int]], stop_ids: list[int], max_new_tokens: int) -> Side:
    """`generate()` on the left-padded batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=lm.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=lm.device)
    settings = _settings(stop_ids, max_new_tokens)

    def run(number: int) -> int:
        torch.manual_seed(number)
        found = lm.generate(ids, attention_mask=mask, generation_config=settings)
        return useful(found[:, longest:].tolist(), stop_ids)

    return run


def generate_batch(lm: Any, prompts: list[list[int]], stop_ids: list[int], max_new_tokens: int) -> Side:
    """transformers' continuous batching."""
    settings = _settings(stop_ids, max_new_tokens)

    def run(number: int) -> int:
        torch.manual_seed(number)
        found = lm.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        return useful([output.generated_tokens for output in found.values()], stop_ids)

    return run


def compare(sides: dict[str, Side], rounds: int, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Median tokens per second of each side, and the median over rounds of the first one's ratio to it; after a warm-up."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            began = clock()
            tokens = sides[name](number % 2**31)
            if number >= 0:
                speeds[name].append(tokens / (clock() - began))
    first = next(iter(speeds.values()))
    table = {}
    for name, found in speeds.items():
        ratios = sorted(a / b for a, b in zip(first, found, strict=True))
        table[name] = {
            "tokens_per_s": round(statistics.median(found)),
            "range": [round(min(found)), round(max(found))],
            "ours_is_faster": round(statistics.median(ratios), 2),
            "ratio_range": [round(ratios[0], 2), round(ratios[-1], 2)],
        }
    return table


def demo_prompts(tokenizer: Any, count: int, completions: int) -> list[list[int]]:
    """Prompts of GRPO's demo, each as often as it gets completions."""
    with (ROOT / "data" / "grpo" / "train.jsonl").open() as file:
        rows = [json.loads(line)["prompt"] for line, _ in zip(file, range(count), strict=False)]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    ids = [list(tokenizer.apply_chat_template(row, **options)["input_ids"]) for row in rows]
    return [prompt for prompt in ids for _ in range(completions)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trained = ROOT / "outputs" / "sft"
    default = trained if (trained / "config.json").exists() else ROOT / "data" / "base_model"
    parser.add_argument("--model", default=str(default))
    parser.add_argument("--hidden_size", type=int, default=0, help="instead: a random Llama with the model's tokenizer")
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16])
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--max_new_tokens", type=int, default=56)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    device = torch.device(args.device)
    tokenizer = load_tokenizer(args.model)

    def load() -> Any:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if not args.hidden_size:
            return transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
        torch.manual_seed(0)
        D = args.hidden_size
        sizes = {"hidden_size": D, "intermediate_size": 4 * D, "num_hidden_layers": args.num_layers}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=D // 64, vocab_size=8192, initializer_range=0.02)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()

    lm = load()
    stop_ids = stop_token_ids(tokenizer, lm.generation_config)
    if args.hidden_size:  # uneven lengths from random weights: a token in 25 ends a completion
        stop_ids = list(range(8192 // 25))
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for count in args.prompts:
        prompts = demo_prompts(tokenizer, count, args.completions)
        makers = {"ours": ours, "generate": generate}
        if device.type == "cuda" and hasattr(lm, "generate_batch"):
            makers["generate_batch"] = generate_batch
        with torch.no_grad():
            sides = {name: make(load(), prompts, stop_ids, args.max_new_tokens) for name, make in makers.items()}
            table = compare(sides, args.rounds, clock)
        facts = {"rows": len(prompts), "parameters": sum(p.numel() for p in lm.parameters()), "device": args.device}
        facts |= {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps(facts), flush=True)
        for name, figures in table.items():
            print(f"  {name:<15}", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
