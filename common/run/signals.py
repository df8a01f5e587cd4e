"""A run that is told to stop finishes its step, saves a checkpoint and exits; the same command resumes it.

SIGTERM, SIGINT (Ctrl-C) and SIGHUP (its terminal is closed) stop the run, SIGUSR1 makes it save and continue;
so do --max_hours and --save_minutes by the clock. Once per step all processes agree on what to do, so that
all of them save at the same step.
"""

import os
import signal
import time
from typing import Any

from accelerate import Accelerator
from common import START
from common.args import CommonArgs
from common.errors import say
from common.processes import reset_in_children
import torch

EXIT_SECONDS = 10.0  # allowed from the last save to the end of the process
EXIT_CODE = 75  # EX_TEMPFAIL: stopped before the end, to be started again

# Requests of processes; the run does the largest one.
SAVE, TIME_OVER, LAUNCHER_GONE, INTERRUPTED, TERMINATED, HUNG_UP = range(1, 7)
STOPS = {
    TIME_OVER: "--max_hours",
    LAUNCHER_GONE: "its launcher's end",
    INTERRUPTED: "SIGINT",
    TERMINATED: "SIGTERM",
    HUNG_UP: "SIGHUP",
}
SIGNALS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
if hasattr(signal, "SIGUSR1"):  # not on Windows
    SIGNALS |= {signal.SIGHUP: HUNG_UP, signal.SIGUSR1: SAVE}
reset_in_children(set(SIGNALS))


class Signals:
    """While active (until `close`), signals and the clock make requests, which `poll` reports between
    two steps.

    Before that (while data and model are loaded) signals have their usual effect. Created on every process.
    """

    def __init__(self, accelerator: Accelerator, args: CommonArgs):
        self.accelerator = accelerator
        self.pending: list[int] = []  # requests to this process since the last poll
        self.reason = ""  # why the run should stop, once `poll` has returned "stop"
        self.clock = Clock(args) if args.max_hours or args.save_minutes else None
        self.is_first = True  # the next poll
        self.first_at = 0.0  # time of the first SIGINT; a second one leaves at once
        # A killed launcher leaves its processes behind, which would keep running beside the run that replaces
        # them.
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
        self.launcher = os.getppid() if launched else None
        nohup = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
        self.before = {number: signal.signal(number, self._receive) for number in handled}

    def poll(self, possible: bool = True) -> str:
        """What to do now: "", "save", or "stop" (after a save). The same on every process; called by all at
        each step.

        possible: whether the run can save here at all; requests are kept until it can. The first call always
        returns "": nothing has been trained yet, and a run that is stopped again and again must still make
        progress.
        """
        if not possible:
            return ""
        request = self._request_of_process()
        if self.is_first:
            self.is_first = False
            return ""
        num_pending = len(self.pending)  # a signal may add to them while the processes agree
        request = max([request, *self.pending[:num_pending]])
        if self.accelerator.num_processes > 1:
            largest = torch.tensor(request, device=self.accelerator.device)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            request = int(largest)
        del self.pending[:num_pending]  # later requests wait for the next poll
        self.reason = STOPS.get(request, "")
        if self.reason:
            return "stop"
        return "save" if request == SAVE else ""

    def leave(self, step: int) -> None:
        """End the process with exit code 75, after a save at this step."""
        say(f"stopped at step {step} by {self.reason}; the same command resumes it")
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        self.close()
        raise SystemExit(EXIT_CODE)

    def close(self) -> None:
        """Restore the signals' previous handlers."""
        while self.before:
            signal.signal(*self.before.popitem())

    def _request_of_process(self) -> int:
        """The request of this process without a signal: its launcher has ended, or, on the main process alone
        (clocks may differ), a time is over."""
        if self.launcher is not None and os.getppid() != self.launcher:
            return LAUNCHER_GONE
        if self.clock is None or not self.accelerator.is_main_process:
            return 0
        return {"stop": TIME_OVER, "save": SAVE, "": 0}[self.clock.due()]

    def _receive(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            # Within a second it is the same one: a launcher forwards a signal that its processes have also
            # received from the terminal.
            if self.first_at and time.monotonic() - self.first_at > 1.0:
                os._exit(128 + number)
            self.first_at = self.first_at or time.monotonic()
        self.pending.append(SIGNALS[number])


class Clock:
    """--max_hours and --save_minutes of a process: whether it has to stop or save between two steps."""

    def __init__(self, args: CommonArgs):
        self.max_seconds = args.max_hours * 3600 if args.max_hours is not None else None
        self.save_after = args.save_minutes * 60 if args.save_minutes is not None else None
        self.last_call = 0.0  # of `due`
        # Seconds between two calls: a step (in GRPO all those of a rollout), an evaluation, a save.
        self.longest = 0.0
        self.saved_at = time.monotonic()
        # A guess, until one has been measured.
        self.save_seconds = min(60.0, 0.05 * (self.max_seconds or 0.0))

    def due(self) -> str:
        """What is due now: "stop", "save" or ""."""
        now = time.monotonic()
        if self.last_call:
            self.longest = max(self.longest, now - self.last_call)
        self.last_call = now
        needed = 1.25 * (self.longest + self.save_seconds) + EXIT_SECONDS
        if self.max_seconds is not None and now - START + needed > self.max_seconds:
            return "stop"
        return "save" if self.save_after is not None and now - self.saved_at > self.save_after else ""

    def saved(self) -> None:
        """A checkpoint has been written, for whatever reason: restart the clock of --save_minutes."""
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - self.last_call
