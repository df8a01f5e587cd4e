"""--report_to: a tracker (tensorboard, wandb, ...), through Accelerate. A resumed run continues its run
there."""

from pathlib import Path
from typing import Any
import uuid

from accelerate import Accelerator
from common.args import CommonArgs


class Tracker:
    """A part of a `Run`."""

    def __init__(self, accelerator: Accelerator, args: CommonArgs):
        self.accelerator, self.args = accelerator, args

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Start the tracker, or continue its run: entries after the checkpoint's step will be logged again.
        wandb and swanlab ignore those that they have."""
        args = self.args
        config: Any = {
            k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in vars(args).items()
        }
        if step and args.report_to == "tensorboard":
            config = None  # a changed config would start a new run each time
        self.id = state.get("id") or uuid.uuid4().hex[:21]  # swanlab's length
        same, name = {"id": self.id, "resume": "allow"}, args.run_name or Path(args.output_dir).name
        settings = {
            "wandb": same | {"name": name},
            "swanlab": same | {"experiment_name": name},
            "trackio": {"name": name},
        }
        settings |= {"mlflow": {"run_name": name}, "tensorboard": {"purge_step": step + 1 if step else 0}}
        self.accelerator.init_trackers("plainloop", config=config, init_kwargs=settings)

    def state(self, step: int) -> dict[str, str]:
        return {"id": self.id}

    def on_log(self, step: int, values: dict[str, float]) -> None:
        self.accelerator.log(values, step=step)
