"""Non-finite numbers: a step with a NaN or an infinity is skipped, and its batch is kept for inspection."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from common.collators import Window
from common.data.types import Tokenizer
from common.errors import UserError, say
from common.memory import SHARDED, AsyncScalar
from common.processes import gather_lists
from common.run.alerts import PAUSE
from common.run.folder import checkpoints
from common.run.metrics import Metrics, full_norm

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

MOST_SKIPPED = 30  # in a row: the scale starts at 2^16 and is halved each time
GROWTH = 1e4  # growth of the weights' norm, far beyond any normal training


def _by_kind(model: nn.Module, process: int = 0) -> list[list[Tensor]]:
    """[trained matrices, trained vectors (norms and biases)]. Under ZeRO-3, the process's share of them, whatever is
    gathered at the moment."""
    trained = [p for p in model.parameters() if p.requires_grad]
    shapes = [getattr(p, "ds_shape", p.shape) for p in trained]
    parts = [_share(p, process) if hasattr(p, "ds_tensor") else p.detach() for p in trained]
    kinds = [
        [part for part, shape in zip(parts, shapes, strict=True) if (len(shape) >= 2) == is_matrix]
        for is_matrix in (True, False)
    ]
    return [parameters for parameters in kinds if parameters]


def _share(p: Any, process: int) -> Tensor:
    """A process's share of a weight under ZeRO-3, which pads it at the end."""
    share = p.ds_tensor.detach().flatten()
    return share[: max(0, p.ds_numel - process * share.numel())]


def weight_norm(parameters: list[Tensor]) -> float:
    """The norm of all these weights; infinite if its square overflows float32."""
    return float(full_norm(torch.nn.utils.get_total_norm(parameters)))


class Found(NamedTuple):
    """The result of checking a window."""

    bad: AsyncScalar  # bool
    loss: Tensor
    grad_norm: Tensor | None
    step: int
    window: Window


class NonFinite:
    """Checks the loss and the gradient norm of every window before the optimizer step.

    On a GPU nothing waits for the result (except with sharded weights or fp16): AdamW's kernel reads it on the device and
    changes nothing if it is bad; the host reads it one step later, or when something is logged or saved.
    """

    def __init__(self, metrics: Metrics, tokenizer: Tokenizer, optimizer: AcceleratedOptimizer, max_bad_steps: int):
        """max_bad_steps: the run ends after this many bad windows in a row."""
        self.metrics, self.tokenizer, self.optimizer, self.max_bad_steps = metrics, tokenizer, optimizer, max_bad_steps
        self.found: Found | None = None  # not read yet
        self.skipped = 0  # steps in a row that the fp16 loss scaler skipped
        self.begun: list[float] = []  # norms of the weights at the start of training
        metrics.flush = self.flush

    def check(self, loss: Tensor, grad_norm: Tensor | None, step: int, window: Window) -> bool:
        """Whether the optimizer should take the step. If not, the window is written to bad_batches/.

        loss: of the last micro-batch; a NaN in another one shows in the gradient. grad_norm: None if an engine does not
        return it. With fp16 an infinite gradient is left to the loss scaler, which skips the step and lowers the scale.
        Raises UserError after max_bad_steps in a row.
        """
        accelerator, grad_norm = self.metrics.accelerator, full_norm(grad_norm)
        bad = ~torch.isfinite(loss.detach())
        if grad_norm is not None and not accelerator.scaler:
            bad = bad | ~torch.isfinite(grad_norm)
        if accelerator.num_processes > 1:  # all processes take the step, or none does
            bad = accelerator.reduce(bad.float(), "sum") > 0
        self.flush()  # the previous step's
        self.metrics.window_is_bad = bad
        self.found = Found(AsyncScalar(bad), loss.detach(), grad_norm, step, window)
        if self._adamw_looks():
            self.optimizer.optimizer.found_inf = bad.float()
            return True
        self.flush()
        return bool(accelerator.scaler) or not bad

    def _adamw_looks(self) -> bool:
        """Whether AdamW's kernel can skip the step by itself, so that no value has to be copied from the device now."""
        accelerator = self.metrics.accelerator
        plain = accelerator.distributed_type not in SHARDED and not accelerator.scaler
        return plain and accelerator.device.type == "cuda" and bool(self.optimizer.defaults.get("fused"))

    def check_weights(self, model: nn.Module, step: int) -> None:
        """Raise UserError if the weights have exploded, before they are saved or exported. Called on every process.

        Compares the norms of the matrices and of the vectors with those at the start of training.
        """
        accelerator = self.metrics.accelerator
        norms = [weight_norm(parameters) for parameters in _by_kind(model, accelerator.process_index)]
        if any(hasattr(p, "ds_tensor") for p in model.parameters()):
            norms = [math.hypot(*shares) for shares in zip(*gather_lists(accelerator, [norms]), strict=True)]
        if len(self.begun) != len(norms):  # at the start, or resumed from a checkpoint with other kinds of weights
            self.begun = norms
        begun = self.begun
        if all(norm <= GROWTH * (1 + before) for norm, before in zip(norms, begun, strict=True)):
            return
        saved = checkpoints(str(self.metrics.output_dir))
        last = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint had been written yet"
        shown = " and ".join(f"{norm:.3g} (at the start {before:.3g})" for norm, before in zip(norms, begun, strict=True))
        raise UserError(
            f"step {step}: the weights have exploded, their norm is {shown}: they are not saved; {last}; try a lower "
            "--learning_rate"
        )

    def count_skipped(self, step: int) -> None:
        """With fp16: count the steps in a row that the loss scaler skipped, after `step` updates. Raises UserError if no
        scale helps."""
        if not self.metrics.accelerator.scaler:
            return
        self.skipped = self.skipped + 1 if self.optimizer.step_was_skipped else 0
        if self.skipped >= MOST_SKIPPED:
            raise UserError(
                f"step {step}: fp16: the last {self.skipped} steps were left out, because gradients overflow at every scale "
                f"(now {self.metrics.accelerator.scaler.get_scale():g}): use bf16 where the device has it, or a lower "
                "--learning_rate"
            )

    def flush(self) -> None:
        """Report and keep the last window if it was bad. Raises UserError after max_bad_steps in a row."""
        found, self.found = self.found, None
        if found is None or not found.bad.value():
            return
        metrics, step = self.metrics, found.step
        metrics.bad_steps.append(step + 1)
        metrics.event("bad", step + 1, "a NaN or an infinity in the loss or the gradient: the step was not taken")
        norm = float("nan") if found.grad_norm is None else float(found.grad_norm)
        engine = metrics.accelerator.distributed_type == DistributedType.DEEPSPEED  # its backward pass takes the step
        done = "DeepSpeed decides by itself whether it takes the step" if engine else "the step was not taken"
        what = f"step {step + 1}: loss {found.loss.item():g}, gradient norm {norm:g}: {done}"
        path = metrics.output_dir / "bad_batches" / f"step-{step + 1}.jsonl"
        if metrics.accelerator.is_main_process:
            try:
                self._write(path, found.window)
            except OSError as error:
                say(f"{path} cannot be written ({error.strerror}): training goes on")
        in_a_row = sum(later in metrics.bad_steps for later in range(step + 2 - self.max_bad_steps, step + 2))
        if in_a_row < self.max_bad_steps:
            say(f"{what}; its batch is in {path}")
            metrics.alert("bad step", what, pause=PAUSE)
            return
        saved = checkpoints(str(metrics.output_dir))
        last = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint had been written yet"
        raise UserError(
            f"{what}, {in_a_row} in a row (--max_bad_steps); {last}; the batches are in {path.parent}; "
            "try a lower --learning_rate, or look for broken rows"
        )

    def _write(self, path: Path, window: Window) -> None:
        """Write the sequences of a window as text, one per line."""
        lines = []
        origins = window.origins() if window.origins else [""] * len(window.examples)
        for example, where in zip(window.examples, origins, strict=True):
            for sequence in example:
                ids, trained = sequence["input_ids"], sequence["loss_mask"].astype(bool)
                texts = {"text": self.tokenizer.decode(ids), "trained": self.tokenizer.decode(ids[trained])}
                lines.append({"where": where, "tokens": len(ids)} | texts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
