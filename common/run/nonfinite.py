"""Non-finite numbers: a step with a NaN or an infinity is skipped, and its batch is kept for inspection."""

import math
from typing import Any

from common.collators import Window
from common.data.types import Tokenizer
from common.errors import UserError, say
from common.memory import SHARDED
from common.processes import anywhere, unsharded
from common.run.metrics import Metrics
import torch
from torch import Tensor, nn

MOST_BAD = 3  # steps in a row, after which the run ends
MOST_KEPT = 100  # steps whose batches are kept
MOST_ZERO = 5  # steps in a row with a gradient of 0, after which a line says so


class NonFinite:
    """Checks the loss and the gradient norm of every window before the optimizer step."""

    def __init__(self, metrics: Metrics, tokenizer: Tokenizer):
        self.metrics = metrics
        self.tokenizer = tokenizer
        self.zero_gradients = 0  # steps in a row whose gradient was exactly 0

    def check(self, grad_norm: Tensor | None, step: int, window: Window) -> bool:
        """Whether the optimizer should take the step; a window with a number that is not finite is reported
        and written to bad_batches/.

        Looks at what was added to the metrics as "loss", too: grad_norm is None where an engine does not
        return it, and with fp16 an infinite gradient is left to the loss scaler, which skips the step and
        halves the scale, down to 1 from 2^16. Raises UserError after MOST_BAD in a row.
        """
        metrics = self.metrics
        accelerator = self.metrics.accelerator
        loss = float(metrics.window["loss"][0]) if "loss" in metrics.window else 0.0
        norm = math.nan if grad_norm is None else float(unsharded(grad_norm))
        scaler_skips = accelerator.scaler is not None and accelerator.scaler.get_scale() >= 1
        checks_norm = grad_norm is not None and not scaler_skips
        bad = not math.isfinite(loss)
        if checks_norm and not math.isfinite(norm):
            bad = True
        bad = anywhere(accelerator, bad)  # all processes take the step, or none does
        metrics.window_is_bad = bad
        self.zero_gradients = self.zero_gradients + 1 if norm == 0 else 0
        if self.zero_gradients == MOST_ZERO:
            say(
                f"step {step + 1}: the gradient was exactly 0 in {MOST_ZERO} steps in a row: nothing is trained; look at "
                "the mask, the weights, or in GRPO at frac_reward_zero_std and completions/clipped_ratio in metrics.jsonl"
            )
        if bad:
            self._report(loss, norm, step, window)
        return bool(accelerator.scaler) or not bad

    def _report(self, loss: float, norm: float, step: int, window: Window) -> None:
        metrics = self.metrics
        metrics.bad_steps.append(step + 1)
        what = f"{'a finite' if math.isfinite(loss) else 'a NaN or infinite'} loss, gradient norm {norm:g}"
        metrics.event("bad", step + 1, what)
        file = f"bad_batches/step-{step + 1}.jsonl"
        kept = f"its batch is in {metrics.output_dir / file}"
        if len(metrics.bad_steps) <= MOST_KEPT:
            metrics.append(file, self._rows(window))
        else:
            kept = f"its batch is not kept: those of {MOST_KEPT} other steps are there"
        last = step + 1  # this one
        recent = range(last - MOST_BAD + 1, last + 1)
        in_a_row = sum(number in metrics.bad_steps for number in recent)
        if in_a_row < MOST_BAD:
            say(f"step {step + 1}: {what}; {kept}")
            return
        raise UserError(
            f"step {step + 1}: {what}, {in_a_row} in a row; the batches are in {metrics.output_dir}/bad_batches; "
            "try a lower --learning_rate, or look for broken rows"
        )

    def check_weights(self, model: nn.Module, step: int) -> None:
        """Raise UserError if weights have become NaN or infinite, or differ between processes that should
        have the same, before they are saved. Called on every process."""
        accelerator = self.metrics.accelerator
        # ZeRO-3: its share
        trained = [getattr(p, "ds_tensor", p).detach() for p in model.parameters() if p.requires_grad]
        norm = unsharded(torch.nn.utils.get_total_norm(trained)).to(accelerator.device)
        if not accelerator.reduce(norm, "sum").isfinite():
            raise UserError(f"step {step}: weights are NaN or infinite, and are not saved")
        if accelerator.num_processes > 1 and accelerator.distributed_type not in SHARDED:
            sums = torch.stack([p.reshape(-1).view(torch.int16).sum() for p in trained])  # their bits: exact
            sums = accelerator.gather(sums[None])  # (processes, weights)
            if (sums != sums[0]).any():
                raise UserError(
                    f"step {step}: the weights differ between the processes (random numbers in the loop?), and are not saved"
                )

    def _rows(self, window: Window) -> list[dict[str, Any]]:
        """The sequences of a window as text."""
        rows = []
        origins = window.origins() if window.origins else [""] * len(window.examples)
        for example, where in zip(window.examples, origins, strict=True):
            for sequence in example:
                ids = sequence["input_ids"]
                trained = sequence["loss_mask"].astype(bool)
                texts = {"text": self.tokenizer.decode(ids), "trained": self.tokenizer.decode(ids[trained])}
                rows.append({"where": where, "tokens": len(ids)} | texts)
        return rows
