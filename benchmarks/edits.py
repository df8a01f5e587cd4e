"""The two edits of the README, each beside the script that it edits, in a trial of three seeds.

    python benchmarks/edits.py

Copies the script, applies docs/edits/*.diff with `git apply`, compares both on the demo with tools.trial, writes
benchmarks/results/edits.json.
"""

import json
import shutil
import subprocess
import sys
from typing import Any

from compare import ROOT, machine

# edit -> (script, the model to start from)
EDITS = {
    "weighted": ("train_sft.py", "data/base_model"),
    "only_better": ("train_grpo.py", "outputs/edits/sft/seed0"),
}


def main() -> None:
    work = ROOT / "outputs" / "edits"
    shutil.rmtree(work, ignore_errors=True)
    found: dict[str, Any] = {}
    for edit, (script, model) in EDITS.items():
        copy = ROOT / f"train_{edit}.py"
        words = [script, copy.name, "--metric", "exact_number", "--output_dir", "outputs/edits"]
        words += ["--", "--config", f"data/configs/{script[6:-3]}.yaml", "--model_name_or_path", model]
        try:
            shutil.copyfile(ROOT / script, copy)
            subprocess.run(["git", "apply", f"docs/edits/{edit}.diff"], cwd=ROOT, check=True)
            subprocess.run(
                [sys.executable, "-m", "tools.trial", *words], cwd=ROOT
            )  # its exit code is the verdict
            found[edit] = json.loads((work / "trial.json").read_text())
            (work / "trial.json").unlink()
        finally:
            copy.unlink()
    found["machine"] = machine()
    (ROOT / "benchmarks" / "results" / "edits.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
