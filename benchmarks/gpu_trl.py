"""The sections of gpu.py that run whole processes: the fixed GRPO task, and TRL itself beside ours from carried wheels.

A process of each side, one after the other: what a user starts, with a clock at the end of each step (ours.py, peers.py). TRL is
found where it is installed, or in the wheels of carry_trl.sh, which are put into a folder of their own.
"""

import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

from compare import HERE, ROOT, rate
from gpu_bench import Bench
import grpo_task

NAMES = ("trl", "datasets", "dill", "multiprocess")


def install(wheels: Path, target: Path) -> None:
    """Without an index and without what they need: that comes with the machine. Raises RuntimeError."""
    words = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--find-links",
        str(wheels),
        "--target",
        str(target),
    ]
    done = subprocess.run([sys.executable, *words, *NAMES], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"TRL from {wheels}: {' '.join(done.stderr.split())[-200:]}")


def have_trl(bench: Bench) -> str | None:
    """None, or why TRL cannot run. With wheels, it is put where the processes find it."""
    if bench.wheels is None:
        missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
        return f"{' and '.join(missing)} not installed, and no --wheels" if missing else None
    target = Path(tempfile.gettempdir()) / f"gpu_trl_{os.getpid()}"
    if str(target) not in os.environ.get("PYTHONPATH", ""):
        install(bench.wheels, target)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", "import trl, datasets"], capture_output=True, text=True)
    return " ".join(done.stderr.split())[-160:] if done.returncode else None


def left(bench: Bench) -> float:
    return max(1.0, bench.deadline - time.monotonic())


def task(bench: Bench) -> None:
    """Ours, whatever the time; TRL's side, which samples by generate(), where there is time for it."""
    precision = "bf16" if bench.cuda else "no"
    before = grpo_task.evaluate(ROOT / "data" / "base_model")
    for name in ("ours", "TRL"):
        with bench.side("fixed GRPO task", name) as row:
            if name == "TRL" and (reason := have_trl(bench)):
                raise RuntimeError(reason)
            found = grpo_task.run_side(name, 0, precision, 3 if bench.tiny else 60, timeout=left(bench))
            row.update({key: value for key, value in found.items() if key != "side"} | {"right before": before})
            row["peak GiB"] = ""  # of another process


# --- SFT on uneven chats ------------------------------------------------------------------------------------------------


def write_inputs(bench: Bench, folder: Path) -> int:
    """A model of random weights with a tokenizer, and chats in the order in which our run takes them. Returns the steps."""
    from prepare import TEMPLATE, Words, chat

    from common.data.order import Order  # isort: skip
    import transformers

    steps, batch = bench.sizes["trl"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data" / "base_model")
    tokenizer.chat_template = TEMPLATE
    bench.chat_model().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    words = Words(tokenizer, 0)
    rows = [chat(words) for _ in range(steps * batch)]
    order = Order([len(rows)], 0)
    in_order = [rows[order[i]] for i in range(len(rows))]
    for name, these in (("chats", rows), ("ordered", in_order)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in these))
    sizes = [
        len(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True).input_ids) for row in in_order
    ]
    (folder / "tokens.json").write_text(json.dumps([sum(sizes[i : i + batch]) for i in range(0, len(sizes), batch)]))
    return steps


def sft_trl(bench: Bench) -> None:
    """The same chats, order, batches, learning rate and bf16 arithmetic on float32 weights: train_sft.py and TRL's SFTTrainer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = write_inputs(bench, folder)
        tokens, batch = json.loads((folder / "tokens.json").read_text()), bench.sizes["trl"][1]
        first = None
        for side in ("ours", "TRL"):
            with bench.side("SFT beside TRL itself", side) as row:
                if side == "TRL" and (reason := have_trl(bench)):
                    raise RuntimeError(reason)
                found = _process(bench, side, folder, steps, batch)
                first = first or found["loss"][0]
                row |= {
                    "chats": batch,
                    "useful tokens/s": round(rate(found, tokens)),
                    "first loss": round(found["loss"][0], 4),
                }
                row["from ours' loss"] = f"{abs(found['loss'][0] - first):.1e}"
                row["peak GiB"] = round(found.get("peak_gpu_gib", 0.0), 2)
                if found["batches"]:
                    row["useful"] = (
                        f"{sum(b['useful'] for b in found['batches']) / sum(b['padded'] for b in found['batches']):.0%}"
                    )


def _process(bench: Bench, side: str, folder: Path, steps: int, batch: int) -> dict[str, Any]:
    """What its clock says. Raises RuntimeError with the end of its output."""
    result, model = folder / f"{side}.json", folder / "model"
    half = {"ACCELERATE_MIXED_PRECISION": "bf16" if bench.cuda else "no"}
    if side == "ours":
        words = "--learning_rate 1e-5 --lr_scheduler_type constant --warmup_steps 0 --weight_decay 0 --max_grad_norm 1 --eval_steps 0"
        words += (
            f" --save_steps 0 --logging_steps 1 --num_samples 0 --dataset_num_proc 1 --max_length 1024 --max_steps {steps}"
        )
        words += (
            f" --per_device_train_batch_size {batch} --model_name_or_path {model} --dataset_name {folder / 'chats.jsonl'}"
        )
        words += f" --output_dir {folder / 'out'} --dataset_cache_dir {folder / 'cache'}"
        command = [HERE / "ours.py", result, "train_sft.py", *words.split()]
    else:
        options = {"learning_rate": 1e-5, "bf16": bench.cuda, "gradient_checkpointing": False, "use_cpu": not bench.cuda}
        spec = {
            "kind": "trl_sft",
            "model": str(model),
            "rows": str(folder / "ordered.jsonl"),
            "steps": steps,
            "batch": batch,
        }
        (folder / "spec.json").write_text(json.dumps(spec | {"options": options, "work": str(folder / "trl")}))
        command, half = [HERE / "peers.py", result, folder / "spec.json"], {}
    env = os.environ | half
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=left(bench)
    )
    if done.returncode:
        raise RuntimeError(" ".join((done.stderr or done.stdout).split())[-300:])
    return json.loads(result.read_text())
