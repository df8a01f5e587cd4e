"""--alert_webhook: alerts for a run that nobody is watching, as JSON POSTs from a thread, so that no step
waits for them.

The address is a secret: it is removed from the arguments before anything is written, and from sys.argv; no
message holds it.
"""

import json
from pathlib import Path
import queue
import re
import sys
import threading
import time
from typing import Any
import urllib.request

from common.args import CommonArgs
from common.errors import SECRETS, UserError, is_first, say, without_secrets

ADDRESS = re.compile(r"https?://([a-z\d.-]+|\[[\da-f:]+\])(:\d{1,5})?(/[!-~]*)?", re.I | re.ASCII)
EVENTS = ("finished", "stopped", "died", "spike", "bad", "memory", "regression")  # the kinds that are sent
OFTEN = ("spike", "bad")  # events that may come at every step
PAUSE = 300.0  # seconds between two alerts of these
WAITS = (0.0, 1.0, 3.0)  # seconds before each attempt
TIMEOUT = 10.0  # seconds for an attempt
LAST_SECONDS = 5.0  # that the end of a run waits for its last alerts
LONGEST = 1500  # characters; Discord takes 2,000


class Alerts:
    """A part of a `Run`. Only the main process sends."""

    def __init__(self, args: CommonArgs):
        """Takes the address out of the arguments. Raises UserError if it is not a valid one."""
        self.url, args.alert_webhook = str(args.alert_webhook), None
        SECRETS.append(self.url)
        for words in (sys.argv, sys.orig_argv):  # which trackers record
            words[:] = map(without_secrets, words)
        if not ADDRESS.fullmatch(self.url):
            raise UserError(
                "--alert_webhook: expected http:// or https://, a host and a path (the address is not shown)"
            )
        self.run = args.run_name or Path(args.output_dir).name
        self.step = 0
        self.failed = False
        self.last: dict[str, float] = {}  # when an alert of each kind was sent
        self.waiting: queue.Queue[dict[str, Any]] = queue.Queue()
        self.sends = is_first() and not args.dry_run
        if self.sends:
            threading.Thread(target=self._work, name="alerts", daemon=True).start()

    def on_step(self, step: int) -> None:
        self.step = step

    def on_event(self, kind: str, step: int, text: str) -> None:
        is_soon = kind in OFTEN and time.monotonic() - self.last.get(kind, -PAUSE) < PAUSE
        if self.sends and kind in EVENTS and not is_soon:
            self.last[kind] = time.monotonic()
            self.send(kind, f"step {step}: {text}")

    def send(self, event: str, text: str) -> None:
        text = f"{self.run}: {event}\n{without_secrets(text)[:LONGEST]}"
        # Slack reads "text", Discord "content"; neither can mention anybody, as <!channel> or @everyone.
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        alert = {"text": escaped, "content": text, "allowed_mentions": {"parse": []}}
        self.waiting.put(
            alert | {"event": event, "run": self.run, "step": self.step, "time": round(time.time(), 3)}
        )

    def close(self) -> None:
        """The run ends: wait briefly for the last alerts to go out."""
        end = time.monotonic() + LAST_SECONDS
        while self.sends and self.waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.02)
        self.sends = False

    def _work(self) -> None:
        while True:
            alert = self.waiting.get()
            for wait in WAITS:
                time.sleep(wait)
                if not (problem := post(self.url, alert)):
                    break
            if problem and not self.failed:
                say(
                    f"--alert_webhook: an alert did not arrive ({problem}): training goes on, and this is said only once"
                )
            self.failed |= bool(problem)
            self.waiting.task_done()


def post(url: str, alert: dict[str, Any]) -> str:
    """Make one attempt. Returns why the alert could not be delivered, or "". The text of an exception may hold
    the address, so it is not returned."""
    headers = {"Content-Type": "application/json", "User-Agent": "plainloop"}
    request = urllib.request.Request(url, json.dumps(alert).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            # After a redirect urllib sends a GET without the alert: nothing was delivered.
            return "" if answer.url == url else "it redirects"
    except Exception as error:
        return (
            f"it answers {error.code}"
            if hasattr(error, "code")
            else type(getattr(error, "reason", error)).__name__
        )
