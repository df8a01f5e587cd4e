"""How far a run is: a bar on a terminal; in a file, a notebook or the log of a job a line for each logged step."""

import sys
import time

from common.errors import is_first, printable, say
from tqdm import tqdm


class Progress:
    """A part of a run (see common/run/run.py), from its first step on."""

    def __init__(self, name: str, first: int, last: int):
        """name: of the script. first, last: updates done at the start and at the end."""
        on_terminal = sys.stderr.isatty()  # where bars are drawn
        self.writes_lines = not (on_terminal and sys.stdout.isatty())
        self.first = first
        self.last = last
        self.started = time.perf_counter()
        self.bar = tqdm(
            desc=printable(name),
            initial=first,
            total=last,
            disable=not (is_first() and on_terminal),
            mininterval=0.5,
            dynamic_ncols=True,
        )

    def on_step(self, step: int) -> None:
        self.bar.update(step - self.bar.n)

    def on_log(self, step: int, values: dict[str, float]) -> None:
        if "loss" not in values:  # of an evaluation, or all windows since the last line were bad
            return
        shown = next(name for name in ("reward", "rewards/margins", "loss") if name in values)
        speed = f"{values['tokens_per_second']:,.0f} tok/s"
        self.bar.set_postfix_str(f"{shown} {values[shown]:.4f}, {speed}", refresh=False)
        if self.writes_lines:
            names = dict.fromkeys(("loss", shown))
            measured = ", ".join(f"{name} {values[name]:.4f}" for name in names)
            rate = values.get("learning_rate", 0.0)
            seconds = time.perf_counter() - self.started
            left = seconds / max(step - self.first, 1) * (self.last - step)
            time_left = tqdm.format_interval(left)
            say(f"step {step}/{self.last}: {measured}, rate {rate:.3g}, {speed}, {time_left} left")
