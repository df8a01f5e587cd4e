"""Alerts for a run that nobody is watching: JSON POSTs to --alert_webhook.

A thread sends them from a short queue, so a slow address never delays a step or ends a run; when the queue is full an alert
is dropped, with a message. A small helper process reports a run that was killed. The address is a secret: it is removed from
the arguments before anything is written, and from sys.argv, and no message contains it.
"""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.args import CommonArgs
from common.errors import LAST_WORDS, SECRETS, UserError, hidden, is_first, say
from common.memory import memory
from common.run import post as last_will
from common.run.post import BYE, post

import torch

HIDDEN = "(secret)"
WAITING = 32  # capacity of the queue, in alerts
WAITS = (0.0, 1.0, 3.0)  # seconds before each attempt
LAST_SECONDS = 5.0  # how long the end of a run waits for unsent alerts
PAUSE = 300.0  # seconds between two alerts of a kind that could come at every step
LONGEST = 1500  # characters; Discord takes 2,000
HEEDED = ("spike", "bad", "memory", "regression", "stopped", "finished")
LEVELS = {"finished": "info", "goes on": "info", "stopped": "info", "died": "error"}  # all others: warn


class Alerts:
    """`send` returns at once. Only the main process sends; without an address, nothing is ever sent."""

    def __init__(self, args: CommonArgs):
        """Takes the address out of the arguments. Raises UserError if it is not a valid one."""
        address, args.alert_webhook = args.alert_webhook, None
        self.run = args.run_name or Path(args.output_dir).name
        self._url = check_address(address) if address else ""
        if self._url:
            SECRETS.append(address)
            hide(sys.argv, address)
            hide(sys.orig_argv, address)
        if args.dry_run or not is_first():
            self._url = ""
        self._waiting: queue.Queue[dict[str, Any]] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._closed, self._said = False, False
        self._told: dict[str, float] = {}  # time of the last alert, by kind
        self._unsaid: dict[str, int] = {}  # alerts suppressed since then
        self._stall = args.alert_stall_minutes * 60
        self._step, self._step_at, self._stalled = 0, 0.0, False  # step_at 0: no step is expected
        self._will: subprocess.Popen[bytes] | None = None
        self._no_will = False
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._memory_above, self._crowded = args.alert_memory_above, False
        if self._url:
            LAST_WORDS.append(self._died)

    def send(self, event: str, text: str, pause: float = 0.0) -> None:
        """pause: seconds after an alert in which further ones of this event are counted but not sent."""
        if not self._url or self._closed:
            return
        now = time.monotonic()
        if pause and now - self._told.get(event, -pause) < pause:
            self._unsaid[event] = self._unsaid.get(event, 0) + 1
            return
        more = self._unsaid.pop(event, 0)
        text = f"{text} (and {more} more before it)" if more else text
        self._told[event] = now
        try:
            self._start()
            self._waiting.put_nowait(self._alert(event, text))
        except queue.Full:
            self._complain("it does not take them as fast as they come")
        except Exception as error:  # no thread could be started
            self._complain(type(error).__name__)

    def on_event(self, kind: str, step: int, text: str) -> None:
        """Something happened in the run: see HEEDED."""
        if kind in HEEDED:
            self.send(kind, f"step {step}: {text}", PAUSE if kind in ("spike", "bad") else 0.0)

    def on_log(self, step: int, values: dict[str, float]) -> None:
        """A line of metrics.jsonl: warns once when the memory is nearly full, as a peak never falls."""
        limit, peak = memory(self._device).limit, values.get("peak_memory_gib", 0.0)
        if peak > self._memory_above * limit and not self._crowded:
            self._crowded = True
            self.send("memory", f"step {step}: {peak:.1f} GiB of {limit:.1f} have been in use (alert_memory_above)")

    def watch(self, step: int) -> None:
        """Note the start of a step: the next one is expected within alert_stall_minutes."""
        self._step, self._step_at = step, time.monotonic()
        if self._stalled:
            self._stalled = False
            self.send("goes on", f"step {step}")
        if self._url and not self._closed:
            try:
                self._start()
                self._write_will(str(step))
            except Exception as error:  # no more threads or processes, or unsupported on this system
                self._stall, self._no_will = 0.0, True
                self._complain(type(error).__name__)

    def close(self) -> None:
        """Waits briefly for the last alerts to go out."""
        self._closed, self._step_at = True, 0.0
        if self._will:
            self._write_will(BYE)
        end = time.monotonic() + LAST_SECONDS
        while self._url and self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.02)
        if self._url and self._waiting.unfinished_tasks:
            self._complain(f"it has not answered within {LAST_SECONDS:g} s")
        if self._died in LAST_WORDS:
            LAST_WORDS.remove(self._died)

    def _died(self, error: BaseException) -> None:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        self.send("died", f"at step {self._step}: {kind}{error}")
        self.close()

    def _alert(self, event: str, text: str) -> dict[str, Any]:
        text = hidden(text)[:LONGEST]
        alert = {"title": f"{self.run}: {event}", "text": text, "level": LEVELS.get(event, "warn"), "event": event}
        return alert | {"run": self.run, "step": self._step, "time": round(time.time(), 3)}

    def _write_will(self, word: str) -> None:
        """Send the helper process what it has to know; the address goes through the pipe, not on its command line."""
        words = f"{word}\n"
        if self._no_will:
            return
        if self._will is None:
            command = [sys.executable, "-I", "-S", last_will.__file__]
            nothing = subprocess.DEVNULL
            self._will = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True, cwd="/"
            )
            os.set_blocking(self._will.stdin.fileno(), False)
            words = json.dumps({"url": self._url, "alert": self._alert("died", "")}) + "\n" + words
        with contextlib.suppress(OSError):  # the helper is gone, or does not read
            os.write(self._will.stdin.fileno(), words.encode())

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="alerts", daemon=True)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        while True:
            try:
                alert = self._waiting.get(timeout=max(0.05, min(5.0, self._stall / 4 or 5.0)))
            except queue.Empty:
                self._look_for_a_stall()
                continue
            problem = self._deliver(alert)
            if problem:
                self._complain(problem)
            self._waiting.task_done()

    def _look_for_a_stall(self) -> None:
        waited = time.monotonic() - self._step_at
        if self._stall and self._step_at and not self._stalled and waited > self._stall:
            self._stalled = True
            self.send("stalled", f"no step has ended for {waited / 60:.3g} minutes, after step {self._step}")

    def _deliver(self, alert: dict[str, Any]) -> str:
        """Returns why the alert could not be delivered, or "". Never names the address, as some exceptions do."""
        problem = ""
        for wait in WAITS:
            time.sleep(wait)
            try:
                post(self._url, alert)
                return ""
            except urllib.error.HTTPError as error:
                problem = f"it answers {error.code}"
                error.close()
                if 300 <= error.code < 400:
                    return f"{problem}, which leads elsewhere and is not followed: name the address itself"
                if error.code < 500 and error.code not in (408, 429):  # a retry would fail the same way
                    return problem
            except Exception as error:
                reason = getattr(error, "reason", error)
                problem = getattr(reason, "strerror", None) or type(reason).__name__
        return problem

    def _complain(self, problem: str) -> None:
        if not self._said:
            self._said = True
            say(f"--alert_webhook: alerts do not arrive ({problem}): training goes on without, which is said only once")


def check_address(address: str) -> str:
    """The address, if it is a usable URL. Raises UserError, which does not name it."""
    try:
        parts = urlsplit(address)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        fits = fits and address.isascii() and not any(c.isspace() or not c.isprintable() for c in address)
    except ValueError:
        fits = False
    if not fits:
        raise UserError("--alert_webhook: expected an address that begins with http:// or https:// (it is not shown here)")
    if parts.username is not None or parts.password is not None:
        raise UserError("--alert_webhook: an address with a user name in it cannot be called: use one with a token")
    return address


def hide(words: list[str], secret: str) -> None:
    """Remove a secret from a list of words in place, as trackers record sys.argv. Every value of --alert_webhook is removed:
    if it is given twice only the last one is used, but the other is just as secret."""
    flag = re.compile(r"--alert[_-]webhook(=?)")
    for i, word in enumerate(words):
        before = flag.fullmatch(words[i - 1]) if i else None
        own = flag.match(word)
        words[i] = HIDDEN if before else f"{own[0]}{HIDDEN}" if own and own[1] else word.replace(secret, HIDDEN)
