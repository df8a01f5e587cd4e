"""Everything a run needs around its loop: folder, checkpoints, metrics, signals, memory, bad numbers.

A `Run` never calls the model (but for --regression_suite), holds no loop and takes no optimizer step: the
script does. It calls two functions of the script: `gradients`, again for a window that ran out of memory
(`retry_smaller`), and `also`, if there is one, which writes further files of the final model (`finish`).

Its parts are in the dict `parts`, by name: Metrics, Retry, Progress, the windows, and those of run/parts/.
A part may have any of these methods; those that it lacks are not called:

    restore(step, state)        start after so many updates with its state in the checkpoint ({} for a new run)
    state(step) -> dict         its state for trainer_state.json
    on_step(step)               the work after so many updates begins
    on_event(kind, step, text)  a line of events.jsonl was written ("saved", "spike", "memory", "bad", "died", ...)
    on_log(step, values)        a line of metrics.jsonl was written
    close()                     the run ends, complete or not
"""

from collections.abc import Callable, Iterator
import gc
import os
from pathlib import Path
import shlex
from typing import Any, TypeVar

from accelerate.utils import DistributedType
from common.args import CommonArgs, defaults
from common.collators import Window, Windows
from common.data.types import Tokenizer
from common.errors import LAST_WORDS, OutsideError, UserError, say
from common.files import loaded_code, writing
from common.model import FlatModel
from common.model.save import base_dtype, final_dtype
from common.run.checkpoint import (
    check_modules,
    export,
    kept_state,
    load_extra,
    load_kept,
    prune,
    resume,
    save_checkpoint,
)
from common.run.describe import describe
from common.run.folder import (
    checkpoint_at,
    read_object,
    refuse_changes,
    refuse_deleted_folder,
    remove_if_unused,
    write_settings,
)
from common.run.launch import NEVER_FREED, start
from common.run.metrics import Metrics, commit_of, machine, short, versions
from common.run.nonfinite import NonFinite
from common.run.parts.alerts import Alerts
from common.run.parts.best import Best
from common.run.parts.hub import push_at_end, write_card
from common.run.parts.mfu import mfu_per_token, typical_length
from common.run.parts.regression import Regression
from common.run.parts.report import Report
from common.run.parts.trackers import Tracker
from common.run.progress import Progress
from common.run.retry import Gradients, Retry
from common.run.signals import Signals
from common.sampling import Reward, RolloutSchedule
from common.sampling.rollout import rollout_lines, rollout_metrics
import torch
from torch import Tensor, nn

T = TypeVar("T")


def is_judged(completion: Any) -> bool:
    """Whether a reward function gave a number."""
    return any(reward is not None for reward in completion.rewards)


class Run:
    """The plumbing of one run. `accelerator` and `resume_from` (a checkpoint, or None) are available from the
    start."""

    def __init__(self, args: CommonArgs, script: str):
        """Start the processes, and lock args.output_dir, where `prepare` leaves args.yaml and a copy of
        `script`.

        Raises UserError for misconfigured launches, and for a folder that holds another run.
        """
        self.args = args
        self.script = script
        self.name = Path(script).stem.removeprefix("train_")
        self.best = Best(args) if args.save_best or args.early_stopping_patience else None
        self.parts: dict[str, Any] = {"best": self.best}  # None: without it
        self.step = 0
        self.saved_step = 0
        self.unjudged = 0  # rollouts in a row without a reward
        self.all_cut = False  # whether a line has said that no completion of a rollout ended by itself
        self.kept: dict[str, Any] = {}  # by `keep`
        if args.alert_webhook:  # before anything is written: the address is a secret
            self.parts["alerts"] = Alerts(args)
        LAST_WORDS[:] = [self._die]  # and none of an earlier run in this process
        self.accelerator, self.resume_from, self.inputs = start(args, script)
        self.regression = Regression(args, self.accelerator) if args.regression_suite else None
        self.facts = ""  # for dataset.json

    def describe(
        self,
        model: FlatModel,
        tokenizer: Tokenizer,
        windows: Windows | RolloutSchedule,
        held_out: Any,
        example_name: str,
        reference: bool = False,
    ) -> None:
        """Tell the run what it trains on, and print it, in full with --dry_run; `prepare` writes it to
        dataset.json.

        example_name: the word for one example ("pair"). reference: a second, frozen model will be loaded as
        well. Raises UserError if a sequence is longer than the model's positions.
        """
        self.tokenizer = tokenizer
        self.windows = windows
        self.held_out = held_out
        if self.regression:
            self.regression.tokenize(tokenizer, model)
        self.facts = describe(self, model, example_name, reference)

    def prepare(
        self, model: FlatModel, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Accelerate's `prepare`; then restore the checkpoint's optimizer, modules in `model.extra`, metrics
        and place in the data. Returns the model and the optimizer to train with. Call it after `describe`."""
        args = self.args
        accelerator = self.accelerator
        windows = self.windows
        if self.resume_from and read_object(self.resume_from / "trainer_state.json")["step"] > len(windows):
            raise UserError(
                f"{self.resume_from} lies beyond step {len(windows)}, at which this run would end"
            )
        refuse_deleted_folder(accelerator, Path(args.output_dir))
        if accelerator.is_main_process:
            self._write_settings()
        check_modules(model, optimizer)
        on_gpu = accelerator.device.type == "cuda"
        mfu = mfu_per_token(model, typical_length(windows), accelerator) if on_gpu else None
        load_extra(model, self.resume_from, args.model_name_or_path)
        self.model, self.optimizer = accelerator.prepare(model.train(), optimizer)
        state = resume(accelerator, self.resume_from, self.optimizer, self.model)
        self.base_dtype = state.get("base_dtype", base_dtype(model))
        self.first_step = self.saved_step = self.step = state["step"]
        # Evaluations and saves done up to here are not repeated.
        self.resumed_at = self.first_step if self.resume_from else -1
        self.metrics = Metrics(accelerator, args, mfu)
        self.metrics.notify = self._each
        self.nonfinite = NonFinite(self.metrics, self.tokenizer)
        self.retry = Retry(args, accelerator, self.model, self.metrics)
        self.model = self.retry.model
        self.parts |= {
            "metrics": self.metrics,
            "retry": self.retry,
            "windows": windows,
            "regression": self.regression,
        }
        if accelerator.log_with:
            self.parts["tracker"] = Tracker(accelerator, args)
        if accelerator.is_main_process:
            self.parts["report"] = Report(args.output_dir)
        for name, part in self.parts.items():
            if hasattr(part, "restore"):
                part.restore(self.first_step, state.get("parts", {}).get(name, {}))
        self._write_start()
        self._show_changes(state)
        return self.model, self.optimizer

    def _write_settings(self) -> None:
        """Write arguments, script and inputs of the run to its folder, if it may go on with them."""
        inputs = {}
        for source, digest in self.windows.train.digests().items():
            inputs[f"the rows of {source}"] = digest
        if self.best:  # its evaluations must stay comparable
            inputs[f"the held-out rows for {self.best.name}"] = str(self.held_out.digests())
        inputs |= loaded_code(self.script)
        if self.resume_from:
            refuse_changes(self.args, inputs, self.resume_from)
        with writing(self.args.output_dir):
            write_settings(self.args, self.script, self.inputs | inputs)
            if self.facts:
                Path(self.args.output_dir, "dataset.json").write_text(self.facts, encoding="utf-8")

    def _write_start(self) -> None:
        """Write an event to events.jsonl: the run starts or resumes, and on what machine."""
        usual = defaults(type(self.args))
        changed = [name for name, value in vars(self.args).items() if value != usual[name]]
        facts = {"script": os.path.relpath(self.script), "changed": changed} | machine(self.accelerator)
        if self.accelerator.is_main_process:
            facts["commit"] = commit_of(Path(self.script).resolve().parent)
        text = f"from {self.resume_from or 'the beginning'}"
        self.metrics.event("resumed" if self.resume_from else "started", self.first_step, text, **facts)

    def _show_changes(self, state: dict[str, Any]) -> None:
        """Print the changes since the checkpoint that are allowed. state: of trainer_state.json."""
        now = self.windows.step_size
        before = state.get("step_size", now)
        if before != now:
            effect = "a larger step skips rows, a smaller one repeats some (a stream continues in its place)"
            say(f"a step had {before}, now {now}: {effect}")
        new_versions = versions()
        for library, version in state.get("versions", {}).items():
            new = new_versions.get(library, version)
            if new != version:
                say(f"{library} was {version}, now {new}: the run continues; results may differ by rounding")

    def keep(self, name: str, kept: T) -> T:
        """Save the object's `state_dict()`, or the dict itself, in each checkpoint; if the run resumes,
        restore it here. Returns the object. Call it before the loop, on every process.

        The state: numbers, texts and tensors in dicts and lists, the same on every process. Tensors that
        FSDP2 shards are kept whole, and sharded again where a dict holds them; so keep a copy of weights
        after `prepare`.

        Raises UserError, here and at each save, for a state of other things, which could not be read again,
        or one that differs between the processes; and if the checkpoint has another state.
        """
        kept_state(self.accelerator, name, kept)
        self.kept[name] = kept
        if self.resume_from:
            load_kept(name, kept, self.resume_from)
        return kept

    def _each(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of every part that has it; what each returns, by the part's name."""
        results = {}
        for name, part in self.parts.items():
            if hasattr(part, method):
                results[name] = getattr(part, method)(*arguments)
        return results

    # --- the loop -------------------------------------------------------------------------------------------

    def steps(self, last: int, save_every: int = 1) -> Iterator[int]:
        """Yield the number of updates done so far: the checkpoint's (or 0), then one more after each update,
        up to `last`.

        save_every: checkpoints are possible only at multiples of it (GRPO, between two rollouts).
        """
        # DeepSpeed's optimizer has other parameters.
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:
            check_modules(self.accelerator.unwrap_model(self.model, keep_torch_compile=False), self.optimizer)
        gc.freeze()  # loaded objects stay: exclude them from the many collections during training
        gc.set_threshold(700, 10, 10)
        self.last_step = last
        self.save_every = save_every
        self.save_wanted = False
        self.signals = Signals(self.accelerator, self.args)
        progress = Progress(self.name, self.first_step, last)
        self.parts["progress"] = progress
        with progress.bar:
            for step in range(self.first_step, last + 1):
                self.step = step
                self._each("on_step", step)
                if self.regression and self._due(step, self.regression.every, self.resumed_at, last):
                    self._compare_with_best(step, self.regression.run(self.model, step, self.metrics))
                yield step

    def _die(self, error: BaseException) -> None:
        """Called when an error ends the run. After an OutsideError all processes are here, and a checkpoint
        is written, unless the step is between those of one rollout: no run can resume from there."""
        text = str(error) if isinstance(error, UserError) else repr(error)
        try:
            can_save = self.step > self.saved_step and self.step % self.save_every == 0
            if isinstance(error, OutsideError) and can_save:
                self._save(self.step)
        finally:
            if "metrics" in self.parts:
                self.metrics.event("died", self.step, text)
            else:
                self._each("on_event", "died", self.step, text)
            self._each("close")
            remove_if_unused(Path(self.args.output_dir))

    def eval_due(self, step: int) -> bool:
        """Every eval_steps, and before the first and after the last update."""
        return self._due(step, self.args.eval_steps, self.resumed_at, self.last_step)

    def log_eval(self, step: int, values: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Write an evaluation and its samples; record whether it is the best one."""
        self.metrics.log_eval(step, values, samples, show=self.args.num_samples)
        self._compare_with_best(step, values)

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation so far, with --save_best."""
        return self.best.step if self.best else None

    def _compare_with_best(self, step: int, values: dict[str, float]) -> None:
        # Only where a checkpoint is possible.
        if self.best and step % self.save_every == 0 and self.best.update(step, values):
            self.metrics.event("best", step, f"{self.best.name} {self.best.value:.4g}")

    def checkpoint(self, step: int) -> bool:
        """Save if it is due: by save_steps, save_minutes, a new best evaluation, a signal or max_hours.
        Returns whether the run ends here: after the last step, or by early stopping. A run that was told to
        stop exits here with code 75. The same on every process."""
        can_save = step % self.save_every == 0
        request = self.signals.poll(possible=can_save and step < self.last_step)
        is_new_best = self.best_step == step and step > self.resumed_at
        if request or is_new_best or self._due(step, self.args.save_steps, max(self.resumed_at, 0)):
            self.save_wanted = True
        if self.save_wanted and can_save:
            self._save(step)
        if request == "stop":
            self.metrics.event("stopped", step, f"by {self.signals.reason}; the same command resumes it")
            self._each("close")
            self.signals.leave(step)
        return step == self.last_step or (self.best is not None and self.best.stops(step))

    def _save(self, step: int) -> None:
        """Write checkpoint-<step> and prune old ones. On a full disk it prints a line, and training
        continues."""
        self.nonfinite.check_weights(self.model, step)
        refuse_deleted_folder(self.accelerator, Path(self.args.output_dir))
        state = {
            "step_size": self.windows.step_size,
            "base_dtype": self.base_dtype,
            "versions": versions(),
            "parts": self._each("state", step),
        }
        written = save_checkpoint(
            self.args,
            self.accelerator,
            self.model,
            self.optimizer,
            self.tokenizer,
            step,
            state,
            self.best_step,
            self.kept,
        )
        if self.best and not written:
            self.best.withdraw(step)
        self.metrics.event("saved" if written else "not saved", step, f"checkpoint-{step}")
        if self.signals.clock:
            self.signals.clock.saved()
        self.save_wanted = False
        self.saved_step = step

    def retry_smaller(self, gradients: Gradients, window: Window) -> None:
        """Call gradients(window), again in smaller micro-batches if memory runs out; the gradient stays the
        same. Dropout is a function of (seed, step, process)."""
        self.retry(gradients, self.step, window)

    def is_finite(self, grad_norm: Tensor | None, window: Window) -> bool:
        """Whether to take the step: the gradient's norm and the window's "loss" in `metrics` are finite on
        every process (fp16: always, because the loss scaler skips steps). A window that is not is reported,
        counted, and written to bad_batches/."""
        return self.nonfinite.check(grad_norm, self.step, window)

    def log(self, step: int, window: Window, **values: float | Tensor | None) -> None:
        """End the window; every logging_steps write the means of what was added to `metrics`, together with
        `values`."""
        self.metrics.close_window(window.num_tokens)
        if self._due(step, self.args.logging_steps, self.resumed_at, self.last_step):
            self.metrics.log(step, **values)

    def log_rollout(
        self,
        step: int,
        completions: list[Any],
        rewards: list[Reward],
        group: int,
        lengths: list[int] | None = None,
        **more: float,
    ) -> None:
        """Log the rollout used from `step` on: its metrics (see rollout_metrics), `more`, and
        completions.jsonl."""
        if rewards and not any(map(is_judged, completions)):
            self.unjudged += 1
        else:
            self.unjudged = 0
        if self.unjudged == 20:
            raise UserError("no reward function gave a number in 20 rollouts in a row (all returned None)")
        if not self.all_cut and not any(completion.finished for completion in completions):
            self.all_cut = True
            say(
                f"step {step}: all completions were cut at --max_completion_length: none ends with a stop token"
            )
        if hasattr(completions[0], "advantage"):
            more["frac_idle_rollouts"] = float(not any(completion.advantage for completion in completions))
        self.metrics.add(**rollout_metrics(completions, rewards, group, lengths), **more)
        self.metrics.close_window()  # they count even if the following step is skipped
        self.metrics.append("completions.jsonl", rollout_lines(step, completions, rewards))

    def finish(self, try_next: str, also: Callable[[], None] | None = None) -> None:
        """Write the final model, summary.json and report.html, and print where they are and what to try next.
        also: writes further files of the final model, on the main process, before the run counts as
        complete."""
        args = self.args
        metrics = self.metrics
        self.nonfinite.check_weights(self.model, self.step)
        refuse_deleted_folder(self.accelerator, Path(args.output_dir))
        dtype = final_dtype(args, self.base_dtype)
        best = checkpoint_at(args.output_dir, self.best_step) if self.best_step else None
        export(args, self.accelerator, self.model, self.tokenizer, best, dtype, also)
        if self.accelerator.is_main_process:
            with writing(args.output_dir):
                write_card(args, self.name, self.best_step)
            # A killed run may have left more.
            prune(args.output_dir, self.step, args.save_total_limit, self.best_step)
        if best:
            metrics.last = self.best.of_exported(metrics.last)
        changes = {}  # {metric: (before, after)}
        for name, before in metrics.first_eval.items():
            if name in metrics.last:
                changes[name] = (short(before), short(metrics.last[name]))
        text = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changes.items())
        metrics.finish(f"{self.step} steps; {text}", self.best.state(self.step) if self.best_step else None)
        self._show_end(changes, try_next)
        self._each("close")
        self.accelerator.wait_for_everyone()  # no process exits while another still writes
        self.accelerator.end_training()
        if self.accelerator.num_processes > 1:
            NEVER_FREED.append(self.model)
        self.signals.close()
        gc.unfreeze()  # frozen objects make some extension modules warn when Python ends
        if args.push_to_hub and self.accelerator.is_main_process:
            push_at_end(args)

    def _show_end(self, changes: dict[str, tuple[str, str]], try_next: str) -> None:
        """Print what training has changed, where the model is, and what to try next."""
        args = self.args
        if changes:
            say("\nbefore -> after, held out:")
        for name, (before, after) in changes.items():
            say(f"    {name.removeprefix('eval_'):28} {before:>10} -> {after}")
        say(f"\nsaved in {args.output_dir}; report.html there shows the run")
        say(f"talk to it: python -m tools.chat {shlex.quote(args.output_dir)}")
        if try_next.endswith(".py") and args.output_dir != defaults(type(args))["output_dir"]:
            try_next += f" --model_name_or_path {shlex.quote(args.output_dir)}"
        if "train_" in try_next:
            for flag in ("use_peft", "load_in_4bit", "load_in_8bit"):
                if getattr(args, flag):
                    try_next += f" --{flag}"
        say(f"try next: {try_next}")

    def _due(self, step: int, every: int, done: int, last: int = -1) -> bool:
        """Whether something that happens every N steps (0: never), and at the step `last`, happens at this
        one.

        done: the last step at which it has already happened: a resumed run repeats nothing.
        """
        return every > 0 and step > done and (step % every == 0 or step == last)
