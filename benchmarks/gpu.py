"""The figures that need a GPU. Each is a line of a file as soon as it is there, so nothing is lost when time ends.

    python benchmarks/gpu.py                                     # one GPU, about five minutes, one table; no network
    python benchmarks/gpu.py --seconds 250 --out gpu.jsonl       # what results/gpu.jsonl lacks for this card, as far as it fits
    python benchmarks/gpu.py --keep gpu.jsonl                    # append what came back to it, and write the pages anew
    python benchmarks/gpu.py --plan                              # what is measured, and what is missing
    python benchmarks/gpu.py --pack --text input.txt --alpaca alpaca.json --nanogpt ../nanoGPT    # see below
    python benchmarks/gpu.py --device cpu --tiny                 # a rehearsal at toy sizes; figures mean nothing

A section is a process of its own, which is ended when its time is over or it dies; its sides run one after the
other (AT_ONCE: several at a time). A side that fails leaves a line with the exception's name, and comes last the
next time. A figure belongs to a card and a version of PyTorch; figures of two are never compared.

--pack fills .carry/, which git ignores, for a machine without a network: PyPI's packages for TRL, bitsandbytes and
GGUF files (site), rows and predictions of memory (rows), SmolLM2-135M in two halves (real/0, real/1). Without it
the sections that need one of them are left out. --text: char-rnn's input.txt; --alpaca: rows with instruction,
input, output; --nanogpt: a checkout.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CARRY = ROOT / ".carry"
RESULTS = HERE / "results" / "gpu.jsonl"
Row = dict[str, Any]
# section: side: seconds that it should take, the function of gpu_sections.py, what it is called with. In order of
# value.
SECTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "right": {
        "pytest -m gpu": (10, "gpu_tests"),
        "SFT, CPU": (7, "trains", "sft", "no", "", True),
        "SFT, bf16": (7, "trains", "sft", "bf16"),
        "GRPO, CPU": (7, "trains", "grpo", "no", "", True),
        "GRPO, bf16": (7, "trains", "grpo", "bf16"),
        "SFT, float32": (7, "trains", "sft", "no"),
        "SFT, float32 again": (7, "trains", "sft", "no"),
        "SFT, float32, killed and resumed": (7, "trains", "sft", "no", "", False, True),
        "SFT, bf16 compiled": (7, "trains", "sft", "bf16", "--torch_compile"),
        "SFT, fp16": (7, "trains", "sft", "fp16"),
        "SFT LoRA, CPU": (7, "trains", "sft", "no", "--use_peft", True),
        "SFT LoRA, bf16": (7, "trains", "sft", "bf16", "--use_peft"),
        "GRPO, float32": (7, "trains", "grpo", "no"),
        "DPO, CPU": (7, "trains", "dpo", "no", "", True),
        "DPO, bf16": (7, "trains", "dpo", "bf16"),
        "pretrain, CPU": (7, "trains", "pretrain", "no", "", True),
        "pretrain, bf16": (7, "trains", "pretrain", "bf16"),
    },
    "sft": {
        "ceilings of the card": (4, "ceilings"),
        "0.6B 16 x 512, eager": (12, "sft", "0.6B", 16, 512, "eager"),
        "0.6B 16 x 512, compiled": (35, "sft", "0.6B", 16, 512, "compiled"),
        "0.6B 16 x 512, transformers": (10, "sft", "0.6B", 16, 512, "transformers"),
        "1.1B 4 x 2048, eager": (12, "sft", "1.1B", 4, 2048, "eager"),
        "1.1B 4 x 2048, compiled": (35, "sft", "1.1B", 4, 2048, "compiled"),
        "1.1B 4 x 2048, transformers": (12, "sft", "1.1B", 4, 2048, "transformers"),
        "0.6B 2 x 8192, eager": (15, "sft", "0.6B", 2, 8192, "eager"),
        "kernels of a step, 0.6B 16 x 512": (12, "sft_kernels", "0.6B", 16, 512),
    },
    "grpo": {
        "sampling, 64 x 256 tokens, graphs": (12, "sampling", 64, 256, "graphs"),
        "whole steps, 64 x 256 tokens": (15, "grpo_step", 64, 256),
        "sampling, 64 x 256 tokens, no graphs": (25, "sampling", 64, 256, "no graphs"),
        "sampling, 256 x 256 tokens, graphs": (12, "sampling", 256, 256, "graphs"),
        "sampling, 256 x 256 tokens, no graphs": (25, "sampling", 256, 256, "no graphs"),
        "sampling, 64 x 64 tokens, generate()": (12, "sampling", 64, 64, "generate"),
    },
    "shakespeare": {
        "ours, seed 0": (40, "shakespeare_ours", 0),
        "nanoGPT, seed 0": (40, "shakespeare_nanogpt", 0),
        "ours, seed 1": (40, "shakespeare_ours", 1),
    },
    "real": {
        "SmolLM2-135M, SFT on Alpaca": (70, "real_sft"),
        "SmolLM2-135M, GRPO on small numbers": (60, "real_grpo"),
    },
    "trl": {
        "SFT, ours": (45, "beside_trl", "sft", "ours"),
        "SFT, TRL": (45, "beside_trl", "sft", "TRL"),
        "SFT, TRL bfd": (45, "beside_trl", "sft", "TRL bfd"),
    },
    "memory": {
        f"{size}, {way}": (7, "memory_peak", size, way)
        for size in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B")
        for way in (
            "full",
            "full, --optim adamw_8bit",
            "LoRA",
            "LoRA, --dtype bfloat16",
            "QLoRA, --dtype bfloat16",
        )
    },
    "next": {
        "attention, ours": (6, "attention", "ours"),
        "attention, PyTorch's flash": (6, "attention", "FLASH_ATTENTION"),
        "attention, cuDNN": (8, "attention", "CUDNN_ATTENTION"),
        "head, ours": (10, "head", "ours"),
        "head, full logits": (6, "head", "full logits"),
        "norm and RoPE, eager": (6, "norm_and_rope", "eager"),
        "norm and RoPE, compiled": (20, "norm_and_rope", "compiled"),
        "kernels of 16 decoding steps": (15, "decode_kernels"),
    },
    "dpo": {"DPO, ours": (40, "beside_trl", "dpo", "ours"), "DPO, TRL": (40, "beside_trl", "dpo", "TRL")},
}
QUICK = {
    "right": ["SFT, CPU", "SFT, bf16", "GRPO, CPU", "GRPO, bf16"],
    "sft": ["0.6B 16 x 512, eager"],
    "grpo": ["sampling, 64 x 256 tokens, graphs", "whole steps, 64 x 256 tokens"],
}
AT_ONCE = {"right": 10, "shakespeare": 3}
NEEDS = {  # files of .carry, or modules
    "shakespeare": (".carry/rows/shakespeare/train.jsonl", ".carry/rows/nanoGPT/model.py"),
    "real": (".carry/real/0/gguf", ".carry/real/1/gguf", ".carry/rows/alpaca.json", "gguf"),
    "trl": ("trl", "datasets"),
    "memory": ("bitsandbytes", "peft"),
    "dpo": ("trl", "datasets"),
}
START = 10  # seconds until a process has imported everything
# What a figure is divided by in a table: the same figure of the side with the same words before the comma, and these
# after it.
BESIDE = {
    "right": ("loss", "CPU"),
    "sft": ("tokens/s", "transformers"),
    "trl": ("useful tokens/s", "TRL"),
    "dpo": ("pairs/s", "TRL"),
}
TOY = ", toy sizes"


# --- the file of figures ------------------------------------------------------------------------------------


def read(file: Path) -> list[Row]:
    """The figures of a file, which may be missing; a line that was cut is left out, with a word."""
    rows = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else [], 1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{file.name}: line {number} was cut, and is left out", file=sys.stderr)
    return rows


def append(file: Path, rows: list[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    was_cut = file.exists() and not file.read_text().endswith("\n") and file.stat().st_size > 0
    with file.open("a") as lines:
        lines.write("\n" * was_cut + "".join(json.dumps(row) + "\n" for row in rows))


def machine_of(row: Row) -> tuple[str, str]:
    return row["card"], row["torch"]


def measured(rows: list[Row], machine: tuple[str, str]) -> dict[str, dict[str, Row]]:
    """section: side: its last figures on this machine."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if machine_of(row) == machine and "value" in row:
            found.setdefault(row["section"], {})[row["side"]] = row
    return found


def failures(rows: list[Row], machine: tuple[str, str]) -> dict[tuple[str, str], str]:
    """(section, side): how it failed last, of those that have no figures."""
    there = measured(rows, machine)
    found = {}
    for row in rows:
        if machine_of(row) == machine and row["side"] not in there.get(row["section"], {}):
            found[row["section"], row["side"]] = row["failed"]
    return found


# --- measuring ----------------------------------------------------------------------------------------------


def facts(device: str, tiny: bool) -> Row:
    """What every line says of the machine. The card's name is asked for by a process of its own, which gives the
    memory back that CUDA takes."""
    card = "CPU"
    if device == "cuda":
        asked = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
        answer = subprocess.run(asked, capture_output=True, text=True)
        if answer.returncode:
            why = (answer.stderr.strip().splitlines() or ["?"])[-1]
            raise SystemExit(
                f"PyTorch finds no CUDA GPU here ({why}); a rehearsal at toy sizes: --device cpu --tiny"
            )
        card = answer.stdout.strip().splitlines()[-1]
    packed = CARRY / "rows" / "commit"  # where no .git travels
    commit = packed.read_text() if packed.exists() else ""
    if shutil.which("git") and (ROOT / ".git").exists():
        words = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() or commit
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    when = {"commit": commit or "unknown", "date": time.strftime("%Y-%m-%d")}
    return {"card": card + TOY * tiny} | versions | when


def lacks(section: str, tiny: bool) -> list[str]:
    """What a section needs and is not there; toy sizes need no files."""
    missing = []
    for name in NEEDS.get(section, ()):
        if tiny and "/" in name:
            continue
        is_there = (ROOT / name).exists() if "/" in name else importlib.util.find_spec(name) is not None
        if not is_there:
            missing.append(name)
    return missing


def choose(
    sides: dict[str, tuple[Any, ...]], wanted: list[str], seconds_left: float
) -> tuple[list[str], float]:
    """Those of the wanted sides that fit, in their order, and the seconds that they should take."""
    chosen, needed = [], float(START)
    for side in wanted:
        if needed + sides[side][0] <= seconds_left:
            chosen.append(side)
            needed += sides[side][0]
    return chosen, needed


def run_section(section: str, sides: list[str], limit: float, args: argparse.Namespace, known: Row) -> None:
    """In a process of its own. If it dies or its time is over, the first side without a line is named as what it
    failed of."""
    job = {"section": section, "sides": sides, "out": str(args.out), "device": args.device, "tiny": args.tiny}
    before = len(read(args.out))
    command = [sys.executable, str(HERE / "gpu.py"), "--job", json.dumps(job | {"known": known})]
    env = dict(os.environ)
    if section in NEEDS:
        paths = [env.get("PYTHONPATH", ""), str(CARRY / "site")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        status = process.wait(limit)
        ended = f"the process ended with status {status}"
    except subprocess.TimeoutExpired:
        ended = f"its {limit:.0f} s were over"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        except ProcessLookupError:
            pass
        process.wait()
    done = {row["side"] for row in read(args.out)[before:]}
    unfinished = [side for side in sides if side not in done]
    if unfinished:
        append(args.out, [{"section": section, "side": unfinished[0], "failed": ended} | known])
        print(f"{section}: {ended}; without figures: {'; '.join(unfinished)}", flush=True)


def do_job(job: Row) -> None:
    """The process of a section."""
    import gpu_sections

    bench = gpu_sections.Bench(job["device"], job["tiny"])
    section = job["section"]
    at_once = min(AT_ONCE.get(section, 1), os.cpu_count() or 1)
    writing = threading.Lock()

    def measure(side: str) -> None:
        _, function, *words = SECTIONS[section][side]
        row = {"section": section, "side": side}
        try:
            if at_once == 1:
                bench.begin()
            row["value"] = getattr(gpu_sections, function)(bench, *words)
        except Exception as error:  # whatever a kernel, a compiler or a library throws: the next side runs
            row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            traceback.print_exc()
        with writing:
            append(Path(job["out"]), [row | job["known"]])
            print(f"{section}: {side}: {shown(row)}", flush=True)

    if at_once == 1:
        for side in job["sides"]:
            measure(side)
    else:
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(measure, job["sides"]))


def measure_all(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + (args.seconds or 600)
    known = facts(args.device, args.tiny)
    is_quick = args.seconds is None and not args.only
    rows = [] if is_quick or args.tiny else read(RESULTS) + read(args.out)
    machine = machine_of(known)
    there, failed = measured(rows, machine), failures(rows, machine)
    plan = QUICK if is_quick else {section: list(sides) for section, sides in SECTIONS.items()}
    missing = {section: lacks(section, args.tiny) for section in plan}
    print(", ".join(known.values()), flush=True)
    for section, names in missing.items():
        if names and (not args.only or section in args.only):
            print(f"{section}: left out, it needs {', '.join(names)} (--pack)", flush=True)
    for has_failed in (False, True):
        for section, sides in plan.items():
            if missing[section] or (args.only and section not in args.only):
                continue
            wanted = []
            for side in sides:
                if side not in there.get(section, {}) and ((section, side) in failed) == has_failed:
                    wanted.append(side)
            left = deadline - time.monotonic()
            chosen, needed = choose(SECTIONS[section], wanted, left)
            if chosen:
                limit = left if args.tiny else min(left, 30 + 1.5 * needed)
                run_section(section, chosen, limit, args, known)
    print("\n" + table(read(args.out), machine), flush=True)


# --- tables -------------------------------------------------------------------------------------------------


def shown(row: Row) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    return ", ".join(f"{name} {cell(value)}" for name, value in row["value"].items())


def cell(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)


def ratio(section: str, side: str, sides: dict[str, Row]) -> str:
    """A side's figure as a multiple of that of the side beside which it is shown; "" without one."""
    if section not in BESIDE:
        return ""
    figure, end = BESIDE[section]
    beside = f"{side.split(', ')[0]}, {end}"
    if beside not in sides or beside == side or figure not in sides[side]["value"]:
        return ""
    return f"{sides[side]['value'][figure] / sides[beside]['value'][figure]:.4g}"


def table(rows: list[Row], machine: tuple[str, str], only: str | None = None) -> str:
    """Markdown, of one card and one version of PyTorch: for each section (only: one of them) tables of the sides
    that have the same first figure."""
    there, lines = measured(rows, machine), []
    for section in SECTIONS:
        kinds: dict[str, dict[str, Row]] = {}
        if only in (None, section):
            for side in SECTIONS[section]:
                if row := there.get(section, {}).get(side):
                    kinds.setdefault(next(iter(row["value"])), {})[side] = row
        for sides in kinds.values():
            lines += [*one_table(section, sides), ""]
    for (section, side), reason in failures(rows, machine).items():
        if only in (None, section):
            lines.append(f"{section}: {side}: failed: {reason}  ")
    return "\n".join(lines).strip()


def one_table(section: str, sides: dict[str, Row]) -> list[str]:
    names = []
    for row in sides.values():
        for name, value in row["value"].items():
            if name not in names and not isinstance(value, list):  # lists of kernels are for --plan
                names.append(name)
    ratios = {side: ratio(section, side, sides) for side in sides}
    heads = [section, *names]
    if any(ratios.values()):
        heads.append("{}, times that of {}".format(*BESIDE[section]))
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for side, row in sides.items():
        cells = [side, *(cell(row["value"].get(name, "")) for name in names)]
        cells += [ratios[side]] * any(ratios.values())
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def machines(rows: list[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(machine_of(row) for row in rows))


def plan() -> str:
    """Measured and missing, for each card; of results/gpu.jsonl."""
    rows = read(RESULTS)
    lines = []
    for machine in machines(rows) or [("any card", "any version")]:
        there, failed = measured(rows, machine), failures(rows, machine)
        lines.append(f"{machine[0]}, torch {machine[1]}")
        for section, sides in SECTIONS.items():
            done = there.get(section, {})
            seconds = sum(sides[side][0] for side in sides if side not in done)
            lines.append(f"  {section}: {len(done)} of {len(sides)} sides measured, {seconds} s are missing")
            for side in sides:
                if side in done:
                    lines.append(f"    {done[side]['date']}  {side}: {shown(done[side])}")
                else:
                    lines.append(f"    missing     {side} {failed.get((section, side), '')}".rstrip())
    return "\n".join(lines)


def keep(files: list[Path]) -> None:
    """Append the figures of these files that are not there yet, then write the pages."""
    from gpu_pages import write_pages

    held = read(RESULTS)
    for file in files:
        new = []
        for row in read(file):
            if row not in held and not row["card"].endswith(TOY) and row["card"] != "CPU":
                new.append(row)
        append(RESULTS, new)
        held += new
        print(f"{file}: {len(new)} lines kept")
    write_pages(held, ROOT)


# --- what travels -------------------------------------------------------------------------------------------

PACKAGES = (
    "trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 gguf==0.19.0 bitsandbytes==0.50.2".split()
)
HALF = 48 * 2**20  # bytes


def pack(args: argparse.Namespace) -> None:
    """Fill .carry/. The packages are for Python 3.12 and CUDA 13.0 on Linux."""
    site, rows = CARRY / "site", CARRY / "rows"
    shutil.rmtree(CARRY, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-compile", "--python-version", "3.12", "--target", str(site)]
    subprocess.run([*command, *PACKAGES], check=True)
    for library in (site / "bitsandbytes").glob("libbitsandbytes_*.so"):
        if not library.stem.endswith(("_cuda130", "_cpu")):
            library.unlink()
    rows.mkdir()
    (rows / "commit").write_text(facts("cpu", False)["commit"])

    import gpu_sections
    import real_model
    import shakespeare

    subprocess.run([sys.executable, str(HERE / "prepare.py"), str(rows / "inputs")], cwd=ROOT, check=True)
    for name in ("inputs/tiny", "inputs/20m", "cache"):  # models of other benchmarks
        shutil.rmtree(rows / name, ignore_errors=True)
    if args.text:
        shakespeare.FOLDER = rows / "shakespeare"
        shakespeare.FOLDER.mkdir()
        tokenizer = shakespeare.write_text(args.text)
        shakespeare.write_model(shakespeare.RECIPES["gpu"]["config"], tokenizer)
    if args.alpaca:
        shutil.copy(args.alpaca, rows / "alpaca.json")
    if args.nanogpt:
        (rows / "nanoGPT").mkdir()
        shutil.copy(args.nanogpt / "model.py", rows / "nanoGPT")
    predictions = {}
    for _, function, *words in SECTIONS["sft"].values():
        if function == "sft" and words[-1] == "eager":
            predictions[" ".join(map(str, words[:-1]))] = gpu_sections.predict(*words[:-1])
    (rows / "predictions.json").write_text(json.dumps(predictions))
    gguf = real_model.download()
    for part, some in enumerate((gguf[:HALF], gguf[HALF:])):
        (CARRY / "real" / str(part)).mkdir(parents=True)
        (CARRY / "real" / str(part) / "gguf").write_bytes(some)
    for folder in (site, rows, CARRY / "real" / "0", CARRY / "real" / "1"):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{folder.relative_to(ROOT)}: {size / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, help="measure what is missing, as far as it fits")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu.jsonl", help="appended to")
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS)
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--plan", action="store_true", help="what is measured and missing")
    parser.add_argument(
        "--keep", type=Path, nargs="*", metavar="FILE", help="without one: write the pages anew"
    )
    parser.add_argument("--pack", action="store_true", help="fill .carry/")
    for name in ("text", "alpaca", "nanogpt"):
        parser.add_argument(f"--{name}", type=Path, help="for --pack")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # the process of a section
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    if args.plan:
        print(plan())
    elif args.keep is not None:
        keep(args.keep)
    elif args.pack:
        pack(args)
    elif args.job:
        do_job(json.loads(args.job))
    else:
        sys.path.append(str(CARRY / "site"))  # for `lacks`
        measure_all(args)


if __name__ == "__main__":
    main()
