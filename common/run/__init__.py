"""Everything a run needs around its loop: output folder, checkpoints, metrics, signals, memory."""

from common.run.run import Run
