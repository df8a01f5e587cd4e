"""One of the train_*.py as a user starts it, with a clock at the end of each step: nothing in the run is replaced.

python benchmarks/ours.py result.json train_sft.py --logging_steps 1 ...
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parent))

from common import args as arguments  # noqa: E402

from clock import Clock  # noqa: E402


def watch(clock: Clock) -> None:
    """Have the clock see the start of the loop, each step, and what is logged."""
    from common.run.metrics import Metrics

    restore, log, write = Metrics.restore, Metrics.log, Metrics._write

    def begin(self: Metrics, *args: Any, **named: Any) -> None:
        restore(self, *args, **named)  # the last thing before the loop that every script calls
        clock.begin()

    def keep(self: Metrics, step: int, values: dict) -> None:
        write(self, step, values)
        clock.result.setdefault("metrics", []).append({name: float(value) for name, value in values.items()})
        clock.result["loss"].append(float(values["loss"]))

    def end_of_step(self: Metrics, *args: Any, **named: Any) -> None:
        log(self, *args, **named)
        clock.step()

    Metrics.restore, Metrics._write, Metrics.log = begin, keep, end_of_step


def main() -> None:
    result, script, *words = sys.argv[1:]
    clock, run = Clock(), arguments.run

    def run_watched(main: Any, args: Any) -> None:
        watch(clock)  # the script has imported by now, in its own order
        run(main, args)

    arguments.run = run_watched
    sys.argv = [script, *words]
    sys.path[1] = os.getcwd()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        clock.write(result)


if __name__ == "__main__":
    main()
