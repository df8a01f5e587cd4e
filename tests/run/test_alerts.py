"""Alerts: what is sent where, that nothing waits for it, and that the address stays secret. Against a server of our own."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from common import errors
from common.args import CommonArgs
from common.errors import UserError, last_words
from common.run import alerts as module
from common.run.alerts import Alerts, check_address
from common.run.post import body_for
from tests.conftest import ROOT, run_script

import pytest

TOKEN = "T0K3N-of-the-hook"
SMALL = ["--max_steps", "2", "--eval_steps", "0", "--save_steps", "0", "--logging_steps", "1", "--max_train_samples", "40"]


class Server(http.server.ThreadingHTTPServer):
    """Answers with what `answers` holds, the last one again and again; keeps what was sent."""

    daemon_threads, block_on_close = True, False

    def __init__(self, *answers, delay=0.0):
        self.answers, self.delay, self.got, self.asked = list(answers) or [200], delay, [], []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/services/{TOKEN}"

    def wait_for(self, number, seconds=20):
        end = time.monotonic() + seconds
        while len(self.got) < number and time.monotonic() < end:
            time.sleep(0.01)
        return self.got


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        time.sleep(server.delay)
        code = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        server.asked.append((self.path, self.headers["Content-Type"], code))
        if code == 200:
            server.got.append(json.loads(body))
        self.send_response(code)
        if 300 <= code < 400:
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
    monkeypatch.setattr(errors, "LAST_WORDS", errors.LAST_WORDS)
    errors.LAST_WORDS.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    yield
    errors.LAST_WORDS.clear()


def alerts_to(url, **settings):
    return Alerts(CommonArgs(output_dir="out/my-run", alert_webhook=url, **settings))


def test_an_alert_says_what_who_when_and_how_bad():
    server = Server()
    alerts = alerts_to(server.url)
    alerts.watch(7)
    alerts.send("spike", f"the loss jumps; {server.url} is no secret here")
    alerts.close("finished", "8 steps")
    first, last = server.got
    assert first | {"time": 0} == {
        "title": "my-run: spike",
        "text": "the loss jumps; (secret) is no secret here",
        "level": "warn",
        "event": "spike",
        "run": "my-run",
        "step": 7,
        "time": 0,
    }
    assert abs(first["time"] - time.time()) < 60 and (last["event"], last["level"]) == ("finished", "info")
    assert server.asked == [(f"/services/{TOKEN}", "application/json", 200)] * 2
    alerts.send("spike", "after the end")
    assert len(server.got) == 2


def test_each_host_gets_its_own_form_and_nobody_is_called_by_name():
    alert = {"title": "r: died", "text": "<!channel> & @everyone", "level": "error", "event": "died"}
    slack = body_for("https://hooks.slack.com/services/T/B/x", alert)
    assert slack == {"text": "🔴 r: died\n&lt;!channel&gt; &amp; @everyone"}
    for host in ("discord.com", "discordapp.com", "canary.discord.com"):
        found = body_for(f"https://{host}/api/webhooks/1/x", alert)
        assert found == {"content": "🔴 r: died\n<!channel> & @everyone", "allowed_mentions": {"parse": []}}
    for host in ("example.org", "notslack.com", "slack.com.example.org"):
        assert body_for(f"https://{host}/x", alert) == alert


@pytest.mark.parametrize(
    "answers, said, asked", [([500, 429, 200], "", 3), ([500], "answers 500", 3), ([404], "answers 404", 1)]
)
def test_what_may_pass_is_tried_again_and_what_does_not_is_said_once(answers, said, asked, capsys):
    server = Server(*answers)
    alerts = alerts_to(server.url)
    alerts.send("spike", "a")
    alerts.close("finished", "b")
    assert [code for *_, code in server.asked][:asked] == (answers * 3)[:asked]
    out = capsys.readouterr().out
    assert out.count("--alert_webhook: alerts do not arrive") == bool(said) and said in out and TOKEN not in out


def test_a_redirect_is_not_followed(capsys):
    server = Server(302)
    alerts_to(server.url).close("finished", "b")
    assert [path for path, *_ in server.asked] == [f"/services/{TOKEN}"]
    out = capsys.readouterr().out
    assert "answers 302, which leads elsewhere and is not followed" in out and TOKEN not in out


def test_nothing_waits_for_an_address_that_hangs_or_refuses(monkeypatch, capsys):
    """A socket that accepts and never answers; a port where nobody listens."""
    monkeypatch.setattr(module, "LAST_SECONDS", 0.3)
    with socket.socket() as silent, socket.socket() as nobody:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        nobody.bind(("127.0.0.1", 0))
        for port, said in ((silent.getsockname()[1], "not take them as fast"), (nobody.getsockname()[1], "refused")):
            alerts = alerts_to(f"http://127.0.0.1:{port}/{TOKEN}")
            begun = time.monotonic()
            for step in range(200):
                alerts.watch(step)
                alerts.send("spike", "x")
            sent = time.monotonic() - begun
            alerts.close("finished", "b")
            assert sent < 1.0 and time.monotonic() - begun < 3.0
            out = capsys.readouterr().out
            assert out.count("alerts do not arrive") == 1 and TOKEN not in out
            assert said in out or "not take them as fast" in out


def test_a_slow_address_gets_all_that_the_end_can_wait_for():
    server = Server(delay=0.1)
    alerts = alerts_to(server.url)
    begun = time.monotonic()
    for i in range(5):
        alerts.send("spike", str(i))
    assert time.monotonic() - begun < 0.1
    alerts.close("finished", "b")
    assert [got["text"] for got in server.got] == ["0", "1", "2", "3", "4", "b"]


def test_a_stall_is_told_once_and_so_is_its_end():
    server = Server()
    alerts = alerts_to(server.url, alert_stall_minutes=0.1 / 60)
    alerts.watch(3)
    assert [got["event"] for got in server.wait_for(1)] == ["stalled"] and "after step 3" in server.got[0]["text"]
    time.sleep(0.3)
    assert len(server.got) == 1
    alerts.watch(4)
    assert [got["event"] for got in server.wait_for(2)][:2] == ["stalled", "goes on"]
    alerts.close("finished", "")
    time.sleep(0.3)
    assert server.got[-1]["event"] == "finished"  # the end of a run is no stall


def test_what_comes_at_every_step_is_counted_and_told_now_and_then(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    server = Server()
    alerts = alerts_to(server.url)
    for _ in range(5):
        alerts.send("bad step", "step", pause=300)
    now[0] += 301
    alerts.send("bad step", "step", pause=300)
    monkeypatch.undo()
    assert [got["text"] for got in server.wait_for(2)] == ["step", "step (and 4 more before it)"]


@pytest.mark.parametrize(
    "address",
    [
        "",
        " ",
        "hooks.slack.com/x",
        "ftp://h/x",
        "http:///x",
        "https://h/a b",
        "https://h:port/x",
        "https://h/\n",
        "https://h/ü",
    ],
)
def test_what_is_no_address_is_refused_without_being_shown(address):
    if not address:
        assert not alerts_to(address)._url
        return
    with pytest.raises(UserError, match="--alert_webhook: expected an address") as error:
        check_address(address + TOKEN)
    assert TOKEN not in str(error.value)
    with pytest.raises(UserError, match="user name") as error:
        check_address(f"https://{TOKEN}:pw@h/x")
    assert TOKEN not in str(error.value)


def test_only_the_main_process_sends_and_a_dry_run_does_not(monkeypatch):
    server = Server()
    alerts_to(server.url, dry_run=True).close("finished", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    alerts_to(server.url).close("finished", "")
    assert server.asked == [] and errors.LAST_WORDS == []
    monkeypatch.setenv("RANK", "0")
    alerts_to(server.url).close("finished", "")
    assert len(server.got) == 1


def test_of_two_addresses_on_a_command_line_none_stays(monkeypatch):
    words = ["--alert_webhook", "http://h/one", "--alert-webhook=http://h/two", "--alert_webhook", "http://h/three", "x"]
    monkeypatch.setattr(sys, "argv", [*words])
    alerts_to("http://h/three")
    assert sys.argv == ["--alert_webhook", "(secret)", "--alert-webhook=(secret)", "--alert_webhook", "(secret)", "x"]


@pytest.mark.slow
def test_an_error_of_somebody_elses_code_does_not_name_the_address(launch, tmp_path, monkeypatch, capsys):
    """A reward function that calls it by itself, and fails."""
    server = Server()
    (tmp_path / "own.py").write_text(
        "import os\ndef f(prompts, completions, **_):\n    raise OSError(os.environ['PLAINLOOP_ALERT_WEBHOOK'])\n"
    )
    monkeypatch.setenv("PLAINLOOP_ALERT_WEBHOOK", server.url)
    row = {"id": "a", "group": "g", "prompt": "x", "reward": f"{tmp_path / 'own.py'}:f"}
    (tmp_path / "suite.jsonl").write_text(json.dumps(row) + "\n")
    words = ["--model_name_or_path", "data/base_model", *SMALL, "--alert_webhook", server.url]
    with pytest.raises(UserError, match="raised OSError") as error:
        launch("sft", *words, "--regression_suite", str(tmp_path / "suite.jsonl"))
    assert TOKEN in str(error.value) and TOKEN not in errors.printable(str(error.value))
    last_words(error.value)
    assert [got["event"] for got in server.got] == ["died"] and TOKEN not in json.dumps(server.got)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files and not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_an_error_that_ends_the_run_is_told_before_the_process_ends():
    server = Server()
    alerts = alerts_to(server.url)
    alerts.watch(5)
    last_words(UserError(f"no such file {server.url}"))
    assert [got["event"] for got in server.got] == ["died"] and server.got[0]["level"] == "error"
    assert server.got[0]["text"] == "at step 5: no such file (secret)"
    last_words(ValueError("again"))
    assert len(server.got) == 1


def test_a_run_tells_its_end_and_its_address_is_in_no_file_and_no_line(launch, monkeypatch, capsys):
    server = Server()
    monkeypatch.setattr(sys, "argv", ["train_sft.py", "--alert_webhook", server.url])
    words = ["--model_name_or_path", "data/base_model", *SMALL, "--alert_webhook", server.url, "--save_steps", "1"]
    out = launch("sft", *words)
    said = capsys.readouterr()
    assert [got["event"] for got in server.got] == ["finished"] and server.got[0]["step"] == 2
    assert sys.argv == ["train_sft.py", "--alert_webhook", "(secret)"]
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 12 and not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in said.out + said.err
    again = launch("sft", *words[:-2], "--save_steps", "1", "--max_steps", "3")  # no "alert_webhook: None -> ..."
    assert again == out and "alert_webhook" not in capsys.readouterr().out
    assert [got["event"] for got in server.got] == ["finished", "finished"]


@pytest.mark.slow
def test_bad_steps_spikes_and_memory_that_runs_out_are_told(launch, monkeypatch):
    from common.run import metrics

    server = Server()
    monkeypatch.setattr(metrics, "SPIKE", -100.0)  # each loss is one, from the eleventh on
    words = ["--model_name_or_path", "data/base_model", *SMALL, "--max_steps", "12", "--alert_webhook", server.url]
    launch("sft", *words, "--alert_memory_above", "1e-6")
    assert [got["event"] for got in server.got] == ["memory", "spike", "finished"]
    with pytest.raises(UserError, match="exploded"):
        launch("sft", *words, "--learning_rate", "1e30", "--warmup_steps", "0", output="bad")
    assert [got["event"] for got in server.wait_for(4)][3:] == ["bad step"]


def test_without_threads_or_processes_training_goes_on(monkeypatch, capsys):
    def none(*args, **kwargs):
        raise OSError("Cannot allocate memory")

    server = Server()
    monkeypatch.setattr(module.subprocess, "Popen", none)
    alerts = alerts_to(server.url)
    for step in range(3):
        alerts.watch(step)
    alerts.close("finished", "")
    assert [got["event"] for got in server.got] == ["finished"]
    monkeypatch.setattr(module.threading.Thread, "start", none)
    alerts = alerts_to(server.url)
    for step in range(3):
        alerts.watch(step)
    alerts.close("finished", "")
    assert capsys.readouterr().out.count("alerts do not arrive (OSError)") == 2


def test_a_will_is_not_read_where_the_run_said_its_end(monkeypatch):
    server = Server()
    alerts = alerts_to(server.url)
    alerts.watch(1)
    assert TOKEN not in " ".join(alerts._will.args)
    alerts.close("finished", "")
    alerts._will.stdin.close()
    assert alerts._will.wait(20) == 0 and [got["event"] for got in server.got] == ["finished"]


@pytest.mark.slow
def test_a_run_that_is_killed_has_left_word(tmp_path):
    server = Server()
    words = [sys.executable, "train_sft.py", "--output_dir", str(tmp_path / "out"), *SMALL, "--max_steps", "100000"]
    environment = os.environ | {"PLAINLOOP_ALERT_WEBHOOK": server.url}
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (tmp_path / "out" / "metrics.jsonl").exists():
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (got,) = server.wait_for(1)
    assert (got["event"], got["level"], got["title"]) == ("died", "error", "out: died") and got["step"] >= 1
    assert got["text"].startswith(f"after step {got['step']}: the process ended without a word")
    assert TOKEN not in (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "exception", "signal"])
def test_a_script_that_dies_tells_why(tmp_path, how):
    """As a process of its own: by a line for the user, by a traceback, and stopped by a signal."""
    server = Server()
    (tmp_path / "own.py").write_text(
        "import os, signal\n\n\ndef f(prompts, completions, **columns):\n"
        + {
            "error": "    return ['x']\n",
            "exception": "    import common.evaluate\n    common.evaluate.sample = None\n    return [0.0] * len(completions)\n",
        }.get(how, "    os.kill(os.getpid(), signal.SIGTERM)\n    return [0.0] * len(completions)\n")
    )
    words = [sys.executable, "train_sft.py", "--output_dir", str(tmp_path / "out"), *SMALL, "--max_steps", "6"]
    words += [
        "--model_name_or_path",
        "data/base_model",
        "--eval_steps",
        "1",
        "--eval_prompts",
        "data/prompts/chat_test.jsonl",
    ]
    words += ["--eval_reward_funcs", f"{tmp_path}/own.py:f", "--eval_max_new_tokens", "2"]
    run = run_script(words, PLAINLOOP_ALERT_WEBHOOK=server.url)
    assert len(server.got) == 1, run.stderr
    event, text = server.got[0]["event"], server.got[0]["text"]
    if how == "signal":
        assert run.returncode == 75 and event == "stopped" and "by SIGTERM; the same command goes on" in text
    else:
        assert run.returncode == 1 and event == "died"
        assert ("reward function f returned" if how == "error" else "TypeError: 'NoneType'") in text
    last = json.loads((tmp_path / "out" / "events.jsonl").read_text().splitlines()[-1])  # for the line of time
    assert last["kind"] == "stopped" and (("died: " in last["text"]) == (how != "signal"))
    assert TOKEN not in run.stdout + run.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert os.getcwd() == str(ROOT)
