"""One alert to one address.

As a program it is the last will of a run: it waits for the run's end, and tells of one that came without a word, as when the
kernel kills a process for its memory. It stands alone, so that it costs 15 MB and not torch.
"""

import contextlib
import json
import signal
import sys
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 10.0  # seconds that the address may take to connect, or between two parts of its answer
MARKS = {"info": "🟢", "warn": "🟠", "error": "🔴"}
BYE = "bye"
LONGEST = 60  # seconds that the last will takes


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """To follow one would tell another address what is meant for this one."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, alert: dict[str, Any]) -> None:
    """One attempt. Raises what urllib raises."""
    body = json.dumps(body_for(url, alert)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "plainloop"})
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT):
        pass


def body_for(url: str, alert: dict[str, Any]) -> dict[str, Any]:
    """What the host of the address takes: Slack "text", Discord "content", any other the alert as it is.

    Nobody is called by name, whatever a text holds: not by Slack's <!channel>, nor by Discord's @everyone.
    """
    host = urlsplit(url).hostname or ""
    text = f"{MARKS[alert['level']]} {alert['title']}\n{alert['text']}"
    if host == "slack.com" or host.endswith(".slack.com"):
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    if host.removeprefix("ptb.").removeprefix("canary.") in ("discord.com", "discordapp.com"):
        return {"content": text, "allowed_mentions": {"parse": []}}
    return alert


def wait_for_the_end() -> None:
    """stdin: a line with the address and the alert, then the number of each step, then BYE if all is well. It ends with the
    run."""
    given, last = json.loads(sys.stdin.readline()), ""
    for line in sys.stdin:
        last = line.strip() or last
    if last == BYE:
        return
    alert = given["alert"] | {"step": int(last or 0), "time": round(time.time(), 3)}
    if hasattr(signal, "alarm"):
        signal.alarm(LONGEST)  # an address that answers a byte now and then would keep this process for ever
    alert["text"] = f"after step {last or 0}: the process ended without a word: it was killed, perhaps for its memory"
    for wait in (0.0, 2.0, 10.0):
        time.sleep(wait)
        with contextlib.suppress(Exception):
            post(given["url"], alert)
            return


if __name__ == "__main__":
    wait_for_the_end()
