"""--max_hours and --save_minutes: what the clock asks of a run between two steps."""

import time

from common import START
from common.args import CommonArgs

EXIT_SECONDS = 10.0  # allowed from the last save to the end of the process


class Clock:
    """Requests by the clock of one process."""

    def __init__(self, args: CommonArgs):
        self.max_seconds = args.max_hours * 3600 if args.max_hours is not None else None
        self.save_after = args.save_minutes * 60 if args.save_minutes is not None else None
        self.asked = 0.0  # the last question
        # the longest time between two: a step, with its evaluation
        self.saved_at, self.longest = time.time(), 0.0
        # a guess, until one has been measured
        self.save_seconds = min(60.0, 0.05 * (self.max_seconds or 0.0))

    def asks(self) -> str:
        """What is due now: "stop", "save" or ""."""
        now = time.time()
        self.longest = max(self.longest, now - self.asked) if self.asked else 0.0
        self.asked = now
        needed = 1.25 * (self.longest + self.save_seconds) + EXIT_SECONDS
        if self.max_seconds is not None and now - START + needed > self.max_seconds:
            return "stop"
        return "save" if self.save_after is not None and now - self.saved_at > self.save_after else ""

    def saved(self) -> None:
        """A checkpoint has been written, for whatever reason: restart the clock of --save_minutes."""
        self.saved_at = time.time()
        self.save_seconds = self.saved_at - self.asked
