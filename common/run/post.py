"""Post one alert to one address.

Run as a program, it is the watchdog of a run: it waits for the run's end and reports one without notice, as when the kernel
kills a process that is out of memory. It imports nothing of the project, so it takes 15 MB rather than torch's size.
"""

import contextlib
import json
import signal
import sys
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 10.0  # seconds to connect, or between two parts of an answer
MARKS = {"info": "🟢", "warn": "🟠", "error": "🔴"}
BYE = "bye"
LONGEST = 60  # seconds the last alert may take


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Following a redirect would send the alert to another address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, alert: dict[str, Any]) -> None:
    """Make one attempt. Raises what urllib raises."""
    body = json.dumps(body_for(url, alert)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "plainloop"})
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT):
        pass


def body_for(url: str, alert: dict[str, Any]) -> dict[str, Any]:
    """The body in the host's format: Slack "text", Discord "content", any other the alert itself.

    A text cannot mention anybody: neither Slack's <!channel> nor Discord's @everyone takes effect.
    """
    host = urlsplit(url).hostname or ""
    text = f"{MARKS[alert['level']]} {alert['title']}\n{alert['text']}"
    if host == "slack.com" or host.endswith(".slack.com"):
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    if host.removeprefix("ptb.").removeprefix("canary.") in ("discord.com", "discordapp.com"):
        return {"content": text, "allowed_mentions": {"parse": []}}
    return alert


def wait_for_the_end() -> None:
    """Read stdin: a line with the address and the alert, then the number of each step, then BYE if all is well. Returns when
    the run has ended."""
    given, last = json.loads(sys.stdin.readline()), ""
    for line in sys.stdin:
        last = line.strip() or last
    if last == BYE:
        return
    alert = given["alert"] | {"step": int(last or 0), "time": round(time.time(), 3)}
    if hasattr(signal, "alarm"):
        signal.alarm(LONGEST)  # an address that answers byte by byte would keep this process alive for ever
    alert["text"] = f"after step {last or 0}: the process ended without a word: it was killed, perhaps for its memory"
    for wait in (0.0, 2.0, 10.0):
        time.sleep(wait)
        with contextlib.suppress(Exception):
            post(given["url"], alert)
            return


if __name__ == "__main__":
    wait_for_the_end()
