"""One of the train_*.py as a user starts it, with a clock at the end of each step: nothing in the run is
replaced.

python benchmarks/ours.py result.json train_sft.py --logging_steps 1 ...
"""

from collections.abc import Iterator
from pathlib import Path
import runpy
import sys
from typing import Any

from clock import Clock

sys.path[0] = str(Path(__file__).resolve().parents[1])  # as for a script that is started there

from common import command_line  # noqa: E402


def watch(clock: Clock) -> None:
    """Have the clock see the start of the loop, each step, and what is logged."""
    from common.run import Run

    steps, log = Run.steps, Run.log

    def watched_steps(self: Run, *args: Any, **named: Any) -> Iterator[int]:
        clock.begin()
        yield from steps(self, *args, **named)

    def watched_log(self: Run, *args: Any, **named: Any) -> None:
        log(self, *args, **named)  # the last thing in a step
        values = dict(self.metrics.last)
        clock.result.setdefault("metrics", []).append(values)
        clock.result["loss"].append(values["loss"])
        clock.step()

    Run.steps, Run.log = watched_steps, watched_log


def main() -> None:
    result, script, *words = sys.argv[1:]
    clock, launch = Clock(), command_line.launch

    def launch_watched(*args: Any, **named: Any) -> None:
        watch(clock)  # the script has imported by now, in its own order
        launch(*args, **named)

    command_line.launch = launch_watched
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        clock.write(result)


if __name__ == "__main__":
    main()
