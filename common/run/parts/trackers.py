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
        self.accelerator = accelerator
        self.args = args

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Start the tracker, or continue its run: entries after the checkpoint's step will be logged again.
        wandb and swanlab ignore those that they have."""
        args = self.args
        config = {}
        for name, value in vars(args).items():
            config[name] = value if isinstance(value, int | float | str) else str(value)
        if step and args.report_to == "tensorboard":
            config = None  # a changed config would start a new run each time
        name = args.run_name or Path(args.output_dir).name
        self.id = state.get("id") or uuid.uuid4().hex[:21]  # swanlab's length
        settings = {
            "wandb": {"id": self.id, "resume": "allow", "name": name},
            "swanlab": {"id": self.id, "resume": "allow", "experiment_name": name},
            "trackio": {"name": name},
            "mlflow": {"run_name": name},
            "tensorboard": {"purge_step": step + 1 if step else 0},
        }
        self.accelerator.init_trackers("plainloop", config=config, init_kwargs=settings)

    def state(self, step: int) -> dict[str, str]:
        return {"id": self.id}

    def on_log(self, step: int, values: dict[str, float]) -> None:
        self.accelerator.log(values, step=step)
