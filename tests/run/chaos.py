"""A script's main in a process that dies by SIGKILL at the n-th moment of a kind: in a step, a rollout, a
save, ...

A process that has imported everything forks one per attempt, so that an attempt costs a run of a second and
no start of Python.
"""

from collections import Counter
from collections.abc import Callable
import importlib
import json
import multiprocessing
import os
from pathlib import Path
import shutil
import signal
import sys
import time
from typing import Any

from tests.conftest import demo, module_of  # isort: skip  (before torch: threads, folder)
from accelerate import Accelerator
from common.command_line import launch
from common.data import stream
from common.model import FlatModel
from common.run.metrics import Metrics
from common.run.retry import Retry
import torch

for module in (
    *map(module_of, ("pretrain", "sft", "dpo", "grpo", "grpo_ahead")),
    "transformers",
    "torch.distributed.fsdp",
):
    importlib.import_module(module)  # for the processes that are forked


class Moments:
    """Counts the moments of each kind that a run passes, and kills its process at the one that it is told."""

    def __init__(self, kind: str | None, at: int):
        self.kind, self.at, self.passed = kind, at, Counter()

    def strikes(self, kind: str) -> bool:
        self.passed[kind] += 1
        return kind == self.kind and self.passed[kind] == self.at

    def passing(self, kind: str) -> None:
        if self.strikes(kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, kind: str | Callable[[], str | None]) -> None:
        """A moment before and one after each call. kind: a function where it depends on when it is called."""
        function = getattr(owner, name)

        def call(*args, **kwargs):
            of = kind() if callable(kind) else kind
            if of:
                self.passing(of)
            result = function(*args, **kwargs)
            if of:
                self.passing(of)
            return result

        setattr(owner, name, call)


def watch(moments: Moments, script: Any, epoch: int) -> None:
    """Put the moments in their places. epoch: examples of an epoch over examples of a step, rounded down."""
    rolling_out = [False]

    def sampler() -> str:
        return "rollout" if rolling_out[0] else "evaluation"

    for owner, name in (
        (Accelerator, "backward"),
        (Accelerator, "clip_grad_norm_"),
        (torch.optim.AdamW, "step"),
    ):
        moments.around(owner, name, "step")
    if hasattr(script, "roll_out"):
        roll_out = script.roll_out

        def watched(*args, **kwargs):
            rolling_out[0] = True
            result = roll_out(*args, **kwargs)
            rolling_out[0] = False
            return result

        script.roll_out = watched
    moments.around(importlib.import_module("common.sampling.generate"), "draw", sampler)  # each sampled token
    moments.around(FlatModel, "forward", lambda: "step" if torch.is_grad_enabled() else "evaluation")
    moments.around(Metrics, "log_eval", "evaluation")
    for owner, names in (
        (os, ("fsync", "rename", "replace")),
        (torch, ("save",)),
        (shutil, ("rmtree", "copy")),
    ):
        for name in names:
            moments.around(owner, name, "save")
    moments.around(importlib.import_module("common.run.checkpoint"), "prune", "prune")
    moments.around(importlib.import_module("common.run.parts.report"), "write_page", "page")

    append, compute = Metrics.append, Retry.__call__

    def append_half(self, file, rows):
        path = self.output_dir / file
        before = path.stat().st_size if path.exists() else 0
        append(self, file, rows)
        if rows and moments.strikes("line"):
            os.truncate(path, (before + path.stat().st_size) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def next_step(self, gradients, step, window):
        if step and step % epoch == 0:
            moments.passing("epoch")
        compute(self, gradients, step, window)

    Metrics.append, Retry.__call__ = append_half, next_step


def _attempt(stage: str, words: list[str], log: str, epoch: int, kind: str | None, at: int) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    stream.BLOCK_ROWS = 9  # so that a run of a few rows has several blocks
    script = importlib.import_module(module_of(stage))
    sys.argv = [f"train_{stage}.py", *words]
    moments = Moments(kind, at)
    watch(moments, script, epoch)
    try:
        launch(script.main, script.Args, demo(stage))
    finally:
        Path(log).with_suffix(".json").write_text(json.dumps(moments.passed))


def attempt(
    stage: str,
    words: list[str],
    log: Path,
    *,
    epoch: int,
    kind: str | None = None,
    at: int = 0,
    seconds: float = 240,
) -> int:
    """Run `train_<stage>.py words`; its exit code, negative where it died.

    It dies at the at-th moment of a kind, and of SIGKILL from outside after so many seconds. Without a kill,
    log.json beside the log tells how many moments of each kind it has passed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.run.chaos"])
    process = context.Process(target=_attempt, args=(stage, words, str(log), epoch, kind, at))
    began = time.monotonic()
    process.start()
    process.join(max(0.0, seconds - (time.monotonic() - began)))
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode
