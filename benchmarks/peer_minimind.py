"""minimind's loop (train_full_sft.py, train_pretrain.py, train_dpo.py of August 2026) in words of our own,
with a clock.

    python benchmarks/peer_minimind.py result.json spec.json     # called by others.py

spec: as of peers.py; "kind": sft (rows: chats.tokens.json), dpo (pairs.tokens.json) or pretrain (text*.npy).
What is done as there: every row is padded to one length when it is fetched (1,024 here, which its 768 for SFT
would cut), the model is called without an attention mask, all logits are made and copied, cross-entropy runs
over all positions with -100 where there is nothing to learn (DPO: log-softmax over all positions, times a
mask), the loss goes through a GradScaler and the learning rate is set at each step. On a CPU it has no
autocast and the scaler is off, as there. Other than there: transformers' Llama, which has the weights of the
other sides, for its own, no worker processes beside the one thread, no weight decay, a constant learning
rate, a log line a step, rows in our order.
"""

from contextlib import nullcontext
import json
from pathlib import Path
import sys
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from clock import Clock  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402
import transformers  # noqa: E402

LEARNING_RATE, LENGTH, BETA = 1e-4, 1024, 0.1


class Padded(Dataset):
    """rows: {"input_ids": ids, "labels": ids}, or in pairs those of "chosen" and "rejected"."""

    def __init__(self, rows: list[dict], length: int):
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return len(self.rows)

    def one(self, row: dict) -> tuple[torch.Tensor, torch.Tensor]:
        missing = self.length - len(row["input_ids"])
        ids, labels = row["input_ids"] + [0] * missing, row["labels"] + [-100] * missing
        return torch.tensor(ids), torch.tensor(labels)

    def __getitem__(self, i: int) -> Any:
        row = self.rows[i]
        return [self.one(row[side]) for side in ("chosen", "rejected")] if "chosen" in row else self.one(row)


def lm_loss(model: Any, batch: list[torch.Tensor]) -> torch.Tensor:
    ids, labels = batch
    logits = model(ids, use_cache=False).logits
    logits, targets = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)


def log_probs(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(rows,): of the labelled tokens."""
    inputs, targets, mask = ids[:, :-1], ids[:, 1:], labels[:, 1:] != -100
    each = (
        F.log_softmax(model(inputs, use_cache=False).logits, dim=-1)
        .gather(-1, targets.unsqueeze(-1))
        .squeeze(-1)
    )
    return (each * mask).sum(-1)


def dpo_loss(model: Any, reference: Any, batch: list) -> torch.Tensor:
    ids, labels = (torch.cat([batch[0][part], batch[1][part]]) for part in (0, 1))
    with torch.no_grad():
        before = log_probs(reference, ids, labels)
    chosen, rejected = (log_probs(model, ids, labels) - before).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def main() -> None:
    spec, clock = json.loads(Path(sys.argv[2]).read_text()), Clock()
    if spec["kind"] == "pretrain":
        table = np.load(spec["rows"])
        rows, length = [{"input_ids": row, "labels": row} for row in table.tolist()], table.shape[1]
    else:
        rows, length = json.loads(Path(spec["rows"]).read_text()), LENGTH
    rows = rows[: spec["steps"] * spec["batch"]]

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)

    model, reference = load().train(), load().eval() if spec["kind"] == "dpo" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    autocast, scaler = nullcontext(), torch.amp.GradScaler("cpu", enabled=False)
    clock.begin()
    for batch in DataLoader(Padded(rows, length), batch_size=spec["batch"]):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        with autocast:
            loss = dpo_loss(model, reference, batch) if reference is not None else lm_loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        clock.result["loss"].append(loss.item())
        clock.step()
    each = [row[side] for row in rows for side in ("chosen", "rejected")] if reference is not None else rows
    useful = sum(len(row["input_ids"]) for row in each)
    clock.result["batches"].append({"rows": len(each), "useful": useful, "padded": len(each) * length})
    clock.write(sys.argv[1])


if __name__ == "__main__":
    main()
