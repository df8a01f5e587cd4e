"""LitGPT's `litgpt finetune_full` and `litgpt pretrain` with a clock, on the rows of the benchmarks.

    PYTHON benchmarks/peer_litgpt.py result.json spec.json     # called by others.py, with LitGPT's Python

spec: as of peers.py; "kind": sft (rows: chats.tokens.json) or pretrain (rows: text*.npy). The weights are
converted by its own function. The rows are given as tokens, in a data module of ours with its own collator:
its prompt styles know one exchange. For the same arithmetic as on the other sides: the learning rate is
constant, and in finetuning, which has neither, the embedding is tied and the optimizer clips. Its pretraining
compiles the model; TORCHDYNAMO_DISABLE=1 has it not.
"""

import json
from pathlib import Path
import shutil
import sys
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from clock import Clock  # noqa: E402
from lightning.fabric.loggers import CSVLogger  # noqa: E402
from litgpt.args import EvalArgs, TrainArgs  # noqa: E402
from litgpt.data import DataModule, get_sft_collate_fn  # noqa: E402
import litgpt.finetune.full as finetune  # noqa: E402
from litgpt.model import GPT, Config  # noqa: E402
import litgpt.pretrain as pretrain  # noqa: E402
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # noqa: E402
from litgpt.utils import save_config  # noqa: E402
import numpy as np  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
import torch  # noqa: E402

LEARNING_RATE = 1e-4


class ClippedAdamW(torch.optim.AdamW):
    def step(self, *args: Any) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(*args)


class ClockLogger(CSVLogger):
    """Its logger, which is called at the end of each step."""

    clock: Clock

    def log_metrics(self, metrics: dict, step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        self.clock.result["loss"].append(float(metrics["loss"]))
        self.clock.step()


class Rows(DataModule):
    """The clock begins with the first batch. LitGPT validates before that: on one row, and in finetuning on
    two tokens."""

    def __init__(self, rows: list[Any], collate: Any, row: Any, clock: Clock):
        self.rows, self.collate, self.row, self.clock = rows, collate, row, clock

    def connect(
        self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None, **named: Any
    ) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        def collate(rows: list[Any]) -> Any:
            if not self.clock.result["wall"]:
                self.clock.begin()
            batch = self.collate(rows)
            if isinstance(batch, dict):
                useful = sum(len(row["input_ids"]) for row in rows)
                shape = {"rows": len(rows), "useful": useful, "padded": batch["input_ids"].numel()}
            else:
                shape = {"rows": len(rows), "useful": batch.numel(), "padded": batch.numel()}
            self.clock.result["batches"].append(shape)
            return batch

        return torch.utils.data.DataLoader(self.rows, batch_size=self.batch_size, collate_fn=collate)

    def val_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader([self.row], batch_size=1, collate_fn=self.collate)


def convert(source: Path, target: Path) -> Config:
    """Its folder of the model."""
    target.mkdir(parents=True)
    hf = json.loads((source / "config.json").read_text())
    config = Config(
        name="benchmark", block_size=hf["max_position_embeddings"],
        vocab_size=hf["vocab_size"], padded_vocab_size=hf["vocab_size"],
        n_layer=hf["num_hidden_layers"], n_head=hf["num_attention_heads"], n_query_groups=hf["num_key_value_heads"],
        n_embd=hf["hidden_size"], intermediate_size=hf["intermediate_size"], norm_eps=hf["rms_norm_eps"],
        rope_base=int(hf["rope_parameters"]["rope_theta"]), rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(source / "model.safetensors"))
    torch.save(weights, target / "lit_model.pth")
    save_config(config, target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)
    return config


def settings(spec: dict, **more: Any) -> tuple[TrainArgs, EvalArgs]:
    size = {"global_batch_size": spec["batch"], "micro_batch_size": spec["batch"]}
    train = TrainArgs(save_interval=None, log_interval=1, lr_warmup_steps=0, **size, **more)
    tokens = 1 if spec["kind"] == "sft" else None
    return train, EvalArgs(
        interval=10**9, max_new_tokens=tokens, max_iters=1, initial_validation=False, final_validation=False
    )


def optimizer(name: str) -> dict:
    return {"class_path": name, "init_args": {"lr": LEARNING_RATE, "weight_decay": 0.0}}


def sft(spec: dict, clock: Clock) -> None:
    model = Path(spec["work"]) / "model"
    convert(Path(spec["model"]), model)
    rows = [
        {name: torch.tensor(ids) for name, ids in row.items()}
        for row in json.loads(Path(spec["rows"]).read_text())
    ]
    for row in rows:
        row["token_counts"] = {
            "raw": len(row["input_ids"]),
            "raw_plus_prompt_template": len(row["input_ids"]),
        }
    row = {name: ids[-2:] if name != "token_counts" else ids for name, ids in rows[0].items()}
    data = Rows(rows, get_sft_collate_fn(), row, clock)
    data.prompt_style = None
    finetune.GPT = tied
    finetune.get_lr_scheduler = lambda optimizer, **named: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    finetune.save_prompt_style = finetune.save_hyperparameters = lambda *args: None
    train, evaluate = settings(spec, epochs=100, max_steps=spec["steps"])
    finetune.setup(
        model, Path(spec["work"]) / "out", "32-true", data=data, train=train, eval=evaluate,
        optimizer=optimizer(f"{ClippedAdamW.__module__}.ClippedAdamW"), logger_name="csv",
    )  # fmt: skip


def tied(config: Config) -> GPT:
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight
    return model


def pretraining(spec: dict, clock: Clock) -> None:
    model = Path(spec["work"]) / "model"
    config = convert(Path(spec["model"]), model)
    rows = list(torch.from_numpy(np.load(spec["rows"])))
    pretrain.save_checkpoint = lambda *args: None
    length = len(rows[0]) - 1  # its rows have a token more, of which only the loss knows
    train, evaluate = settings(
        spec, max_tokens=spec["steps"] * spec["batch"] * length, max_norm=1.0, min_lr=LEARNING_RATE,
        tie_embeddings=True, max_seq_length=length,
    )  # fmt: skip
    pretrain.setup(
        "benchmark", config, Path(spec["work"]) / "out", "32-true", initial_checkpoint_dir=model, devices=1,
        data=Rows(rows, torch.stack, rows[0], clock), train=train, eval=evaluate,
        optimizer=optimizer("torch.optim.AdamW"), logger_name="csv",
    )  # fmt: skip


def main() -> None:
    spec, clock = json.loads(Path(sys.argv[2]).read_text()), Clock()
    ClockLogger.clock = clock

    def choose_logger(logger_name: str, out_dir: Path, *args: Any, **named: Any) -> CSVLogger:
        return ClockLogger(root_dir=out_dir / "logs", name="csv", flush_logs_every_n_steps=1)

    finetune.choose_logger = pretrain.choose_logger = choose_logger
    (sft if spec["kind"] == "sft" else pretraining)(spec, clock)
    clock.write(sys.argv[1])


if __name__ == "__main__":
    main()
