"""The two edits of the README, each beside the script that it edits: right answers of the demo, three seeds.

    python benchmarks/edits.py

Copies the script, applies docs/edits/*.diff with `git apply`, runs both on the demo, writes
benchmarks/results/edits.json.
"""

import json
from pathlib import Path
import shutil
import subprocess
import sys
from typing import Any

from compare import ROOT, machine

SEEDS = (0, 1, 2)
# edit -> (script, the model to start from)
EDITS = {"weighted": ("train_sft.py", "data/base_model"), "only_better": ("train_grpo.py", "{work}/sft_0")}


def right_answers(script: str, model: str, seed: int, output: Path, demo: str) -> float:
    words = [
        script,
        "--config",
        f"data/configs/{demo}.yaml",
        "--model_name_or_path",
        model,
        "--seed",
        str(seed),
    ]
    subprocess.run([sys.executable, *words, "--output_dir", str(output)], cwd=ROOT, check=True)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row["eval_exact_number"] for row in rows if "eval_exact_number" in row][-1]


def main() -> None:
    work = ROOT / "outputs" / "edits"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found: dict[str, Any] = {}
    for edit, (script, model) in EDITS.items():
        copy = ROOT / f"train_{edit}.py"
        try:
            shutil.copyfile(ROOT / script, copy)
            subprocess.run(["git", "apply", f"docs/edits/{edit}.diff"], cwd=ROOT, check=True)
            stage, model = script[6:-3], model.format(work=work)
            found[edit] = {
                name: [right_answers(file, model, seed, work / f"{name}_{seed}", stage) for seed in SEEDS]
                for name, file in ((stage, script), (edit, copy.name))
            }
        finally:
            copy.unlink()
    found["machine"] = machine()
    (ROOT / "benchmarks" / "results" / "edits.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
