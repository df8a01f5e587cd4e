"""What gpu.py measures: a function for each kind of side, which returns its figures.

Weights and tokens are random but for the scripts, Shakespeare and the real model. Ours are the
calls that train_*.py make, or the scripts themselves. With --tiny all sizes are small, so that everything runs on a
CPU in minutes: those figures mean nothing.
"""

from collections.abc import Callable
import functools
import hashlib
import json
import os
from pathlib import Path
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple

from compare import HERE, INPUTS, ROOT, WORK, failure, ours, peer, rate, run_process

sys.path.insert(0, str(ROOT))

from common.args import CommonArgs  # noqa: E402
from common.collators import flat_batch  # noqa: E402
from common.data import all_trained  # noqa: E402
from common.losses import grpo_loss  # noqa: E402
from common.memory import empty_caches  # noqa: E402
from common.model import FlatModel, make_optimizer  # noqa: E402
from common.model.attention import FLAT, flat_attention, plan_flat_row, register  # noqa: E402
from common.model.fused_layers import use_fused_layers  # noqa: E402
from common.model.lm_head import weighted_nll  # noqa: E402
from common.model.load import compile_layers  # noqa: E402
from common.model.wrap import wrap  # noqa: E402
from common.run.dry_run import estimate  # noqa: E402
from common.run.parts.mfu import flops_per_token, peak_flops  # noqa: E402
from common.sampling import cuda_graph, sample  # noqa: E402
from common.sampling import generate as decoding
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
import transformers  # noqa: E402

GIB = 2**30
CARRY = ROOT / ".carry"
SIZES = {  # hidden, MLP, layers, heads, key heads, size of a head, vocabulary
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936),  # Qwen3-0.6B
    "1.1B": (2048, 8192, 16, 16, 16, 128, 50304),
    "toy": (64, 128, 2, 4, 2, 16, 600),
}
Figures = dict[str, Any]


class Bench:
    """The device, and how something is measured on it."""

    def __init__(self, device: str, tiny: bool):
        self.device, self.tiny = torch.device(device), tiny
        self.cuda = self.device.type == "cuda"
        self.precision = "bf16" if self.cuda or tiny else "no"
        transformers.logging.set_verbosity_error()
        if tiny:
            torch.compiler.set_stance("force_eager")

    def begin(self) -> None:
        """Before a side: give back what the last one held."""
        torch._dynamo.reset()
        empty_caches(self.device)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> Figures:
        """GiB that the allocator has held at once since `begin`."""
        if not self.cuda:
            return {}
        return {"peak GiB": round(torch.cuda.max_memory_allocated(self.device) / GIB, 2)}

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of a call: the median of those of about two seconds, at least three; two more come before them."""
        enough, taken = (0.0 if self.tiny else 2.0), []
        while len(taken) < 5 or sum(taken[2:]) < enough:
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[2:])

    def kernels(self, work: Callable[[], Any], most: int = 10) -> Figures:
        """The longest kernels of one call, and how much of its time all of them take together."""
        activity = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        field = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        self.wait()
        with profile(activities=[activity]) as profiled:
            began = time.perf_counter()
            work()
            self.wait()
            wall = 1000 * (time.perf_counter() - began)
        spent = [(getattr(event, field) / 1000, event.count, event.key) for event in profiled.key_averages()]
        spent = sorted(row for row in spent if row[0] > 0)[::-1]
        longest = [f"{ms:.2f} ms in {calls} of {key[:80]}" for ms, calls, key in spent[:most]]
        kernels_ms, launches = sum(row[0] for row in spent), sum(row[1] for row in spent)
        return {
            "wall ms": round(wall, 1),
            "kernels ms": round(kernels_ms, 1),
            "launches": launches,
            "longest": longest,
        }

    def config(self, size: str) -> transformers.PreTrainedConfig:
        names = (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        )
        sizes = dict(zip([*names.split(), "vocab_size"], SIZES["toy" if self.tiny else size], strict=True))
        special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
        return transformers.Qwen3Config(
            max_position_embeddings=32768, tie_word_embeddings=True, **sizes, **special
        )

    def language_model(self, size: str, dtype: torch.dtype = torch.float32) -> Any:
        """The same random weights at every call."""
        torch.manual_seed(0)
        with self.device:
            return transformers.AutoModelForCausalLM.from_config(self.config(size), dtype=dtype)


# --- scripts, as a user starts them -------------------------------------------------------------------------


class Run(NamedTuple):
    metrics: list[dict[str, Any]]
    printed: str
    weights: str  # a hash of what the run has saved; "" if it was ended before


def script(
    bench: Bench,
    stage: str,
    words: list[Any],
    precision: str = "no",
    on_cpu: bool = False,
    kill_at: int = 0,
    most_seconds: float | None = None,
) -> Run:
    """kill_at: kill -9 at the checkpoint of that step, then start it again. most_seconds: end it then, and
    read what it has logged. Raises RuntimeError with what it failed of."""
    with tempfile.TemporaryDirectory() as name:
        out, log = Path(name, "out"), Path(name, "log")
        command = [sys.executable, f"train_{stage}.py", *map(str, words), "--output_dir", str(out)]
        command += ["--dataset_cache_dir", f"{name}/cache", "--dataset_num_proc", "1"]
        command += ["--logging_steps", "1", "--num_samples", "0"]
        env = os.environ | {"ACCELERATE_MIXED_PRECISION": precision, "TORCH_LOGS": "recompiles"}
        if on_cpu or not bench.cuda:
            env["ACCELERATE_USE_CPU"] = "true"
        if bench.tiny:
            env["TORCHDYNAMO_DISABLE"] = "1"

        def start() -> subprocess.Popen:
            with log.open("a") as file:
                return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)

        process = start()
        if kill_at:
            while not (out / f"checkpoint-{kill_at}").exists() and process.poll() is None:
                time.sleep(0.02)
            process.kill()
            if process.wait() == 0:
                raise RuntimeError("it was done before it was killed")
            process = start()
        try:
            if process.wait(most_seconds):
                raise failure(log.read_text())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        saved = hashlib.sha256()
        files = sorted(out.glob("*.safetensors"))
        for file in files:
            saved.update(file.read_bytes())
        lines = (out / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines if line.endswith("}")]
        return Run(metrics, log.read_text(), saved.hexdigest()[:12] if files else "")


def logged(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in metrics if name in row]


# --- right: does it run, and are the numbers those of a CPU? ------------------------------------------------


def ceilings(bench: Bench) -> Figures:
    n, numbers = (256, 10**6) if bench.tiny else (8192, 2**30)
    one, other = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    product = bench.seconds(lambda: one @ other)
    source = torch.zeros(numbers, device=bench.device)
    target = torch.empty_like(source)
    copy = bench.seconds(lambda: target.copy_(source))
    return {
        "bf16 product, TFLOP/s": round(2 * n**3 / product / 1e12, 1),
        "copy, TB/s": round(8 * numbers / copy / 1e12, 2),
    }


def gpu_tests(bench: Bench) -> Figures:
    """The tests that need a GPU."""
    command = [sys.executable, *"-m pytest -o addopts= -m gpu".split()]
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.gpu" in file.read_text(encoding="utf-8"):
            command.append(str(file))
    if not bench.cuda:
        command += ["--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
        raise RuntimeError("; ".join(failed) or (done.stdout + done.stderr)[-300:])
    return {"result": done.stdout.strip().splitlines()[-1].strip("= ")}


STAGES = {
    "pretrain": "--hidden_size 256 --num_layers 4 --num_heads 4 --max_length 512 --learning_rate 1e-3",
    "sft": "--model_name_or_path data/base_model --learning_rate 1e-4 --max_length 512",
    "dpo": "--model_name_or_path data/base_model --learning_rate 1e-5 --max_length 512",
    "grpo": "--config data/configs/grpo_zero.yaml",
}


def trains(
    bench: Bench, stage: str, precision: str, words: str = "", on_cpu: bool = False, killed: bool = False
) -> Figures:
    """40 steps of a script. A loss of GRPO means little; there it is the reward, and how far the sampler is from
    the model that is trained, in nats."""
    steps = 4 if bench.tiny else 40
    kill_at = steps // 2 if killed else 0
    words = f"{STAGES[stage]} {words} --eval_steps 0 --max_steps {steps} --save_steps {kill_at}"
    run = script(bench, stage, words.split(), precision, on_cpu, kill_at)
    figures: Figures = {"steps": len(logged(run.metrics, "loss"))}
    if stage == "grpo":
        figures["reward"] = round(statistics.mean(logged(run.metrics, "reward")), 4)
        for name in ("sampling/logp_difference", "sampling/logp_difference_max"):
            figures[name] = float(f"{statistics.median(logged(run.metrics, name)):.1e}")
    else:
        figures["loss"] = round(statistics.mean(logged(run.metrics, "loss")), 6)
    if "--torch_compile" in words:
        figures["recompilations"] = run.printed.count("Recompiling function")
    return figures | {"weights": run.weights}


# --- sft: speed and memory of a step ------------------------------------------------------------------------


def trainer(
    bench: Bench, size: str, rows: int, T: int, how: str
) -> tuple[Callable[[], torch.Tensor], Figures]:
    """(A step that returns its loss, what else there is to know). how: eager, compiled, or transformers: its
    model and its loss in a plain loop."""
    lm = bench.language_model(size).train()
    flops = flops_per_token(FlatModel(lm), T)
    ids = np.random.default_rng(0).integers(2, lm.config.vocab_size, (rows, T))
    if how == "transformers":
        model = lm
        padded = torch.tensor(ids, device=bench.device)
    else:
        model = wrap(lm).train()
    if how == "compiled":
        compile_layers(model)
    optimizer = make_optimizer(CommonArgs(learning_rate=1e-5), model)

    def step() -> torch.Tensor:
        with bench.autocast():
            if how == "transformers":
                loss = model(input_ids=padded, labels=padded, use_cache=False).loss
            else:
                batch = flat_batch([[all_trained(row)] for row in ids], bench.device)
                loss = model(batch, nll_weights=batch["loss_mask"] / (rows * (T - 1))).nll
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, {"flops": flops, "first loss": round(step().item(), 4)}


def sft(bench: Bench, size: str, rows: int, T: int, how: str) -> Figures:
    if bench.tiny:
        rows, T = 2, 64
    step, known = trainer(bench, size, rows, T, how)
    speed = rows * T / bench.seconds(step)
    figures: Figures = {"tokens/s": round(speed)}
    if peak := peak_flops(bench.device):
        figures["MFU"] = round(speed * known["flops"] / peak, 3)
    figures |= bench.peak()
    if how == "eager" and (predicted := predictions().get(f"{size} {rows} {T}")):
        figures["predicted GiB"] = predicted
    return figures | {"first loss": known["first loss"]}


def sft_kernels(bench: Bench, size: str, rows: int, T: int) -> Figures:
    if bench.tiny:
        rows, T = 2, 64
    step, _ = trainer(bench, size, rows, T, "eager")
    step()
    return bench.kernels(step)


def predictions() -> dict[str, float]:
    """GiB, as --pack has written them; nothing without it."""
    file = CARRY / "rows" / "predictions.json"
    return json.loads(file.read_text()) if file.exists() else {}


def predict(size: str, rows: int, T: int) -> float:
    """What --dry_run says of a step of `sft`, in GiB."""
    bench = Bench("cpu", tiny=False)
    register()
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(bench.config(size), dtype=torch.float32)
    lm.to_empty(device="cpu").tie_weights()
    lm.set_attn_implementation(FLAT)
    use_fused_layers(lm)  # as `wrap` does, which would need numbers
    parts = estimate(FlatModel(lm), [T] * rows, mixed_precision="bf16", device=torch.device("cuda"))
    return round(parts["total"], 2)


# --- grpo: sampling, and whole steps ------------------------------------------------------------------------

G = 8  # completions of a prompt


def prompts_of(bench: Bench, rows: int) -> list[list[int]]:
    draw, V = np.random.default_rng(0), bench.config("0.6B").vocab_size
    shortest, longest = (10, 20) if bench.tiny else (100, 300)
    prompts = []
    for length in draw.integers(shortest, longest, rows // G):
        prompts += [draw.integers(2, V, length).tolist()] * G
    return prompts


def sampler(bench: Bench, model: FlatModel, prompts: list[list[int]], new: int) -> Callable[[int], list]:
    """(call) -> completions of `new` tokens: no token ends one."""
    never = [bench.config("0.6B").vocab_size]

    def draw(call: int) -> list:
        keys = [(call, i) for i in range(len(prompts))]
        with bench.autocast():
            return sample(model, prompts, keys, stop_ids=never, max_new_tokens=new, batch_size=len(prompts))

    return draw


def count_captures() -> Figures:
    """Counts from now on how often the sampler captures a CUDA graph."""
    counts, capture = {"captures": 0}, cuda_graph.capture

    @functools.wraps(capture)
    def counted(*args: Any) -> Any:
        counts["captures"] += 1
        return capture(*args)

    cuda_graph.capture = counted
    return counts


def sampling(bench: Bench, rows: int, new: int, how: str) -> Figures:
    """float32 weights under autocast, as in train_grpo.py. how: graphs, no graphs, or transformers'
    generate() with bfloat16 weights, which is its faster way."""
    if bench.tiny:
        rows, new = 16, 8
    prompts = prompts_of(bench, rows)
    counts = count_captures()
    if how == "generate":
        work = generate(bench, prompts, new)
    else:
        work = sampler(bench, wrap(bench.language_model("0.6B").eval()), prompts, new)
    with_graphs = decoding.StepGraph
    if how == "no graphs":
        decoding.StepGraph = lambda: lambda step, tokens, *_: step(tokens)
    try:
        work(0)
        counts["captures"] = 0
        bench.wait()
        began = time.perf_counter()
        work(1)
        bench.wait()
        took = time.perf_counter() - began
    finally:
        decoding.StepGraph = with_graphs
    figures = {"tokens/s": round(rows * new / took), "ms a token of all rows": round(1000 * took / new, 2)}
    if how == "graphs":
        figures |= counts
    return figures | bench.peak()


def generate(bench: Bench, prompts: list[list[int]], new: int) -> Callable[[int], Any]:
    lm = bench.language_model("0.6B", torch.bfloat16).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=bench.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=bench.device)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new}

    @torch.no_grad()
    def draw(call: int) -> Any:
        torch.manual_seed(call)
        return lm.generate(ids, attention_mask=mask, **options)

    return draw


def grpo_step(bench: Bench, rows: int, new: int) -> Figures:
    """Three steps: sampling, and one update on the completions, whose advantages are random."""
    if bench.tiny:
        rows, new = 16, 8
    model = wrap(bench.language_model("0.6B"))
    optimizer = make_optimizer(CommonArgs(learning_rate=1e-6), model)
    prompts = prompts_of(bench, rows)
    draw = sampler(bench, model, prompts, new)
    sampling_s, update_s = [], []
    for call in range(3):
        bench.wait()
        began = time.perf_counter()
        completions = draw(call)
        bench.wait()
        sampled = time.perf_counter()
        advantages = np.random.default_rng(call).normal(size=rows)
        examples = []
        for prompt, completion, advantage in zip(prompts, completions, advantages, strict=True):
            mask = np.array([0] * len(prompt) + [1] * len(completion.ids), np.float32)
            ids = np.array(prompt + completion.ids)
            examples.append([
                {"input_ids": ids, "loss_mask": mask, "advantage": mask * np.float32(advantage)}
            ])  # fmt: skip
        model.train()
        batch = flat_batch(examples, bench.device)
        mask, borders = batch["loss_mask"], batch["cu_seqlens"]
        with bench.autocast():
            logps = model(batch, entropy=True).logps
        losses, _ = grpo_loss(logps, logps.detach(), None, batch["advantage"], mask, borders)
        (losses.sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bench.wait()
        sampling_s.append(sampled - began)
        update_s.append(time.perf_counter() - sampled)
    figures = {
        "seconds a step": round(min(map(sum, zip(sampling_s[1:], update_s[1:], strict=True))), 3),
        "sampling s": round(min(sampling_s[1:]), 3),
        "update s": round(min(update_s[1:]), 3),
    }
    return figures | bench.peak()


# --- shakespeare, a real model ------------------------------------------------------------------------------


def lowest(evaluations: list[list[float]]) -> Figures:
    """evaluations: [step, loss]."""
    step, loss = min(evaluations, key=lambda point: point[1])
    return {"lowest validation loss": round(loss, 4), "at step": step, "steps": evaluations[-1][0]}


MAKING = threading.Lock()
TOY_FOLDERS: list[tempfile.TemporaryDirectory] = []  # they go with the process


def shakespeare_recipe(bench: Bench) -> dict[str, Any]:
    """The recipe; its rows and the model's configuration are in shakespeare.FOLDER then."""
    import shakespeare

    recipe = shakespeare.RECIPES["gpu"]
    if not bench.tiny:
        shakespeare.FOLDER = CARRY / "rows" / "shakespeare"
        return recipe
    config = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 64, "dropout": 0.2}
    with MAKING:
        if not TOY_FOLDERS:
            TOY_FOLDERS.append(tempfile.TemporaryDirectory())
            shakespeare.FOLDER = Path(TOY_FOLDERS[0].name)
            text = (ROOT / "data" / "pretrain" / "train.txt").read_text(encoding="utf-8")
            shakespeare.write_model(config, shakespeare.write_characters(text[:9999]))
    return recipe | {"config": config, "batch": 4, "steps": 4, "eval_steps": 2}


def shakespeare_ours(bench: Bench, seed: int) -> Figures:
    """As far as it comes in 100 seconds: the lowest loss is expected before step 2,500 of 5,000."""
    import shakespeare

    words = shakespeare.our_words(shakespeare_recipe(bench), seed)
    metrics = script(bench, "pretrain", words, bench.precision, most_seconds=100).metrics
    return lowest([[row["step"], row["eval_loss"]] for row in metrics if "eval_loss" in row])


def shakespeare_nanogpt(bench: Bench, seed: int) -> Figures:
    """nanoGPT's own model and step on the same rows, compiled as in its recipe."""
    import shakespeare

    recipe = shakespeare_recipe(bench)
    tokenizer = transformers.AutoTokenizer.from_pretrained(shakespeare.FOLDER / "model")
    shakespeare.write_windows(recipe, seed, tokenizer)
    options = {"config": recipe["config"] | {"vocab_size": len(tokenizer)}, "seed": seed, "weights": None}
    options |= {"learning_rate": shakespeare.LEARNING_RATE, "warmup": shakespeare.WARM_UP_STEPS}
    options |= {"held_out": str(shakespeare.FOLDER / "validation.npy"), "eval_steps": recipe["eval_steps"]}
    spec = {"model": str(CARRY / "rows" / "nanoGPT"), "rows": str(shakespeare.FOLDER / "train.npy")}
    spec |= {"steps": recipe["steps"], "batch": recipe["batch"], "options": options}
    with tempfile.TemporaryDirectory() as name:
        Path(name, "spec.json").write_text(json.dumps(spec))
        result = Path(name, "result.json")
        command = [sys.executable, str(HERE / "peer_nanogpt.py"), str(result), f"{name}/spec.json"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
            if done.returncode:
                raise failure(done.stdout + done.stderr)
        except subprocess.TimeoutExpired:
            if not result.exists():
                raise
        found = json.loads(result.read_text())
    for windows in shakespeare.FOLDER.glob("*.npy"):  # hundreds of megabytes
        windows.unlink()
    return lowest(found["evaluations"])


def real_folder(bench: Bench) -> Path:
    """SmolLM2-135M, put together from the parts that --pack has made."""
    import real_model

    folder = CARRY / "real" / "model"
    if bench.tiny:
        return ROOT / "data" / "base_model"
    if not (folder / "tokenizer_config.json").exists():  # the last file that is written
        parts = [(CARRY / "real" / part / "gguf").read_bytes() for part in "01"]
        real_model.make_folder(b"".join(parts), folder)
    return folder


def real_sft(bench: Bench) -> Figures:
    steps, batch = (2, 2) if bench.tiny else (100, 32)
    with tempfile.TemporaryDirectory() as name:
        alpaca = CARRY / "rows" / "alpaca.json"
        if bench.tiny:
            alpaca = Path(name, "alpaca.json")
            rows = [{"instruction": f"Count to {n}.", "input": "", "output": "1, 2"} for n in range(99)]
            alpaca.write_text(json.dumps(rows))
        words = ["--model_name_or_path", real_folder(bench), "--dataset_name", alpaca]
        words += f"--max_length 512 --per_device_train_batch_size {batch} --learning_rate 1e-5".split()
        words += f"--max_steps {steps} --eval_steps {steps} --eval_max_new_tokens 1 --save_steps 0".split()
        words += f"--eval_fraction 0.05 --max_eval_samples {2 * steps}".split()
        metrics = script(bench, "sft", words, bench.precision).metrics
    before, *_, after = logged(metrics, "eval_loss")
    speed = statistics.median(logged(metrics, "tokens_per_second"))
    return {
        "held-out loss before": round(before, 4),
        "held-out loss after": round(after, 4),
        "steps": steps,
        "tokens/s": round(speed),
    }


def real_grpo(bench: Bench) -> Figures:
    """Sums and products of small numbers, which it first answers in a sentence and often wrongly."""
    steps, tokens, size = (2, 4, 16) if bench.tiny else (40, 20, 64)
    words = ["--config", ROOT / "data/configs/smollm2.yaml", "--model_name_or_path", real_folder(bench)]
    words += f"--max_steps {steps} --eval_steps {steps // 2} --per_device_train_batch_size {size}".split()
    words += f"--max_completion_length {tokens} --eval_max_new_tokens {tokens}".split()
    metrics = script(bench, "grpo", words, bench.precision).metrics
    before, *_, after = logged(metrics, "eval_exact_number")
    so_far = [row["seconds"] for row in metrics if "loss" in row]
    return {
        "right before": round(before, 3),
        "right after": round(after, 3),
        "steps": steps,
        "seconds a step": round(float(np.median(np.diff(so_far))), 3),
    }


# --- trl, dpo: our script beside TRL's trainer --------------------------------------------------------------


def benchmark_rows() -> Path:
    """The folder of sft.py's chats and dpo.py's pairs."""
    for folder in (CARRY / "rows" / "inputs", INPUTS):
        if (folder / "done").exists():
            return folder
    run_process([str(HERE / "prepare.py"), str(INPUTS)])
    return INPUTS


@functools.cache
def random_model(bench: Bench) -> tempfile.TemporaryDirectory:
    """A folder with a model of 0.6B parameters and the tokenizer of those rows. It goes with the process."""
    import prepare

    folder = tempfile.TemporaryDirectory()
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data" / "base_model")
    tokenizer.chat_template = prepare.TEMPLATE
    tokenizer.save_pretrained(folder.name)
    model = bench.language_model("0.6B")
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))  # the toy's has fewer tokens
    model.save_pretrained(folder.name)
    return folder


def beside_trl(bench: Bench, stage: str, side: str) -> Figures:
    """The same model, rows, batches, learning rate and bfloat16 arithmetic over float32 weights. side: ours, TRL,
    or TRL that packs rows by best fit (bfd), in an order of its own."""
    steps, batch, length = (4, 4, 1024) if bench.tiny else (12, 16, 1024)
    folder, model = benchmark_rows(), random_model(bench).name
    name = {"sft": "chats", "dpo": "pairs"}[stage]
    amounts = [batch] * steps
    if stage == "sft":
        lengths = json.loads((folder / "chats.lengths.json").read_text())
        amounts = [sum(lengths[i * batch : (i + 1) * batch]) for i in range(steps)]
    if side == "ours":
        words = [
            "--model_name_or_path",
            model,
            "--dataset_name",
            folder / f"{name}.jsonl",
            "--max_length",
            length,
        ]
        words += ["--per_device_train_batch_size", batch, "--max_steps", steps]
        run = ours(f"train_{stage}.py", *words, env={"ACCELERATE_MIXED_PRECISION": bench.precision})
    else:
        options: dict[str, Any] = {"bf16": bench.precision == "bf16", "gradient_checkpointing": False}
        if side == "TRL bfd":  # rows of as many tokens
            options["packing"] = True
            steps, batch = max(3, sum(amounts) // (batch // 4 * length) - 1), batch // 4
        run = peer(f"trl_{stage}", model, str(folder / f"{name}.ordered.jsonl"), steps, batch, **options)
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        found = run()
    except SystemExit as error:
        raise failure(str(error)) from None
    if side == "TRL bfd":
        amounts = [step["useful"] for step in found["batches"]]
    unit = "useful tokens/s" if stage == "sft" else "pairs/s"
    figures: Figures = {unit: round(rate(found, amounts), 2), "first loss": round(found["loss"][0], 4)}
    if bench.cuda:
        figures["peak GiB"] = round(found["peak_gpu_gib"], 2)
    return figures


# --- memory: the table of docs/memory.md --------------------------------------------------------------------


def memory_peak(bench: Bench, size: str, way: str) -> Figures:
    import memory

    lengths = [64] if bench.tiny else [1024] * 4
    if bench.tiny:
        memory.SIZES[size] = (64, 128, 2, 4, 2, 600, True)
    gib = memory.total(size, way, memory.WAYS[way], lengths, bench.device.type)
    return {"GiB": round(gib, 2)}


# --- next: what each of the candidates would give -----------------------------------------------------------


def attention(bench: Bench, kernel: str) -> Figures:
    """Forward and backward of 8 causal sequences of 2,048 tokens with Qwen3-0.6B's heads. kernel: ours (on CUDA the
    one for sequences of different lengths), or one of PyTorch's."""
    S, T = (2, 64) if bench.tiny else (8, 2048)
    heads, key_heads, size = 16, 8, 128
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, H, S * T, size, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
        for H in (heads, key_heads, key_heads)
    )
    plan = plan_flat_row([T] * S, bench.device)
    backend = getattr(SDPBackend, kernel, SDPBackend.MATH)

    def step() -> None:
        if kernel == "ours":
            out = flat_attention(torch.nn.Module(), q, k, v, None, flat_row=plan)[0]
        else:
            rows = [x.view(x.shape[1], S, T, size).transpose(0, 1) for x in (q, k, v)]
            with sdpa_kernel(backend if bench.cuda else SDPBackend.MATH):
                out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        out.backward(torch.ones_like(out))
        q.grad = k.grad = v.grad = None

    took = bench.seconds(step)
    # forward 2 products of T²/2 for each head, backward 2.5 times that
    flops = 3.5 * S * 2 * T * T * heads * size
    return {"ms": round(1000 * took, 3), "TFLOP/s": round(flops / took / 1e12, 1)}


def head(bench: Bench, kind: str) -> Figures:
    """Forward and backward of 16,384 tokens with Qwen3's vocabulary."""
    N, config = (128 if bench.tiny else 16384), bench.config("0.6B")
    D, V = config.hidden_size, config.vocab_size
    config.num_hidden_layers = 1
    with bench.device:
        lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weight = lm.get_output_embeddings().weight
    hidden = torch.randn(N, D, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(V, (N,), device=bench.device)
    weights = torch.full((N,), 1 / N, device=bench.device)

    def step() -> None:
        hidden.grad = weight.grad = None
        if kind == "ours":
            loss, _ = weighted_nll(lm, hidden, tokens, weights)
        else:
            loss = F.cross_entropy((hidden @ weight.T).float(), tokens)
        loss.backward()

    took = bench.seconds(step)
    return {"ms": round(1000 * took, 2), "TFLOP/s": round(6 * N * D * V / took / 1e12, 1)} | bench.peak()


def norm_and_rope(bench: Bench, how: str) -> Figures:
    """q_norm, k_norm and the rotary embedding of one layer of Qwen3-0.6B, 16,384 tokens, forward and backward, as
    transformers has them. how: eager or compiled."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    T, heads, key_heads, size = (64, 4, 2, 16) if bench.tiny else (16384, 16, 8, 128)
    with bench.device:
        norms = [qwen3.Qwen3RMSNorm(size) for _ in range(2)]
        rotary = qwen3.Qwen3RotaryEmbedding(bench.config("0.6B"))
        cos, sin = rotary(torch.zeros(1, 1), torch.arange(T)[None])
    q, k = (
        torch.randn(1, T, H, size, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
        for H in (heads, key_heads)
    )

    def turned(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = (norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True))
        return qwen3.apply_rotary_pos_emb(queries, keys, cos, sin)

    work = torch.compile(turned) if how == "compiled" else turned

    def step() -> None:
        with bench.autocast():
            queries, keys = work(q, k)
        torch.autograd.backward([queries, keys], [torch.ones_like(queries), torch.ones_like(keys)])
        q.grad = k.grad = None

    return {"ms": round(1000 * bench.seconds(step), 3)}


def decode_kernels(bench: Bench) -> Figures:
    """16 tokens for 64 completions."""
    model = wrap(bench.language_model("0.6B").eval())
    draw = sampler(bench, model, prompts_of(bench, 64), 16)
    draw(0)
    return bench.kernels(lambda: draw(1))
