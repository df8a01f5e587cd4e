"""LLaMA-Factory's `llamafactory-cli train` with a clock, on the rows of the benchmarks, in their chat
template.

    PYTHON benchmarks/peer_llamafactory.py result.json spec.json     # called by others.py, with LLaMA-Factory's Python

spec: as of peers.py; "kind": sft, dpo or pt; "options": arguments of its YAML, over those below. Chats and
pairs are given as text. Rows of pretraining are given as tokens (`tokenized_path`), because it would cut them
in the order of the documents. Its collator leaves the padding token out of the loss, which in these models
ends the documents, too: for pretraining the model's folder is copied with another one.
"""

import importlib.machinery
import json
from pathlib import Path
import shutil
import sys
import types
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
try:
    import torchaudio  # noqa: F401
except (ImportError, OSError):  # PyPI's is built for CUDA. It is imported at its start, and would read sound.
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from clock import Clock  # noqa: E402
import datasets  # noqa: E402
from llamafactory.data.formatter import StringFormatter  # noqa: E402
from llamafactory.data.template import Template, register_template  # noqa: E402
from llamafactory.train.tuner import run_exp  # noqa: E402
import numpy as np  # noqa: E402
from peers import COMMON, StepClock, counted  # noqa: E402

ARGUMENTS = {name: value for name, value in COMMON.items() if name != "train_sampling_strategy"} | {
    "do_train": True, "finetuning_type": "full", "overwrite_cache": True, "disable_shuffling": True, "warmup_steps": 0,
    "cutoff_len": 1024, "pref_beta": 0.1, "pref_loss": "sigmoid", "preprocessing_num_workers": None, "template": "benchmark",
}  # fmt: skip
SHAREGPT = {
    "formatting": "sharegpt",
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}
DATASETS = {
    "sft": SHAREGPT | {"columns": {"messages": "messages"}},
    "dpo": SHAREGPT
    | {"ranking": True, "columns": {"messages": "prompt", "chosen": "chosen", "rejected": "rejected"}},
}


class LineBetweenTurns(Template):
    """Of a template's slots none stands between two exchanges; ours has a newline there, which nobody is
    trained on."""

    def _encode(self, tokenizer: Any, messages: list[dict], *args: Any) -> list[list[int]]:
        first, *others = super()._encode(tokenizer, messages, *args)
        line = tokenizer.encode("\n", add_special_tokens=False)
        return [first, *(line + ids if i % 2 else ids for i, ids in enumerate(others))]


class Count(StepClock):
    """What each batch holds. In chats the padding is token 0, which stands nowhere else; full rows have
    none."""

    def on_train_begin(self, *args: Any, train_dataloader: Any = None, **named: Any) -> None:
        def useful(batch: Any) -> int:
            if "full_rows" in self.clock.result:
                batch["labels"][:, 0] = -100  # has no loss, and yet transformers 5.6 divides by it, too
                return batch["input_ids"].numel()
            return int((batch["input_ids"] != 0).sum())

        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # under Accelerate's
        loader.collate_fn = counted(loader.collate_fn, self.clock, useful)
        super().on_train_begin()


def conversations(spec: dict, work: Path) -> dict[str, Any]:
    """What its arguments say of the chats or pairs, which are written for it."""
    rows = [json.loads(line) for line in open(spec["rows"], encoding="utf-8")]
    if spec["kind"] == "dpo":
        rows = [
            row | {side: row[side][0] for side in ("chosen", "rejected")}
            for row in rows[: spec["steps"] * spec["batch"]]
        ]
    (work / "rows.json").write_text(json.dumps(rows))
    (work / "dataset_info.json").write_text(
        json.dumps({"rows": {"file_name": "rows.json"} | DATASETS[spec["kind"]]})
    )
    return {}


def pretraining(spec: dict, work: Path) -> dict[str, Any]:
    rows = np.load(spec["rows"])
    table = datasets.Dataset.from_dict(
        {"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist()}
    )
    datasets.DatasetDict({"train": table}).save_to_disk(str(work / "tokens"))
    model = shutil.copytree(spec["model"], work / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<|im_end|>"}))
    return {"tokenized_path": str(work / "tokens"), "model_name_or_path": str(model)}


def main() -> None:
    spec = json.loads(Path(sys.argv[2]).read_text())
    work, kind, clock = Path(spec["work"]), spec["kind"], Clock()
    work.mkdir(parents=True, exist_ok=True)
    given = pretraining(spec, work) if kind == "pt" else conversations(spec, work)
    if kind == "pt":
        clock.result["full_rows"] = True
    register_template(
        "benchmark",
        format_user=StringFormatter(["<|im_start|>user\n{{content}}<|im_end|>\n<|im_start|>assistant\n"]),
        format_assistant=StringFormatter(["{{content}}<|im_end|>"]),
        template_class=LineBetweenTurns,
    )
    arguments = ARGUMENTS | {
        "stage": kind, "model_name_or_path": spec["model"], "dataset": "rows", "dataset_dir": str(work),
        "output_dir": str(work / "out"), "max_steps": spec["steps"], "per_device_train_batch_size": spec["batch"],
    }  # fmt: skip
    run_exp(arguments | given | spec["options"], callbacks=[Count(clock)])
    clock.write(sys.argv[1])


if __name__ == "__main__":
    main()
