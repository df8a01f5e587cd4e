"""A real chat model, SmolLM2-135M-Instruct: SFT and DPO beside TRL, GRPO from right answers alone.

    python benchmarks/real_model.py outputs/smollm2
    python benchmarks/real.py --alpaca alpaca_data.json --pairs hh.jsonl [--rounds 3] [--only sft dpo grpo]
    pip install reasoning-gym
    python benchmarks/real.py --only gym

The weights are those of a four-bit file, dequantised. --model takes a name of the Hub, too; that has not been
tried. sft and dpo: the first rows of Alpaca and of HH-RLHF that have at most 512 tokens, the same
rows, order, batch and settings on all sides, as in sft.py and dpo.py. To that end the template does not write
the newline after the last turn, and marks what the assistant says; its text is otherwise the model's own.
grpo: data/configs/smollm2.yaml, over seeds, with LoRA once, and by TRL's GRPOTrainer once; the held-out
questions are answered greedily by transformers' generate().
gym: the same GRPO on a task of reasoning-gym, by its own score. Before each question stand the same EXAMPLES
others with their answers, since the score wants a bare answer, and the model likes to say a sentence.
Writes results/real.json and docs/real.png.
"""

from collections.abc import Callable, Iterator
import itertools
import json
from pathlib import Path
import re
import shutil
import sys
from typing import Any

from compare import (
    RESULTS,
    ROOT,
    WORK,
    Result,
    arguments,
    compare,
    machine,
    markdown,
    ours,
    peer,
    run_process,
    wanted,
)
from curves import draw
from reasoning import REWARDS, answered, greedy_texts

FOLDER = WORK / "real"
MODEL = FOLDER / "model"
BATCH, LENGTH = 8, 512
PAIRS_A_STEP = 4  # with 8, TRL needs 21 GB without checkpointing
CHATS, PAIRS = 400, 200
SFT_STEPS, DPO_STEPS = 8, 6
GRPO_STEPS, SAVED, COMPLETIONS = 20, 5, 64
GRPO: dict[str, Any] = {"num_generations": 8, "max_completion_length": 20, "learning_rate": 1e-5}
GYM = [
    "basic_arithmetic",
    "max_terms=2",
    "max_digits=1",
    "allow_parentheses=false",
    "operators=['+','-','*']",
]
EXAMPLES, GYM_TOKENS = 4, 8
TRL_GRPO: dict[str, Any] = {
    "gradient_checkpointing": False, "shuffle_dataset": True, "save_strategy": "steps", "save_only_model": True,
    "save_steps": SAVED, "temperature": 1.0, "loss_type": "dapo", "beta": 0.0, "reward_funcs": ["real:right_number"],
}  # fmt: skip


def right_number(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float]:
    """For TRL, what exact_number gives these short answers: 1 if the last number is the right one."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion[0]["content"])
        rewards.append(float(bool(numbers) and numbers[-1] == right))
    return rewards


def rows_of(path: str, read: Callable[[dict], dict]) -> Iterator[dict]:
    """Of a .json or a .jsonl file; both sources have some rows with an empty answer, which are left out."""
    from common.data import BadRow

    text = Path(path).read_text(encoding="utf-8")
    if text.startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        try:
            yield read(row)
        except BadRow:
            continue


def prepare_inputs(model: str, alpaca: str, pairs: str) -> None:
    """The model with the marked template, and the rows, in the order in which our runs take them."""
    from common.data import as_chat, as_preference
    from common.data.order import Order
    import prepare
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    own = tokenizer.chat_template
    turn = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    if turn not in own:
        raise SystemExit(f"{model}: not the chat template of SmolLM2-Instruct")
    marked = """{%- if message['role'] == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else -%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{%- endif -%}
{%- if not loop.last or add_generation_prompt -%}{{ '\n' }}{%- endif -%}"""
    tokenizer.chat_template = own.replace(turn, marked)
    transformers.AutoModelForCausalLM.from_pretrained(model).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)

    def size(messages: list[dict]) -> int:
        return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True).input_ids)

    chats, lengths = [], []
    for chat in rows_of(alpaca, as_chat):
        tokens = size(chat["messages"])
        if tokens <= LENGTH and len(chats) < CHATS:
            chats.append({"messages": chat["messages"]})
            lengths.append(tokens)
    prepare.write_rows(FOLDER, "chats", chats, Order([CHATS], 0), lengths)
    preferences, lengths = [], []
    for pair in rows_of(pairs, as_preference):
        tokens = [size(pair["prompt"] + pair[side]) for side in ("chosen", "rejected")]
        if max(tokens) <= LENGTH and len(preferences) < PAIRS:
            preferences.append(pair)
            lengths.append(tokens)
    prepare.write_rows(FOLDER, "pairs", preferences, Order([PAIRS], 0), lengths)


def sft(rounds: int, steps: int, bf16: bool) -> dict:
    lengths = json.loads((FOLDER / "chats.lengths.json").read_text())
    tokens = [float(sum(lengths[i : i + BATCH])) for i in range(0, len(lengths), BATCH)]
    words = ["--model_name_or_path", MODEL, "--dataset_name", FOLDER / "chats.jsonl", "--max_length", LENGTH]
    words += ["--per_device_train_batch_size", BATCH, "--max_steps", steps]

    def trl(kind: str = "trl_sft", **options: Any) -> Any:
        return peer(kind, MODEL, FOLDER / "chats.ordered.jsonl", steps, BATCH, bf16=bf16, **options)

    sides = {
        "ours": ours("train_sft.py", *words, env={"ACCELERATE_MIXED_PRECISION": "bf16" if bf16 else "no"}),
        "TRL defaults": trl(),
        "TRL padding-free": trl(padding_free=True, max_length=None, gradient_checkpointing=False),
        "plain loop": trl("bare_sft"),
    }
    if bf16:
        del sides["plain loop"]
    return compare(
        f"SFT, SmolLM2-135M, Alpaca, {'bfloat16 autocast' if bf16 else 'float32'}",
        "useful tokens/s",
        sides,
        rounds,
        amounts=lambda side, result: tokens[:steps],
        same_maths=() if bf16 else tuple(name for name in sides if name != "ours"),
        best_of=("TRL defaults", "TRL padding-free"),
    )


def dpo(rounds: int, steps: int) -> dict:
    words = ["--model_name_or_path", MODEL, "--dataset_name", FOLDER / "pairs.jsonl", "--max_length", LENGTH]
    words += ["--per_device_train_batch_size", PAIRS_A_STEP, "--max_steps", steps, "--beta", 0.1]

    def trl(**options: Any) -> Any:
        return peer("trl_dpo", MODEL, FOLDER / "pairs.ordered.jsonl", steps, PAIRS_A_STEP, **options)

    sides = {
        "ours": ours("train_dpo.py", *words),
        "TRL defaults": trl(),
        "TRL without checkpointing": trl(gradient_checkpointing=False),
    }
    peers = ("TRL defaults", "TRL without checkpointing")
    return compare(
        "DPO, SmolLM2-135M, HH-RLHF, float32",
        "pairs/s",
        sides,
        rounds,
        amounts=lambda side, result: [float(PAIRS_A_STEP)] * steps,
        same_maths=peers,
        best_of=peers,
    )


def right_share(model_folder: str | Path) -> float:
    """Of the held-out questions, answered greedily."""
    rows = [json.loads(line) for line in (ROOT / "data/arithmetic/validation.jsonl").open()]
    prompts = [row["prompt"] for row in rows]
    texts = greedy_texts(model_folder, prompts, GRPO["max_completion_length"])
    rewards = right_number(prompts, [[{"content": text}] for text in texts], [row["answer"] for row in rows])
    return sum(rewards) / len(rewards)


def our_grpo(model: str, seed: int, steps: int, *words: Any) -> Callable[[], Result]:
    """It leaves its models in FOLDER/grpo/checkpoint-<step>."""
    work = FOLDER / "grpo"
    shutil.rmtree(work, ignore_errors=True)
    settings = ["--config", "data/configs/smollm2.yaml", "--model_name_or_path", model, "--output_dir", work]
    settings += ["--seed", seed, "--max_steps", steps, "--save_total_limit", 0]
    for name, value in GRPO.items():
        settings += [f"--{name}", value]
    return ours("train_grpo.py", *settings, *words)


def trl_grpo(model: str, rows: Path, steps: int, **options: Any) -> Callable[[], Result]:
    """As our_grpo."""
    options = GRPO | TRL_GRPO | options
    return peer("trl_grpo", model, rows, steps, COMPLETIONS, work=FOLDER / "grpo", **options)


def grpo(model: str, side: str, seed: int, steps: int) -> dict[str, Any]:
    """The curve of a run: of each saved step the CPU seconds up to it, and what share is right."""
    words = ["--save_steps", SAVED]
    if side == "ours, LoRA":
        words += ["--use_peft", "--lora_r", 16, "--learning_rate", 2e-4]
    work = FOLDER / "grpo"
    started = our_grpo(model, seed, steps, *words)
    if side == "TRL":
        started = trl_grpo(model, ROOT / "data/arithmetic/train.jsonl", steps, seed=seed)
    found: Result = started()
    curve = {0: [0.0, right_share(model)]}
    for step in range(SAVED, steps + 1, SAVED):
        folder = work / f"checkpoint-{step}"
        curve[step] = [round(found["cpu"][step] - found["cpu"][0], 1), right_share(folder)]
    shutil.rmtree(work)
    print(f"{side}, seed {seed}: {curve}", file=sys.stderr, flush=True)
    return {"side": side, "seed": seed, "curve": curve, "peak_mib": round(found["peak_mib"])}


def grpo_table(runs: list[dict[str, Any]]) -> str:
    steps = list(runs[0]["curve"])
    lines = ["| right, held out, at step | " + " | ".join(map(str, steps)) + " | CPU s | peak memory |"]
    lines.append("|---" * (len(steps) + 3) + "|")
    for run in runs:
        shares = [f"{share:.0%}" for _, share in run["curve"].values()]
        seconds = list(run["curve"].values())[-1][0]
        lines.append(
            f"| {run['side']}, seed {run['seed']} | "
            + " | ".join(shares)
            + f" | {seconds:.0f} | {run['peak_mib']:,} MiB |"
        )
    return "\n".join(lines)


def task_rows() -> Path:
    """The folder of GYM's rows; before each question stand the first EXAMPLES of training with their answers."""
    folder = FOLDER / "gym"
    run_process(["-m", "tools.reasoning_tasks", GYM[0], str(folder), *GYM[1:]])
    examples: list[dict] = []
    for name in ("train", "validation"):
        file = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.open()]
        while len(examples) < 2 * EXAMPLES:
            row = rows.pop(0)
            examples += row["prompt"] + row["completion"]
        for row in rows:
            row["prompt"] = examples + row["prompt"]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def gym(model: str, seeds: list[int], steps: int) -> None:
    """Of each side, reward and seed: what is right before and after, the CPU seconds, and the peak memory. Kept
    after each run."""
    folder = task_rows()
    before = answered(model, folder)
    runs = []
    lines = [
        f"| {GYM[0]}, solved, held out | before | after | CPU s | peak memory |",
        "|---|---|---|---|---|",
    ]
    for side, reward, seed in [*itertools.product(["ours"], REWARDS, seeds), ("TRL", "solved", seeds[0])]:
        words = ["--dataset_name", folder, "--max_completion_length", GYM_TOKENS, "--save_steps", steps]
        words += ["--reward_funcs", f"tools/reasoning_tasks.py:{reward}"]
        started = our_grpo(model, seed, steps, *words)
        if side == "TRL":
            options = {"seed": seed, "save_steps": steps, "max_completion_length": GYM_TOKENS}
            options["reward_funcs"] = [f"tools.reasoning_tasks:{reward}"]
            started = trl_grpo(model, folder / "train.jsonl", steps, **options)
        found = started()
        after = answered(FOLDER / f"grpo/checkpoint-{steps}", folder)
        seconds = round(found["cpu"][steps] - found["cpu"][0])
        memory = round(found["peak_mib"])
        run = {"side": side, "reward": reward, "seed": seed, "before": before, "after": after}
        runs.append(run | {"seconds": seconds, "peak_mib": memory})
        shares = f"{before['solved']:.0%} | {after['solved']:.0%}"
        lines.append(f"| {side}, reward {reward}, seed {seed} | {shares} | {seconds} | {memory:,} MiB |")
        keep(gym={"settings": GYM, "runs": runs, "markdown": "\n".join(lines)})
    print("\n".join(lines))


def keep(**found: Any) -> dict[str, Any]:
    """Into results/real.json, beside what is there of the other tables; returns all."""
    file = RESULTS / "real.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results |= {name: value | {"machine": machine()} for name, value in found.items()}
    file.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> None:
    args = arguments(
        __doc__,
        model={"default": "outputs/smollm2", "help": "folder, or a name of the Hub"},
        alpaca={"help": "Alpaca's rows, a .json or .jsonl"},
        pairs={"help": "pairs of HH-RLHF, a .jsonl"},
        seeds={"type": int, "nargs": "+", "default": [0, 1, 2], "help": "of GRPO"},
        steps={"type": int, "help": "other than all, to see that it runs"},
    )
    sys.path.insert(0, str(ROOT))
    model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    if wanted(args.only, "sft") or wanted(args.only, "dpo"):
        if not (FOLDER / "pairs.lengths.json").exists():  # the last that is written
            prepare_inputs(model, args.alpaca, args.pairs)
    if wanted(args.only, "sft"):
        print(markdown(keep(sft=sft(args.rounds, args.steps or SFT_STEPS, bf16=False))["sft"]))
        print(markdown(keep(sft_bf16=sft(args.rounds, args.steps or SFT_STEPS, bf16=True))["sft_bf16"]))
    if wanted(args.only, "dpo"):
        print(markdown(keep(dpo=dpo(args.rounds, args.steps or DPO_STEPS))["dpo"]))
    if wanted(args.only, "grpo"):
        sides = [("ours", seed) for seed in args.seeds]
        sides += [("ours, LoRA", args.seeds[0]), ("TRL", args.seeds[0])]
        runs = []
        for side, seed in sides:
            runs.append(grpo(model, side, seed, args.steps or GRPO_STEPS))
            keep(grpo={"runs": runs, "markdown": grpo_table(runs)})
        print(grpo_table(runs))
        curves: dict[str, list[list[list[float]]]] = {}
        for run in runs:
            points = [[seconds, 100 * share] for seconds, share in run["curve"].values()]
            curves.setdefault(run["side"], []).append(points)
        draw(
            "real",
            "GRPO on SmolLM2-135M",
            "CPU seconds",
            "% right, held out",
            curves,
        )
    if wanted(args.only, "gym"):
        gym(model, args.seeds, args.steps or GRPO_STEPS)


if __name__ == "__main__":
    main()
