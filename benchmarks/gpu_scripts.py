"""The sections of gpu.py that run whole processes, as a user starts them: tests, scripts, the fixed GRPO
task, TRL itself."""

from concurrent.futures import Future, ThreadPoolExecutor
import json
import os
from pathlib import Path
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from compare import HERE, ROOT, failure, our_words, rate
from gpu_bench import Bench, Row
import grpo_task

QUIET = "--eval_steps 0 --num_samples 0 --logging_steps 1 --dataset_num_proc 1"
SCRIPTS = {
    "pretrain": "--hidden_size 256 --num_layers 4 --num_heads 4 --max_length 512 --learning_rate 1e-3",
    "sft": "--model_name_or_path data/base_model --learning_rate 1e-4 --max_length 512",
    "dpo": "--model_name_or_path data/base_model --learning_rate 1e-5 --max_length 512",
    "grpo": f"--config {HERE / 'grpo_task.yaml'}",
}


class Variant(NamedTuple):
    precision: str = "no"
    words: str = ""
    on_cpu: bool = False
    beside: tuple[str, ...] = ()  # whose losses it must come near
    is_killed: bool = False


BOTH = ("float32, CPU", "float32")
VARIANTS = {
    "float32, CPU": Variant(on_cpu=True),
    "LoRA, float32, CPU": Variant("no", "--use_peft", on_cpu=True),
    "float32": Variant(beside=BOTH[:1]),
    "bf16": Variant("bf16", beside=BOTH),
    "fp16": Variant("fp16", beside=BOTH),
    "bf16, compiled": Variant("bf16", "--torch_compile", beside=BOTH),
    "bf16, LoRA": Variant("bf16", "--use_peft", beside=("LoRA, float32, CPU",)),
    "float32, resumed after kill -9": Variant(beside=BOTH, is_killed=True),
}


def tests(bench: Bench) -> None:
    """What they print is in gpu_tests.log, also when their time is over."""
    files = "tests/model/test_attention.py tests/model/test_lm_head.py tests/sampling/test_cuda_graph.py"
    words = f"-m pytest -v -o addopts= -m gpu {files}" + " --collect-only" * (not bench.cuda)
    file = bench.file.with_name("gpu_tests.log")
    with bench.side("tests", "pytest -m gpu") as row:
        with file.open("w") as log:
            done = subprocess.run([sys.executable, *words.split()], cwd=ROOT, stdout=log, stderr=log)
        printed = file.read_text()
        row["result"] = printed.strip().splitlines()[-1].strip("= ")
        if done.returncode:
            print(printed[-6000:], flush=True)
            raise RuntimeError("; ".join(re.findall(r"^(?:FAILED|ERROR) .*", printed, re.M)) or row["result"])


def scripts(bench: Bench) -> None:
    """Some at a time; each is compared with others that were started before it."""
    runs: dict[tuple[str, str], Future] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, variant in VARIANTS.items():
            for script in bench.sizes["scripts"]:
                if (
                    "use_peft" in variant.words
                    and script == "pretrain"
                    or variant.precision == "fp16"
                    and not bench.cuda
                ):
                    continue  # LoRA needs a model to adapt; float16 needs a GPU
                out = Path(folder) / f"{script}{len(runs)}"
                runs[script, name] = pool.submit(run_script, bench, script, variant, out)
        for (script, name), future in runs.items():
            with bench.side(f"scripts, {bench.sizes['steps']} steps", f"train_{script}.py: {name}") as row:
                steps, took = future.result()
                row |= compared(
                    script, steps, {other: runs[script, other].result()[0] for other in VARIANTS[name].beside}
                )
                row["s"] = round(took)


def run_script(bench: Bench, script: str, variant: Variant, out: Path) -> tuple[list[Row], float]:
    """Metrics of each step, and seconds. Raises RuntimeError with what it failed of."""
    steps = bench.sizes["steps"]
    saved = steps // 2 if variant.is_killed else 0
    words = f"train_{script}.py {SCRIPTS[script]} {QUIET} --save_steps {saved} --max_steps {steps} --output_dir {out} {variant.words}"
    words += f" --dataset_cache_dir {out}_cache"
    env = os.environ | {"ACCELERATE_MIXED_PRECISION": variant.precision}
    if variant.on_cpu or not bench.cuda:
        env["ACCELERATE_USE_CPU"] = "true"
    if bench.tiny:
        env["TORCHDYNAMO_DISABLE"] = "1"
    began = time.time()
    with (out.parent / f"{out.name}.log").open("w+") as log:
        start = lambda: subprocess.Popen(
            [sys.executable, *words.split()], cwd=ROOT, env=env, stdout=log, stderr=log
        )  # noqa: E731
        process = start()
        if variant.is_killed:
            while not (out / f"checkpoint-{saved}").exists() and process.poll() is None:
                time.sleep(0.02)
            process.kill()
            if process.wait() == 0:
                raise RuntimeError("it was done before it was killed")
            process = start()
        if process.wait():
            log.seek(0)
            raise failure(log.read())
    return [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ], time.time() - began


def compared(script: str, steps: list[Row], others: dict[str, list[Row]]) -> Row:
    """A loss of GRPO means little, and completions differ from some step on: there the reward, and how far
    the log-probabilities of sampling and training are apart."""
    if script == "grpo":
        rewards, apart = ([row[name] for row in steps] for name in ("reward", "sampling/logp_difference_max"))
        return {"reward": round(statistics.mean(rewards[-10:]), 3), "first reward": round(rewards[0], 3),
                "log-probabilities apart by": f"{statistics.median(apart):.1e}"}  # fmt: skip
    losses = [row["loss"] for row in steps]
    found: Row = {
        "steps": len(losses),
        "loss": round(statistics.mean(losses), 5),
        "last": round(losses[-1], 4),
    }
    for name, other in others.items():
        theirs = [row["loss"] for row in other]
        mean = abs(statistics.mean(losses) / statistics.mean(theirs) - 1)
        step = max(abs(a / b - 1) for a, b in zip(losses, theirs, strict=True))
        found[f"from {name}"] = f"{mean:.2%}, a step {step:.2%}" + (" TOO FAR" if mean > 0.01 else "")
    return found


# --- the fixed GRPO task, and TRL ---------------------------------------------------------------------------


def task(bench: Bench) -> None:
    before = grpo_task.evaluate(ROOT / "data" / "base_model")
    for name in ("ours", "TRL"):
        with bench.side("fixed GRPO task", name) as row:
            found = grpo_task.run_side(name, 0, "bf16" if bench.cuda else "no", 3 if bench.tiny else 60)
            row |= {key: value for key, value in found.items() if key != "side"} | {
                "right before": before,
                "peak GiB": "",
            }


def trl(bench: Bench) -> None:
    """The same chats, order, batches, learning rate and bf16 arithmetic on float32 weights: train_sft.py and
    TRL's SFTTrainer."""
    steps, batch = bench.sizes["trl"]
    with tempfile.TemporaryDirectory() as name:
        tokens = write_inputs(bench, Path(name))
        for side, (words, precision) in sides(bench, Path(name)).items():
            with bench.side("SFT beside TRL itself", side) as row:
                result = Path(name) / f"{side}.json"
                command = [sys.executable, str(HERE / words[0]), str(result), *words[1:]]
                env = os.environ | {"ACCELERATE_MIXED_PRECISION": precision}
                done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
                if done.returncode:
                    raise failure(done.stdout + done.stderr)
                found = json.loads(result.read_text())
                row |= {
                    "chats": batch,
                    "useful tokens/s": round(rate(found, tokens)),
                    "first loss": round(found["loss"][0], 4),
                }
                row["peak GiB"] = round(found.get("peak_gpu_gib", 0.0), 2)


def sides(bench: Bench, folder: Path) -> dict[str, tuple[list[str], str]]:
    """side: the script of this folder that runs it, with its words, and Accelerate's precision."""
    steps, batch = bench.sizes["trl"]
    chats = [
        "--model_name_or_path",
        folder / "model",
        "--dataset_name",
        folder / "chats.jsonl",
        "--max_length",
        1024,
    ]
    chats += ["--max_steps", steps, "--per_device_train_batch_size", batch]
    ours = ["ours.py", *our_words("train_sft.py", *chats, cache=folder / "cache")]
    options = {"bf16": bench.cuda, "gradient_checkpointing": False}
    spec: dict[str, Any] = {
        "kind": "trl_sft",
        "model": str(folder / "model"),
        "rows": str(folder / "ordered.jsonl"),
    }
    spec |= {"steps": steps, "batch": batch, "options": options, "work": str(folder / "trl")}
    (folder / "spec.json").write_text(json.dumps(spec))
    return {
        "ours": (ours, "bf16" if bench.cuda else "no"),
        "TRL": (["peers.py", str(folder / "spec.json")], "no"),
    }


def write_inputs(bench: Bench, folder: Path) -> list[int]:
    """A model of random weights with a tokenizer, and chats in the order in which our run takes them. Tokens
    of each step."""
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
    ordered = [rows[order[i]] for i in range(len(rows))]
    for name, these in (("chats", rows), ("ordered", ordered)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in these))
    encoded = (
        tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True) for row in ordered
    )
    sizes = [len(row.input_ids) for row in encoded]
    return [sum(sizes[i : i + batch]) for i in range(0, len(sizes), batch)]
