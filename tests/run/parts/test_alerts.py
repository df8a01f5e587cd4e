"""Alerts: what is sent where, that nothing waits for it, and that the address stays secret. Against a server
of our own."""

import http.server
import json
import socket
import sys
import threading
import time
from types import SimpleNamespace

from common import errors
from common.args import CommonArgs
from common.errors import UserError, last_words
from common.run.parts import alerts as module
from common.run.parts.alerts import Alerts
import pytest

from tests.conftest import events_of

TOKEN = "T0K3N-of-the-hook"
SMALL = "--model_name_or_path data/base_model --max_steps 2 --eval_steps 0 --save_steps 0".split()
SMALL += "--logging_steps 1 --max_train_samples 40".split()


class Server(http.server.ThreadingHTTPServer):
    """Answers with what `answers` holds, the last one again and again; keeps what was sent."""

    daemon_threads, block_on_close = True, False

    def __init__(self, *answers):
        self.answers, self.got, self.asked = list(answers) or [200], [], []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/services/{TOKEN}"

    @property
    def events(self):
        return [got["event"] for got in self.got]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body, server = self.rfile.read(int(self.headers["Content-Length"])), self.server
        code = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        server.asked.append((self.path, self.headers["Content-Type"], code))
        if code == 200:
            server.got.append(json.loads(body))
        self.send_response(code)
        self.send_header("Location", f"/other/{TOKEN}")
        self.end_headers()

    def do_GET(self):
        self.server.asked.append((self.path, "", 0))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(module, "WAITS", (0.0, 0.02, 0.02))
    errors.LAST_WORDS.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    yield
    errors.LAST_WORDS.clear()


def alerts_to(url, **settings):
    return Alerts(CommonArgs(output_dir="out/my-run", alert_webhook=url, **settings))


def test_an_alert_says_what_who_and_when():
    """Slack reads the text, Discord the content; nobody is called by name."""
    server = Server()
    alerts = alerts_to(server.url)
    alerts.on_step(7)
    alerts.on_event("spike", 7, f"<!channel> & @everyone; {server.url} is no secret here")
    alerts.on_event("spike", 7, "another one, within five minutes")
    alerts.on_event("saved", 7, "checkpoint-7")
    alerts.on_event("stopped", 8, "by SIGTERM")
    alerts.close()
    first, last = server.got
    assert first["content"] == "my-run: spike\nstep 7: <!channel> & @everyone; (secret) is no secret here"
    assert "&lt;!channel&gt; &amp; @everyone" in first["text"] and first["allowed_mentions"] == {"parse": []}
    assert (first["event"], first["run"], first["step"], last["event"]) == ("spike", "my-run", 7, "stopped")
    assert abs(first["time"] - time.time()) < 60
    assert server.asked == [(f"/services/{TOKEN}", "application/json", 200)] * 2


def test_of_an_event_at_every_minute_one_in_five_is_sent(monkeypatch):
    alerts, sent = alerts_to("http://127.0.0.1:1"), []
    monkeypatch.setattr(alerts, "send", lambda kind, text: sent.append(text))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 60.0 * step))
    for step in range(12):
        alerts.on_event("spike", step, "")
    assert sent == ["step 0: ", "step 5: ", "step 10: "]


@pytest.mark.parametrize("answers, said", [([500, 429, 200], ""), ([500], "500"), ([302], "redirects")])
def test_failures_are_retried_and_said_once(answers, said, capsys):
    """Where an address redirects to, the alert would not arrive."""
    server = Server(*answers)
    alerts = alerts_to(server.url)
    alerts.send("spike", "a")
    alerts.send("finished", "b")
    alerts.close()
    assert [code for *_, code in server.asked if code][:3] == (answers * 3)[:3]
    out = capsys.readouterr().out
    assert out.count("--alert_webhook") == bool(said) and said in out and TOKEN not in out


def test_nothing_waits_for_a_hanging_address(monkeypatch):
    """A socket that accepts and never answers."""
    monkeypatch.setattr(module, "LAST_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        alerts, begun = alerts_to(f"http://127.0.0.1:{silent.getsockname()[1]}/{TOKEN}"), time.monotonic()
        for _ in range(200):
            alerts.send("spike", "x")
        alerts.close()
        assert time.monotonic() - begun < 3.0


@pytest.mark.parametrize(
    "address",
    [
        "hooks.slack.com/x",
        "ftp://h/x",
        "http:///x",
        "https://h/a b",
        "https://h:port/x",
        "https://h/\n",
        "https://h/ü",
    ],
)
def test_a_bad_address_is_refused_and_not_shown(address):
    for url in (address + TOKEN, f"https://{TOKEN}:pw@h/x"):
        with pytest.raises(UserError, match="--alert_webhook") as error:
            alerts_to(url)
        assert TOKEN not in str(error.value)


@pytest.mark.parametrize("settings, rank", [({"dry_run": True}, "0"), ({}, "1")])
def test_only_the_main_process_of_a_run_sends(settings, rank, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    server = Server()
    alerts = alerts_to(server.url, **settings)
    alerts.send("finished", "")
    alerts.close()
    assert server.asked == [] and errors.LAST_WORDS == []


@pytest.mark.parametrize("starts", [True, False])
def test_an_error_is_told_before_the_end(starts, launch, tmp_path):
    """Also one while the run starts: here --model_name_or_path is missing."""
    server = Server()
    (tmp_path / "own.py").write_text(f"def f(**columns):\n    raise ValueError({server.url!r})\n")
    words = ["--model_name_or_path", f"no-such-folder{server.url}"]
    if not starts:
        words = "--eval_steps 1 --eval_prompts data/prompts/chat_test.jsonl --eval_max_new_tokens 2".split()
        words += ["--eval_reward_funcs", f"{tmp_path}/own.py:f"]
    with pytest.raises(UserError) as error:
        launch("sft", *SMALL, *words, "--alert_webhook", server.url)
    last_words(error.value)
    last_words(ValueError("again"))
    (got,) = server.got
    assert got["event"] == "died" and "(secret)" in got["content"]
    assert (
        starts
        or TOKEN not in (tmp_path / "out" / "events.jsonl").read_text()
        and events_of(tmp_path / "out", "died")
    )


def test_a_run_tells_its_end_and_no_address(launch, monkeypatch, capsys):
    server = Server()
    monkeypatch.setattr(
        sys, "argv", ["train_sft.py", f"--alert-webhook={server.url}", "--alert_webhook", server.url]
    )
    words = [*SMALL, "--alert_webhook", server.url, "--save_steps", "1"]
    out = launch("sft", *words)
    said = capsys.readouterr()
    assert server.events == ["finished"] and server.got[0]["step"] == 2
    assert sys.argv == "train_sft.py --alert-webhook=(secret) --alert_webhook (secret)".split()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 12 and not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in said.out + said.err
