"""The embedded demo, all four stages, several seeds: what the table of docs/demo.md is made of.

    python benchmarks/demo.py --seeds 0 1 2

Runs each stage as a user does (`python train_*.py`), from that seed's own previous stage, scored
on the test prompts (which no default looks at), writes benchmarks/demo.json and prints the table.
"""

import argparse
import json
import os
from pathlib import Path
import platform
import subprocess
import time

ROOT = Path(__file__).resolve().parents[1]
CHAT, ZERO, BASE = (f"data/prompts/{name}_test.jsonl" for name in ("chat", "zero", "base"))


def stages(seed: int, work: Path) -> dict[str, list[str]]:
    """name -> arguments; the order is that of the chain."""
    out = {
        name: str(work / f"{name}_{seed}")
        for name in ("pretrain", "sft", "dpo", "dpo_sft_term_only", "grpo", "grpo_zero")
    }

    def run(name: str, script: str, config: str, start: str | None, prompts: str, *more: str) -> list[str]:
        model = ["--model_name_or_path", out[start]] if start else []
        words = [script, "--config", f"data/configs/{config}.yaml", *model, "--eval_prompts", prompts, *more]
        return [*words, "--seed", str(seed), "--output_dir", out[name], "--overwrite_output_dir"]

    return {
        "pretrain": run("pretrain", "train_pretrain.py", "pretrain", None, BASE),
        "sft": run("sft", "train_sft.py", "sft", "pretrain", CHAT),
        "dpo": run("dpo", "train_dpo.py", "dpo", "sft", CHAT),
        "dpo_sft_term_only": run("dpo_sft_term_only", "train_dpo.py", "dpo", "sft", CHAT, "--beta", "1e-6"),
        "grpo": run("grpo", "train_grpo.py", "grpo", "sft", CHAT),
        "grpo_zero": run("grpo_zero", "train_grpo.py", "grpo_zero", "pretrain", ZERO),
    }


def measure(name: str, words: list[str]) -> dict:
    began = time.perf_counter()
    run = subprocess.run(["accelerate", "launch", *words], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(words)}\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    output = Path(words[words.index("--output_dir") + 1])
    evals = [
        row
        for row in map(json.loads, (output / "metrics.jsonl").open())
        if any(k.startswith("eval_") for k in row)
    ]
    return {
        "stage": name,
        "seconds": round(time.perf_counter() - began, 1),
        "before": evals[0],
        "after": evals[-1],
    }


def table(results: list[dict]) -> str:
    """Markdown: one line per stage and metric, one column per seed."""
    shown = {
        "pretrain": {"eval_perplexity": "perplexity", "eval_exact_number": "right, working forced"},
        "sft": {"eval_exact_number": "right answers"},
        "dpo": {
            "eval_polite": "preferred style, greedy",
            "eval_polite_t0.7": "preferred style, temperature 0.7",
            "eval_rewards/accuracies": "reward accuracy",
            "eval_logps/rejected": "log-probability of the rejected answer",
            "eval_exact_number": "right answers",
        },
        "grpo": {"eval_exact_number": "right answers"},
        "grpo_zero": {"eval_exact_number": "right answers"},
    }
    shown["dpo_sft_term_only"] = shown["dpo"]
    seeds = sorted({result["seed"] for result in results})
    lines = [
        "| stage | held-out | " + " | ".join(f"seed {seed}" for seed in seeds) + " |",
        "|---|---|" + "---|" * len(seeds),
    ]
    for stage, metrics in shown.items():
        runs = [
            result
            for seed in seeds
            for result in results
            if result["seed"] == seed and result["stage"] == stage
        ]
        for metric, title in metrics.items():
            cells = [f"{r['before'][metric]:.3g} → {r['after'][metric]:.3g}" for r in runs]
            lines.append(f"| {stage} | {title} | " + " | ".join(cells) + " |")
        lines.append(f"| {stage} | wall time | " + " | ".join(f"{r['seconds']:.0f} s" for r in runs) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("outputs/demo"), help="folder of the runs")
    parser.add_argument("--stages", nargs="+", help="only these; the others' runs and results are kept")
    args = parser.parse_args()
    results = []
    for seed in args.seeds:
        for name, words in stages(seed, args.work).items():
            if args.stages is None or name in args.stages:
                results.append({"seed": seed, **measure(name, words)})
                print(json.dumps(results[-1]), flush=True)
    here = Path(__file__).parent
    file = here / "demo.json"
    earlier = json.loads(file.read_text())["results"] if file.exists() else []
    merged = {(result["seed"], result["stage"]): result for result in [*earlier, *results]}
    results = [merged[key] for key in sorted(merged)]
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    file.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
