"""torchtune's recipes full_finetune_single_device and full_dpo_distributed with a clock, on the rows of the
benchmarks.

    PYTHON benchmarks/peer_torchtune.py result.json spec.json     # called by others.py, with torchtune's Python

spec: as of peers.py; "kind": sft (rows: chats.tokens.json), dpo (pairs.tokens.json) or pretrain (text*.npy);
"options": of its YAML, over those of `settings`; `packed`: rows of so many tokens. The model is its Llama 3.2
(whose embedding is tied) without the scaling of RoPE, the weights are read by its checkpointer. The rows are
given as tokens: its tokenizers are those of the models it knows. Its settings for one device (8-bit AdamW, a
step inside the backward pass) are left for the same AdamW as on the other sides, its chunked loss is kept.
DPO of all weights it has for several processes alone: here with one, on Gloo.
"""

from collections.abc import Callable
import importlib.util
import json
import os
from pathlib import Path
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from clock import Clock  # noqa: E402
import numpy as np  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
import torch  # noqa: E402
import torchtune  # noqa: E402
from torchtune.datasets import PackedDataset  # noqa: E402
from torchtune.training.metric_logging import DiskLogger  # noqa: E402

CLOCK = Clock()


class ClockLogger(DiskLogger):
    """Its logger, which is called at the end of each step."""

    def log_dict(self, payload: dict, step: int) -> None:
        super().log_dict(payload, step)
        CLOCK.result["loss"].append(float(payload["loss"]))
        CLOCK.step()


class Padding:
    """All that the recipe asks of a tokenizer."""

    pad_id = 0
    max_seq_len = None


def rows(tokenizer: Any, path: str, packed: int) -> Any:
    if path.endswith(".npy"):
        found = [{"tokens": row.tolist(), "labels": row.tolist()} for row in np.load(path)]
    else:
        found = [
            {"tokens": row["input_ids"], "labels": row["labels"]}
            for row in json.loads(Path(path).read_text())
        ]
    return PackedDataset(found, max_seq_len=packed) if packed else found


def pairs(tokenizer: Any, path: str, packed: int) -> list[dict[str, list[int]]]:
    found = json.loads(Path(path).read_text())
    return [
        {f"{side}_{name}": row[side][name] for side in row for name in ("input_ids", "labels")}
        for row in found
    ]


def constant(optimizer: Any, **named: Any) -> torch.optim.lr_scheduler.LambdaLR:
    """Of DPO, which asks for a schedule."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def counted(collate: Callable, packed: bool) -> Callable:
    """The collator, and beside it what each batch holds."""

    def inner(rows: list[dict]) -> Any:
        batch = collate(rows)
        if isinstance(batch, tuple):  # of pairs
            useful = sum(len(row[f"{side}_input_ids"]) for row in rows for side in ("chosen", "rejected"))
            CLOCK.result["batches"].append({"rows": len(rows), "useful": useful, "padded": batch[0].numel()})
            return batch
        tokens = [torch.as_tensor(row["tokens"]) for row in rows]
        useful = sum(int((ids != Padding.pad_id).sum()) if packed else len(ids) for ids in tokens)
        CLOCK.result["batches"].append(
            {"rows": len(rows), "useful": useful, "padded": batch["tokens"].numel()}
        )
        return batch

    return inner


def settings(spec: dict) -> dict[str, Any]:
    hf, packed = (
        json.loads((Path(spec["model"]) / "config.json").read_text()),
        spec["options"].pop("packed", 0),
    )
    work = spec["work"]
    given = {
        "output_dir": work, "device": "cpu", "dtype": "fp32", "seed": 0, "epochs": 1, "max_steps_per_epoch": spec["steps"],
        "batch_size": spec["batch"], "shuffle": False, "gradient_accumulation_steps": 1, "clip_grad_norm": 1.0,
        "resume_from_checkpoint": False, "optimizer_in_bwd": False, "compile": False, "log_every_n_steps": 1,
        "model": {
            "_component_": "torchtune.models.llama3_2.llama3_2", "vocab_size": hf["vocab_size"], "scale_factor": 1,
            "num_layers": hf["num_hidden_layers"], "num_heads": hf["num_attention_heads"], "embed_dim": hf["hidden_size"],
            "num_kv_heads": hf["num_key_value_heads"], "max_seq_len": hf["max_position_embeddings"],
            "norm_eps": hf["rms_norm_eps"], "intermediate_dim": hf["intermediate_size"],
            "rope_base": int(hf["rope_parameters"]["rope_theta"]),
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": spec["model"],
            "checkpoint_files": ["model.safetensors"], "output_dir": f"{work}/out", "model_type": "LLAMA3_2",
        },
        "tokenizer": {"_component_": "__main__.Padding"},
        "dataset": {"_component_": "__main__.rows", "path": spec["rows"], "packed": packed},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4, "weight_decay": 0.0},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": "__main__.ClockLogger", "log_dir": f"{work}/logs"},
    }  # fmt: skip
    if spec["kind"] == "dpo":
        given |= {
            "ref_checkpointer": given["checkpointer"], "lr_scheduler": {"_component_": "__main__.constant"},
            "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1},
            "dataset": given["dataset"] | {"_component_": "__main__.pairs"},
        }  # fmt: skip
    return given


def recipe_of(kind: str) -> type:
    """The recipes are files of a folder that is not a package."""
    name = "full_dpo_distributed" if kind == "dpo" else "full_finetune_single_device"
    there = importlib.util.spec_from_file_location(
        name, Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(there)
    there.loader.exec_module(module)
    if kind != "dpo":
        return module.FullFinetuneRecipeSingleDevice
    for name in (
        "get_memory_stats",
        "log_memory_stats",
        "cleanup_before_training",
    ):  # of a GPU's memory alone, and asked of a CPU's
        setattr(module.training, name, lambda *args, **named: {})
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
    return module.FullDPORecipeDistributed


def main() -> None:
    spec = json.loads(Path(sys.argv[2]).read_text())
    Path(spec["work"]).mkdir(parents=True, exist_ok=True)
    config = OmegaConf.create(settings(spec) | spec["options"])
    recipe = recipe_of(spec["kind"])(cfg=config)
    recipe.setup(cfg=config)
    recipe.save_checkpoint = lambda *args, **named: None
    recipe._dataloader.collate_fn = counted(recipe._dataloader.collate_fn, bool(config.dataset.packed))
    CLOCK.begin()
    recipe.train()
    recipe.cleanup()
    CLOCK.write(sys.argv[1])


if __name__ == "__main__":
    main()
