"""The other sides: TRL's trainers, transformers' Trainer and a bare PyTorch loop, on the same model and rows.

    python benchmarks/peers.py result.json spec.json      # called by the benchmarks

spec: {"kind": trl_sft, trl_dpo, trl_grpo, trainer, trainer_documents, bare_sft, bare_pretrain or
bare_documents; "model": folder; "rows": file; "steps": optimizer steps; "batch": rows of a step; "options":
arguments of the config, over COMMON}. Where TRL's own default differs from COMMON, the benchmark says so. The
bare loops have transformers' default attention, which is PyTorch's SDPA with the mask of the padding.
"""

import importlib
import json
import os
from pathlib import Path
import sys
from typing import Any

sys.path[:1] = map(str, Path(__file__).resolve().parents[:2])  # this folder; the repository, for rewards

from clock import Clock  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

LEARNING_RATE = 1e-4
# The same on all sides: float32, AdamW without weight decay, a constant learning rate, clipping to 1, a log
# line a step, no evaluation, no saving. torch's fused AdamW is also transformers' default.
COMMON = {
    "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
    "bf16": False, "use_cpu": not torch.cuda.is_available(), "report_to": "none", "logging_steps": 1, "save_strategy": "no",
    "dataloader_num_workers": 0, "train_sampling_strategy": "sequential", "disable_tqdm": True, "seed": 0,
}  # fmt: skip


class StepClock(transformers.TrainerCallback):
    def __init__(self, clock: Clock):
        self.clock = clock

    def on_train_begin(self, *args: Any, **named: Any) -> None:
        self.clock.begin()

    def on_step_end(self, *args: Any, **named: Any) -> None:
        self.clock.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **named: Any) -> None:
        if logs and "loss" in logs:
            self.clock.result["loss"].append(float(logs["loss"]))
            kept = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            self.clock.result.setdefault("metrics", []).append(kept)


def counted(collate: Any, clock: Clock, useful: Any) -> Any:
    """The collator, and beside it what each batch holds: useful tokens, and tokens with padding."""

    def inner(rows: list[Any]) -> Any:
        batch = collate(rows)
        clock.result["batches"].append(
            {"rows": len(rows), "useful": useful(batch), "padded": batch["input_ids"].numel()}
        )
        return batch

    return inner


def useful_tokens(batch: Any) -> int:
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


def read_jsonl(path: str) -> list[dict]:
    return [json.loads(line) for line in open(path, encoding="utf-8")]


def trl_sft(spec: dict, clock: Clock) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    options = COMMON | {"assistant_only_loss": True, "max_length": 1024} | spec["options"]
    config = SFTConfig(
        spec["work"], max_steps=spec["steps"], per_device_train_batch_size=spec["batch"], **options
    )
    rows = [{"messages": row["messages"]} for row in read_jsonl(spec["rows"])]
    trainer = SFTTrainer(
        spec["model"], config, train_dataset=Dataset.from_list(rows), callbacks=[StepClock(clock)]
    )
    trainer.data_collator = counted(trainer.data_collator, clock, useful_tokens)
    trainer.train()


def trl_dpo(spec: dict, clock: Clock) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    options = COMMON | {"max_length": 1024, "beta": 0.1} | spec["options"]
    config = DPOConfig(
        spec["work"], max_steps=spec["steps"], per_device_train_batch_size=spec["batch"], **options
    )
    rows = Dataset.from_list(read_jsonl(spec["rows"])[: spec["steps"] * spec["batch"]])
    trainer = DPOTrainer(spec["model"], args=config, train_dataset=rows, callbacks=[StepClock(clock)])
    trainer.data_collator = counted(trainer.data_collator, clock, useful_tokens)
    trainer.train()


def trl_grpo(spec: dict, clock: Clock) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    functions = (
        name.split(":") for name in spec["options"].pop("reward_funcs", ["rewards:right_and_in_form"])
    )
    options = COMMON | {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 56,
        "shuffle_dataset": False,
    }
    options.pop("train_sampling_strategy")
    options |= spec["options"]
    config = GRPOConfig(
        spec["work"], max_steps=spec["steps"], per_device_train_batch_size=spec["batch"], **options
    )
    trainer = GRPOTrainer(
        spec["model"],
        [getattr(importlib.import_module(module), name) for module, name in functions],
        config,
        train_dataset=Dataset.from_list(read_jsonl(spec["rows"])),
        callbacks=[StepClock(clock)],
    )
    trainer.train()


def text_rows(spec: dict) -> list[dict]:
    rows = torch.from_numpy(np.load(spec["rows"]))
    return [{"input_ids": row, "labels": row} for row in rows]


def stack(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def trainer(spec: dict, clock: Clock) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    options = COMMON | spec["options"]
    config = transformers.TrainingArguments(
        spec["work"], max_steps=spec["steps"], per_device_train_batch_size=spec["batch"], **options
    )
    collate = counted(stack, clock, useful_tokens)
    transformers.Trainer(
        model, config, train_dataset=text_rows(spec), data_collator=collate, callbacks=[StepClock(clock)]
    ).train()


def padded_documents(documents: list[dict]) -> dict[str, torch.Tensor]:
    """Padded on the right, which is not trained on."""

    def pad(values: list[torch.Tensor], filler: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)

    ids = [torch.tensor(document["input_ids"]) for document in documents]
    return {
        "input_ids": pad(ids, 0),
        "attention_mask": pad([torch.ones_like(i) for i in ids], 0),
        "labels": pad(ids, -100),
    }


def trainer_documents(spec: dict, clock: Clock) -> None:
    """Whole documents: of each step those that we have in it, padded or end to end (flattened); or, grouped
    by length, its own."""
    options = COMMON | spec["options"]
    steps = [[{"input_ids": ids} for ids in step] for step in json.loads(Path(spec["rows"]).read_text())]
    collate, rows, batch = padded_documents, [{"input_ids": step} for step in steps], 1
    if options.pop("flattened", False):
        collate = transformers.DataCollatorWithFlattening()
    if options["train_sampling_strategy"] == "group_by_length":
        rows, batch = [document for step in steps for document in step], spec["batch"]
    else:  # a row is all documents of a step
        inner = collate
        collate = lambda rows: inner(rows[0]["input_ids"])  # noqa: E731
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    config = transformers.TrainingArguments(
        spec["work"], max_steps=spec["steps"], per_device_train_batch_size=batch, **options
    )
    collate = counted(collate, clock, useful_tokens)
    transformers.Trainer(
        model, config, train_dataset=rows, data_collator=collate, callbacks=[StepClock(clock)]
    ).train()


def bare_documents(spec: dict, clock: Clock) -> None:
    steps = json.loads(Path(spec["rows"]).read_text())[: spec["steps"]]
    bare(spec, clock, [padded_documents([{"input_ids": ids} for ids in step]) for step in steps])


def bare(spec: dict, clock: Clock, batches: list[dict[str, torch.Tensor]]) -> None:
    """Forward with the model's own loss, backward, clip, step: what one writes without any library."""
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).train()
    assert model.config._attn_implementation == "sdpa"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    clock.begin()
    for batch in batches:
        useful = useful_tokens(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(spec["options"].get("bf16"))):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.result["loss"].append(loss.item())
        clock.result["batches"].append(
            {"rows": len(batch["input_ids"]), "useful": useful, "padded": batch["input_ids"].numel()}
        )
        clock.step()


def bare_pretrain(spec: dict, clock: Clock) -> None:
    rows, size = text_rows(spec), spec["batch"]
    bare(spec, clock, [stack(rows[i * size : (i + 1) * size]) for i in range(spec["steps"])])


def bare_sft(spec: dict, clock: Clock) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"])
    found = [
        tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        for row in read_jsonl(spec["rows"])[: spec["steps"] * spec["batch"]]
    ]

    def padded(values: list[list[int]], filler: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(v) for v in values], batch_first=True, padding_value=filler
        )

    batches = []
    for i in range(0, len(found), spec["batch"]):
        rows = found[i : i + spec["batch"]]
        labels = [
            [t if m else -100 for t, m in zip(r["input_ids"], r["assistant_masks"], strict=True)]
            for r in rows
        ]
        batches.append({
            "input_ids": padded([r["input_ids"] for r in rows], tokenizer.pad_token_id),
            "attention_mask": padded([[1] * len(r["input_ids"]) for r in rows], 0),
            "labels": padded(labels, -100),
        })  # fmt: skip
    bare(spec, clock, batches)


def main() -> None:
    spec = json.loads(Path(sys.argv[2]).read_text())
    os.makedirs(spec["work"], exist_ok=True)
    clock = Clock()
    globals()[spec["kind"]](spec, clock)
    clock.write(sys.argv[1])


if __name__ == "__main__":
    main()
