"""Completions from servers: a fake one plays vLLM, right and in every way in which it is known to go wrong."""

import copy
import math
import re
import shutil
import ssl
import subprocess
import time
from pathlib import Path

from common.args import CommonArgs
from common.errors import OutsideError, UserError
from common.model.lora import add_lora
from common.model.wrap import wrap
from common.sampling import sample, server_client, server_rollout, servers
from common.sampling.server_client import Requirements, SamplingParams, start_command
from common.sampling.server_rollout import request_seed
from common.sampling.servers import RolloutServers
from tests.sampling.fake_vllm import FakeVLLM
from tests.tiny import V, tiny_lm

import pytest
import torch
from accelerate import Accelerator
from safetensors import SafetensorError

PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 8], [4, 4, 4, 4], [11, 12, 13, 14], [20]]
KEYS = [(3, 0, i) for i in range(len(PROMPTS))]
STOPS = [1]
PAUSES = server_rollout.PAUSES


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_client, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(server_rollout, "PATIENCE", 1.0)
    monkeypatch.setattr(server_rollout, "PATIENCE_PER_TOKEN", 0.0)
    monkeypatch.setattr(server_rollout, "PAUSES", (0.01, 0.02, 0.04))


@pytest.fixture
def model():
    found = wrap(tiny_lm("llama"))
    found.stop_ids = STOPS
    return found


@pytest.fixture
def fake():
    """fake(**how): a server with the weights of another model; it ends with the test."""
    started = []

    def start(**how):
        started.append(FakeVLLM(tiny_lm("llama", seed=1), **how))
        return started[-1]

    yield start
    for server in started:
        server.die()


@pytest.fixture
def connect(accelerator, model, tmp_path):
    def make(*fakes, trained=None, longest=64, **how):
        urls = [server if isinstance(server, str) else server.url for server in fakes]
        how = {"max_new_tokens": 12} | how
        return RolloutServers(urls, accelerator, trained or model, folder=tmp_path, longest=longest, **how)

    return make


def move(model, by=0.05, seed=0):
    """As an update of the policy would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += by * torch.randn(p.shape, generator=generator) * p.std().nan_to_num(1.0)


def plain_logps(model, prompt, ids, temperature=1.0):
    """By the model as transformers has it, in float64."""
    lm = copy.deepcopy(model.lm).double()
    lm.set_attn_implementation("eager")
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def agree(model, sampled, temperature=1.0):
    for prompt, one in zip(PROMPTS, sampled, strict=True):
        assert one.logps == pytest.approx(plain_logps(model, prompt, one.ids, temperature), abs=1e-4)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 2000
    return text


# --- what is right --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawing", [{}, slow({"temperature": 0.7}), {"temperature": 0.0}], ids=str)
def test_what_is_sampled_is_what_the_own_sampler_samples(drawing, connect, fake, model):
    server = fake(keys={request_seed(key): key for key in KEYS})
    found = connect(server, **drawing)
    for step in range(2):
        found.sync(step)
        ours = sample(model, PROMPTS, KEYS, max_new_tokens=12, **drawing)
        theirs = found.begin(PROMPTS, KEYS).result()
        assert [one.ids for one in theirs] == [one.ids for one in ours]
        assert [one.finished for one in theirs] == [one.finished for one in ours] and found.has_logps
        for one, other in zip(ours, theirs, strict=True):
            assert one.logps == pytest.approx(other.logps, abs=1e-4)
        move(model)
    assert server.reloads == 2 and not list(found.folder.iterdir())


def test_what_is_otherwise_this_time(connect, fake, model):
    found = connect(fake(keys={request_seed(key): key for key in KEYS}))
    found.sync(0)
    limits = [3, 1, 4, 1, 5, 9]
    how = {"max_new_tokens": limits, "stop_ids": [], "temperature": 1.5}
    ours = sample(model, PROMPTS, KEYS, **how)
    theirs = found.begin(PROMPTS, KEYS, **how).result()
    assert [one.ids for one in theirs] == [one.ids for one in ours] and [len(one.ids) for one in theirs] == limits
    agree(model, theirs, 1.5)


def test_a_completion_depends_on_its_key_alone(connect, fake):
    one, two = connect(fake()), connect(fake(), fake())
    for found in (one, two):
        found.sync(0)
    whole = one.begin(PROMPTS, KEYS).result()
    assert whole == two.begin(PROMPTS, KEYS).result()
    parts = [two.begin(PROMPTS[i : i + 2], KEYS[i : i + 2]) for i in (4, 0, 2)]  # begun at once, in another order
    last, first, middle = (part.result() for part in parts)
    assert whole == first + middle + last
    assert len({tuple(one.ids) for one in whole}) == len(PROMPTS)


def test_a_seed_is_the_same_in_every_process():
    assert request_seed((1, 2, 3)) == request_seed([1, 2, 3]) == 4987016031672207636
    seeds = {request_seed((seed, rollout, i)) for seed in range(3) for rollout in range(10) for i in range(64)}
    assert len(seeds) == 3 * 10 * 64 and max(seeds) < 2**63


def test_a_prompt_goes_to_one_server_and_so_do_the_turns_of_a_completion(connect, fake, accelerator):
    one, two = fake(), fake()
    found = connect(one, two)
    found.sync(0)
    requests = [server_rollout.Request(prompt, 0, 4) for prompt in PROMPTS]
    places = found._place(requests, KEYS, found.servers)
    assert places[0] is places[1] and {id(place) for place in places} == {id(server) for server in found.servers}
    longer = [server_rollout.Request([*prompt, 3, 3], 0, 4) for prompt in PROMPTS]
    assert found._place(longer, [(*key, 1) for key in KEYS], found.servers) == places


@pytest.mark.parametrize(
    ("mode", "drawing", "known"),
    [
        ("processed_logprobs", {"temperature": 0.7}, True),
        ("processed_logprobs", {"top_k": 5}, False),
        slow("processed_logprobs", {"top_p": 0.9, "temperature": 0.7}, False),
        slow("processed_logprobs", {"top_k": 5, "temperature": 0.0}, True),
        slow("raw_logprobs", {}, True),
        ("raw_logprobs", {"top_k": 5, "top_p": 0.9}, True),
        ("raw_logprobs", {"temperature": 0.7}, False),
        slow("raw_logprobs", {"temperature": 0.0}, True),
    ],
)
def test_log_probabilities_are_those_of_the_whole_distribution_or_none(mode, drawing, known, connect, fake, model):
    found = connect(fake(mode=mode), **drawing)
    found.sync(0)
    sampled = found.begin(PROMPTS, KEYS).result()
    assert found.has_logps == known
    if known:
        agree(model, sampled, drawing.get("temperature") or 1.0)
    else:
        assert all(math.isnan(logp) for one in sampled for logp in one.logps)
        with pytest.raises(UserError, match="ahead"):
            connect(fake(mode=mode), needs_logps=True, **drawing)


def test_the_command_starts_what_fits():
    required = Requirements("outputs/my model", 61, 640, SamplingParams(0.7), False, "cuda")
    command = start_command("http://node7:8001", required)
    assert command == (
        "VLLM_SERVER_DEV_MODE=1 vllm serve 'outputs/my model' --host 0.0.0.0 "
        "--port 8001 --max-model-len 640 --generation-config vllm --logprobs-mode processed_logprobs"
    )
    on_cpu = start_command("http://127.0.0.1:8001", required._replace(device="cpu", params=SamplingParams(1.0, 5)))
    assert "--host 127.0.0.1" in on_cpu and "raw_logprobs" in on_cpu and "--enforce-eager --no-enable-chunked" in on_cpu


# --- what does not fit at the start ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "longest", "said"),
    [
        ({"play": "no development mode"}, 64, "runs without VLLM_SERVER_DEV_MODE=1"),
        ({"play": "old version"}, 64, "vLLM 0.31.2 is too old: 0.32 or newer"),
        ({"mode": "raw_logits"}, 64, "--logprobs-mode raw_logits gives no log-probabilities"),
        ({"max_model_len": 63}, 64, "takes 63 tokens, prompt and completion may have 64"),
        ({"generation_config": "auto"}, 64, "generation_config.json changes how it samples"),
    ],
    ids=str,
)
def test_a_server_that_does_not_fit_is_refused_with_the_command(how, longest, said, connect, fake):
    with pytest.raises(UserError) as error:
        connect(fake(**how), longest=longest)
    text = one_line(error)
    assert said in text
    if "version" not in str(how):
        assert "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model" in text
        assert "--max-model-len 64" in text and "--logprobs-mode processed_logprobs" in text


def test_a_tied_head_on_a_cpu_is_refused(connect, accelerator):
    lm = tiny_lm("qwen3")
    with FakeVLLM(copy.deepcopy(lm), device="cpu") as server, pytest.raises(UserError, match="keeps a copy of a head"):
        connect(server, trained=wrap(lm))


@pytest.mark.parametrize("size", [V - 1, V + 3])
def test_another_vocabulary_is_refused(size, connect):
    lm = tiny_lm("llama")
    lm.resize_token_embeddings(size)
    with FakeVLLM(lm) as server, pytest.raises(UserError, match=f"has {size} tokens, the one that is trained has {V}"):
        connect(server)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://here", "http://", "http://here:port", "http://here/v1/", "http://a?b"]
)
def test_what_is_no_address_is_refused(url, connect):
    with pytest.raises(UserError, match="expected an address as http://127.0.0.1:8000"):
        connect(url)


def test_nobody_there_is_said_with_the_command(connect):
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 does not answer \(.*refused.*\): start it with: VLLM_SERVER"):
        connect("http://127.0.0.1:9")


def test_the_same_server_twice_is_refused(connect):
    for one, other in (("http://a.invalid:1",) * 2, ("http://127.0.0.1", "http://localhost:8000/")):
        with pytest.raises(UserError, match="are one server: each of them once"):
            connect(one, other)


def test_a_password_in_an_address_is_refused_and_not_shown(connect):
    with pytest.raises(UserError, match="VLLM_API_KEY") as error:
        connect("http://me:geheim@127.0.0.1:8000")
    assert "geheim" not in one_line(error)


def test_a_key_is_asked_for_at_the_start(connect, fake, monkeypatch):
    server = fake(key="k")
    with pytest.raises(UserError, match=r"wants a key \(HTTP 401\): set VLLM_API_KEY"):
        connect(server)
    monkeypatch.setenv("VLLM_API_KEY", "k")
    connect(server).sync(0)


@pytest.mark.parametrize("answer", [None, [1], "<p>\nno\nJSON</p>"], ids=str)
@pytest.mark.parametrize("path", ["/is_paused", "/reset_prefix_cache", "/weight_info"])
def test_answers_that_are_no_objects_end_in_a_line(path, answer, connect, fake, monkeypatch):
    def odd(self, asked, body):
        return (200, answer) if asked == path else right(self, asked, body)

    right = FakeVLLM.answer
    monkeypatch.setattr(FakeVLLM, "answer", odd)
    found = connect(fake())
    if path == "/weight_info":
        with pytest.raises(UserError, match="none is left") as error:
            found.sync(0)
        one_line(error)
    else:
        found.sync(0)


@pytest.fixture
def https(tmp_path, monkeypatch):
    """The SSL context of a server whose certificate this process trusts."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("needs openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=a"
    words = [openssl, *words.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def test_a_server_behind_https_that_hangs_is_found_to(https, connect, fake):
    found = connect(fake(tls=https, play="hangs"), fake(tls=https))
    found.sync(0)
    assert len(found.begin(PROMPTS, KEYS).result()) == len(PROMPTS)
    assert [reason for reason in found.failed.values() if "it hangs" in reason]


def test_an_unknown_version_is_said_and_tried(connect, fake, capsys):
    connect(fake(play="unknown version")).sync(0)
    assert "1.0.dev7 is a version that is not known here" in capsys.readouterr().out


def test_a_server_that_a_killed_run_left_paused_goes_on(connect, fake, capsys):
    server = fake()
    server.paused = True
    found = connect(server)
    found.sync(0)
    assert len(found.begin(PROMPTS, KEYS).result()) == len(PROMPTS)
    assert "was paused, by a run that was killed" in capsys.readouterr().out


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "play", ["old cache", *map(slow, ("dies in a reload", "refuses a reload", "half a reload", "old weights"))]
)
def test_a_server_without_the_weights_is_dropped_for_good(play, connect, fake, model, capsys):
    good, bad = fake(), fake(play=play)
    found = connect(bad, good)
    for step in range(2):  # with the old cache and the old weights, the first push is right
        found.sync(step)
        agree(model, found.begin(PROMPTS, KEYS).result())
        move(model)
    found.sync(2)
    assert list(found.dropped) == [bad.url]
    assert capsys.readouterr().out.count(f"{bad.url} is not used any more: ") == 1
    before = bad.reloads
    found.sync(3)
    agree(model, found.begin(PROMPTS, KEYS).result())
    assert bad.reloads == before


def test_old_weights_show_where_the_model_has_hardly_moved(connect, fake, model):
    """By less than a wrong log-probability would show: the server's answer is what it was, to the bit."""
    found = connect(fake(play="old weights"))
    found.sync(0)
    move(model, 5e-5)
    with pytest.raises(UserError, match="none is left .*still samples from the weights of before"):
        found.sync(1)


def test_a_model_that_has_not_moved_is_pushed_without_suspicion(connect, fake):
    found = connect(fake())
    for step in range(3):
        found.sync(step)
    assert not found.dropped


def test_a_probe_in_the_wrong_mode_is_found(connect, fake):
    """A server that says one mode and gives the other."""
    server = fake()
    found = connect(server, temperature=0.5)
    server.mode = "raw_logprobs"
    with pytest.raises(UserError, match="log-probabilities of a probe are .* nats off"):
        found.sync(0)


def test_weights_that_are_not_finite_are_told(connect, fake, model):
    found = connect(fake())
    with torch.no_grad():
        model.lm.get_output_embeddings().weight[3] = math.nan
    with pytest.raises(UserError, match="its log-probabilities are not finite"):
        found.sync(0)


def test_a_resumed_run_pushes_first(connect, fake, model):
    server = fake()
    connect(server).sync(7)
    move(model)
    again = connect(server)
    again.sync(7)
    assert server.reloads == 2
    agree(model, again.begin(PROMPTS, KEYS).result())
    again.sync(7)
    assert server.reloads == 2


def test_a_folder_that_cannot_be_written_is_told(connect, fake, tmp_path):
    found = connect(fake())
    found.folder.write_text("in the way")
    with pytest.raises(UserError, match="the weights for the servers cannot be written"):
        found.sync(0)


def test_a_full_disk_is_told_and_nothing_stays_there(connect, fake, monkeypatch):
    def full(_accelerator, _model, _dtype):
        def write(folder):
            (folder / "model.safetensors").write_bytes(b"half")
            raise SafetensorError('IoError(Os { code: 28, message: "No space left on device" })')

        return write

    found = connect(fake())
    monkeypatch.setattr(servers, "policy_writer", full)
    with pytest.raises(UserError, match="cannot be written: .* goes on from the last checkpoint"):
        found.sync(0)
    assert not list(found.folder.iterdir())


def test_what_a_killed_run_left_is_deleted(connect, fake, tmp_path):
    found = connect(fake())
    for left in (".step-7.tmp", "step-6"):
        (found.folder / left).mkdir(parents=True)
    found.sync(0)
    assert not list(found.folder.iterdir())


@pytest.mark.parametrize(("mode", "known"), [("processed_logprobs", False), ("raw_logits", None)])
def test_a_server_that_was_started_anew_between_rollouts_is_checked_anew(mode, known, connect, fake, model, capsys):
    server = fake(mode="raw_logprobs")
    found = connect(server, top_k=5)
    found.sync(0)
    assert found.has_logps
    server.version, server.mode = "default", mode
    if known is None:
        with pytest.raises(UserError, match="none is left .*raw_logits gives no log-probabilities"):
            found.sync(1)
        assert "is left out until it is back" in capsys.readouterr().out
    else:
        found.sync(1)
        assert found.has_logps == known


def test_why_a_server_is_not_taken_back_is_told(connect, fake, capsys):
    good, bad = fake(), fake(play="500")
    found = connect(good, bad)
    found.sync(0)
    found.begin(PROMPTS, KEYS).result()
    bad.play = "no development mode"
    for step in (1, 2):
        found.sync(step)
    told = [line for line in capsys.readouterr().out.splitlines() if "left out until it is back" in line]
    assert len(told) == 1 and "runs without VLLM_SERVER_DEV_MODE=1" in told[0]


def test_a_slash_at_the_end_changes_nothing(connect, fake):
    good, bad = fake(), fake(play="500")
    found = connect(good, f"{bad.url}/")
    for step in range(2):
        found.sync(step)
        found.begin(PROMPTS, KEYS).result()
    assert found.strikes[bad.url] == 1


def test_servers_in_bfloat16_get_weights_in_bfloat16(connect, fake, model, monkeypatch):
    server, sizes = fake(dtype="bfloat16"), []
    load = FakeVLLM._reload

    def reload(self, folder):
        sizes.append((folder / "model.safetensors").stat().st_size)
        return load(self, folder)

    monkeypatch.setattr(FakeVLLM, "_reload", reload)
    found = connect(server)
    found.sync(0)
    assert not found.dropped and sizes[0] < 0.6 * sum(4 * p.numel() for p in model.parameters())


def test_servers_get_an_adapter_merged(connect, fake, accelerator):
    pytest.importorskip("peft")
    model = add_lora(CommonArgs(lora_r=4), wrap(tiny_lm("llama")))
    model.stop_ids = STOPS
    found = connect(fake(), trained=model)
    for step in range(2):
        found.sync(step)
        for prompt, one in zip(PROMPTS, found.begin(PROMPTS, KEYS).result(), strict=True):
            assert one.logps == pytest.approx(found._score(prompt, 1.0, one.ids), abs=1e-4)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p) * p.requires_grad
    assert found.begin([], []).result() == []


def test_two_runs_do_not_share_a_server(connect, fake):
    server = fake()
    one, two = connect(server), connect(server)
    one.sync(0)
    two.sync(0)
    with pytest.raises(
        UserError, match="none is left .*: another run has given it weights: they have version '0-.*', not '0-"
    ):
        one.begin(PROMPTS, KEYS).result()


# --- faults in a rollout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("play", ["restarts", *map(slow, ("dies in a rollout", "hangs", "500", "aborts", "garbage"))])
def test_others_take_over_and_draw_the_same(play, connect, fake, model, capsys):
    alone = connect(fake())
    alone.sync(0)
    good, bad = fake(), fake(play=play)
    found = connect(bad, good)
    found.sync(0)
    prompts, keys = PROMPTS * 4, [(3, 0, i) for i in range(4 * len(PROMPTS))]
    assert found.begin(prompts, keys).result() == alone.begin(prompts, keys).result()
    assert found.begin(prompts, keys).result() == alone.begin(prompts, keys).result()
    told = [line for line in capsys.readouterr().out.splitlines() if bad.url in line]
    assert len(told) == 1 and "the other servers take over, with the same seeds" in told[0]


@pytest.mark.parametrize("play", ["500 twice", "breaks off twice"])
def test_the_last_server_is_asked_again_and_draws_the_same(play, connect, fake, model, capsys):
    alone = connect(fake())
    alone.sync(0)
    dead, only = fake(play="500"), fake()
    found = connect(dead, only)
    found.sync(0)
    prompts, keys = PROMPTS * 4, [(3, 0, i) for i in range(4 * len(PROMPTS))]
    found.begin(prompts, keys).result()
    assert list(found.failed) == [dead.url]
    only.play = play
    capsys.readouterr()
    assert found.begin(prompts, keys).result() == alone.begin(prompts, keys).result()
    assert list(found.failed) == [dead.url] and not found.strikes[only.url]
    assert min(only.tries.values()) == 3
    told = [line for line in capsys.readouterr().out.splitlines() if only.url in line]
    assert len(told) == 1 and "no other is left: asked again, 3 times at most" in told[0]


def test_the_last_server_is_given_up_after_its_pauses(connect, fake):
    server = fake(play="500")
    found = connect(server)
    found.sync(0)
    with pytest.raises(OutsideError, match="none is left .*HTTP 500"):
        found.begin(PROMPTS[:1], KEYS[:1]).result()
    assert server.served == 1 + len(PAUSES)


def test_a_run_that_is_told_to_end_does_not_wait_for_a_server_that_hangs(connect, fake, monkeypatch):
    server = fake(play="hangs")
    found = connect(server)
    found.sync(0)
    monkeypatch.setattr(server_rollout, "PATIENCE", 60.0)
    monkeypatch.setattr(server_client, "END_SECONDS", 0.1)
    monkeypatch.setattr(server_client, "TOLD_TO_END", told := [])
    begun = found.begin(PROMPTS, KEYS)
    told.append(time.monotonic())
    with pytest.raises(OutsideError, match="after a signal told the run to end"):
        begun.result(timeout=20)
    assert server.served == len(PROMPTS)  # one that was waited for is not asked again


@pytest.mark.slow
def test_a_slow_server_is_relieved_by_the_other(connect, fake, monkeypatch):
    slow, quick = fake(play="slow"), fake()
    found = connect(slow, quick)
    found.sync(0)
    monkeypatch.setattr(server_rollout, "AT_ONCE", 4)
    found.begin(PROMPTS * 4, [(3, 0, i) for i in range(4 * len(PROMPTS))]).result()
    assert quick.served > slow.served > 0


def test_a_server_that_is_back_is_checked_and_taken_back(connect, fake, model, capsys):
    good, bad = fake(), fake(play="500")
    found = connect(good, bad)
    found.sync(0)
    found.begin(PROMPTS, KEYS).result()
    assert list(found.failed) == [bad.url]
    bad.play = ""
    move(model)
    found.sync(1)
    assert not found.failed
    agree(model, found.begin(PROMPTS, KEYS).result())
    assert bad.served > 1
    bad.die()
    time.sleep(0.2)
    for step in (2, 3):
        found.sync(step)
    told = capsys.readouterr().out
    assert told.count(f"{bad.url} is back\n") == 1 and len(re.findall("is left out until it is back", told)) == 1
    agree(model, found.begin(PROMPTS, KEYS).result())


@pytest.mark.slow
def test_one_that_fails_in_every_rollout_is_dropped(connect, fake):
    good, bad = fake(), fake(play="500")
    found = connect(good, bad)
    for step in range(4):
        found.sync(step)
        found.begin(PROMPTS, KEYS).result()
    assert "it failed in 3 rollouts" in found.dropped[bad.url]


def test_with_none_left_the_run_ends_in_one_line(connect, fake):
    found = connect(fake(play="dies in a rollout"), fake(play="500"))
    found.sync(0)
    with pytest.raises(UserError) as error:
        found.begin(PROMPTS, KEYS).result()
    text = one_line(error)
    assert "none is left" in text and "HTTP 500" in text and "start one with: VLLM_SERVER_DEV_MODE=1" in text
    assert "the same command goes on from the last checkpoint" in text


def test_a_token_that_the_server_does_not_know_is_an_error(connect, fake):
    found = connect(fake(), fake())
    found.sync(0)
    with pytest.raises(UserError, match=rf"refuses a prompt of 2 tokens \(HTTP 400\): Token id {V} is out of vocabulary"):
        found.begin([[3, V]], [(0, 0, 0)]).result()


def test_a_request_that_is_cut_without_a_word_is_an_error(connect, fake):
    found = connect(fake(max_model_len=64))
    found.sync(0)
    with pytest.raises(UserError, match="has cut a sequence without a word: 60 of 60 tokens of the prompt, 4 of 12 of the"):
        found.begin([[3] * 60], [(0, 0, 0)], stop_ids=[]).result()


def test_a_rollout_is_of_one_set_of_weights(connect, fake, model):
    """A push waits for what is being sampled."""
    found = connect(fake(play="slow"))
    found.sync(0)
    begun = found.begin(PROMPTS, KEYS)
    before = [plain for plain in [copy.deepcopy(model)]][0]
    move(model)
    found.sync(1)
    agree(before, begun.result())
    agree(model, found.begin(PROMPTS, KEYS).result())


def test_a_rollout_that_is_far_from_the_model_ends_the_run(connect, fake):
    class Metrics:
        def window_mean(self, name):
            assert name == "sampling/logp_difference"
            return self.mean

    found, metrics = connect(fake()), Metrics()
    metrics.mean = 0.4
    found.check(metrics)
    metrics.mean = 0.6
    with pytest.raises(UserError, match="0.60 nats a token off .* its weights are not theirs"):
        found.check(metrics)


def test_the_page_has_the_command():
    page = Path("docs/rollouts.md").read_text(encoding="utf-8")
    for device in ("cuda", "cpu"):
        command = start_command(
            "http://127.0.0.1:8000", Requirements("outputs/sft", 0, 768, SamplingParams(), False, device)
        )
        assert f"{command}\n" in page


def test_the_page_has_the_bounds():
    page = Path("docs/rollouts.md").read_text(encoding="utf-8")
    assert "nothing on this page was seen on a GPU" in page and f"{servers.MOST_DIFFERENCE} nats" in page
    assert f"{servers.CLOSE} nats" in page and f"{servers.CLOSE_ROUNDED} otherwise" in page
    assert f"probe of {servers.PROBE_TOKENS} sampled" in page and f"After {servers.STRIKES} such rollouts" in page
    assert PAUSES == (1.0, 2.0, 4.0) and "after 1, 2 and 4 s" in page
