"""Completions from servers: a fake one plays vLLM, right and in every way in which it is known to go
wrong."""

import copy
from pathlib import Path
import re

from accelerate import Accelerator
from common.args import CommonArgs
from common.errors import OutsideError, UserError
from common.model.lora import add_lora
from common.model.wrap import wrap
from common.sampling import sample, vllm
from common.sampling.vllm import ROUNDED, RolloutServers, request_seed
import pytest
import torch

from tests.sampling.fake_vllm import FakeVLLM
from tests.tiny import V, tiny_lm

PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 8], [4, 4, 4, 4], [11, 12, 13, 14], [20]]
KEYS = [(3, 0, i) for i in range(len(PROMPTS))]
MANY, MANY_KEYS = PROMPTS * 4, [(3, 0, i) for i in range(4 * len(PROMPTS))]
STOPS = [1]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vllm, "PAUSES", (0.0, 0.01, 0.02))


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
        how = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | how
        return RolloutServers(urls, accelerator, trained or model, tmp_path, longest, **how)

    return make


def move(model, by=0.05):
    """As an update of the policy would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += by * torch.randn(p.shape, generator=generator) * p.std().nan_to_num(1.0)


def plain_logps(model, prompt, ids, temperature=1.0):
    """By the model as transformers has it, in float64."""
    lm = copy.deepcopy(model.lm).double()
    lm.set_attn_implementation("eager")
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def agree(model, sampled, temperature=1.0):
    for prompt, one in zip(PROMPTS, sampled, strict=True):
        assert one.logps == pytest.approx(plain_logps(model, prompt, one.ids, temperature), abs=1e-4)


def lines(capsys, word):
    return [line for line in capsys.readouterr().out.splitlines() if word in line]


# --- what is right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "drawing"),
    [
        ("processed_logprobs", {"temperature": 0.7}),
        ("raw_logprobs", {}),
        slow("raw_logprobs", {"top_k": 5, "top_p": 0.9}),
    ],
)
def test_servers_sample_as_the_own_sampler(mode, drawing, connect, fake, model):
    server = fake(mode=mode, keys={request_seed(key): key for key in KEYS})
    found = connect(server, **drawing)
    for step in range(2):
        found.sync(step)
        ours = sample(model, PROMPTS, KEYS, max_new_tokens=12, **drawing)
        theirs = found.sample(PROMPTS, KEYS)
        assert [(one.ids, one.finished) for one in theirs] == [(one.ids, one.finished) for one in ours]
        agree(model, theirs, drawing.get("temperature", 1.0))
        move(model)
    assert server.reloads == 2 and not list(found.folder.iterdir())


def test_limits_and_temperature_of_one_call(connect, fake, model):
    found = connect(fake(keys={request_seed(key): key for key in KEYS}))
    found.sync(0)
    how = {"max_new_tokens": [3, 1, 4, 1, 5, 9], "temperature": 1.5}
    ours = sample(model, PROMPTS, KEYS, **how)
    theirs = found.sample(PROMPTS, KEYS, **how)
    assert [one.ids for one in theirs] == [one.ids for one in ours]
    agree(model, theirs, 1.5)
    assert found.sample([], []) == []


def test_a_completion_depends_on_its_key_alone(connect, fake):
    servers = fake(), fake()
    one, two = connect(fake()), connect(*servers)
    for found in (one, two):
        found.sync(0)
    whole = one.sample(PROMPTS, KEYS)
    assert whole == two.sample(PROMPTS, KEYS)
    assert [server.served for server in servers] == [4, 2]  # the completions of a prompt stay together
    # begun at once, in another order
    parts = [two.begin(PROMPTS[i : i + 2], KEYS[i : i + 2]) for i in (4, 0, 2)]
    last, first, middle = (part.result() for part in parts)
    assert whole == first + middle + last
    assert len({tuple(one.ids) for one in whole}) == len(PROMPTS)


def test_weights_are_pushed_before_the_first_rollout(connect, fake, model):
    """In a resumed run, too, after one that left the server paused and a folder of weights; also if they have
    not moved."""
    server = fake()
    connect(server).sync(7)
    move(model)
    server.paused = True
    again = connect(server)
    (again.folder / "step-6").mkdir(parents=True)
    for step in (7, 7, 8):
        again.sync(step)
    assert server.reloads == 3 and not again.failed and not list(again.folder.iterdir())
    agree(model, again.sample(PROMPTS, KEYS))
    again.folder.rmdir()
    again.folder.write_text("in the way")
    with pytest.raises(UserError, match="rollout_weights/step-9 cannot be written"):
        again.sync(9)


def test_a_seed_is_the_same_in_every_process():
    assert request_seed((1, 2, 3)) == request_seed([1, 2, 3]) == 4987016031672207636 < 2**63


# --- what does not fit at the start -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"play": "no development mode"}, "in development mode does (HTTP 404 to /server_info: "),
        ({"mode": "raw_logits"}, "raw_logits"),
        ({"max_model_len": 63}, "--max-model-len 63"),
        ({"generation_config": "auto"}, "--generation-config auto"),
    ],
    ids=str,
)
def test_a_server_that_does_not_fit_is_refused(how, said, connect, fake):
    server = fake(**how)
    with pytest.raises(UserError) as error:
        connect(server)
    assert str(error.value).startswith(f"--rollout_server {server.url} ")
    command = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --port 8000 --max-model-len 64 --generation-config vllm"
    assert said in str(error.value) and f"{command} --logprobs-mode processed_logprobs" in str(error.value)
    assert (
        command.replace("MODEL", "outputs/sft").replace("64", "768") in Path("docs/rollouts.md").read_text()
    )


def test_a_wrong_address_is_one_line(connect, fake):
    for url in (
        "localhost:8000",
        "http://here:8000/v1",
        "http://me:geheim@127.0.0.1:8000",
        "http://127.0.0.1:9",
    ):
        with pytest.raises(UserError, match="--rollout_server") as error:
            connect(url)
        assert "geheim" not in str(error.value)
    with pytest.raises(UserError, match="--top_k or --top_p .*--temperature"):  # restricted sampling needs 1
        connect(fake(), temperature=0.7, top_k=5)


def test_a_smaller_vocabulary_is_refused(connect):
    lm = tiny_lm("llama")
    lm.resize_token_embeddings(V - 1)
    with FakeVLLM(lm) as server, pytest.raises(UserError, match="out of vocabulary"):
        connect(server)


def test_the_key_of_the_environment_is_sent_and_never_printed(connect, fake, monkeypatch):
    for key, said in (("geheim", "HTTP 401"), ("ge\nheim", "characters that a header cannot have")):
        monkeypatch.setenv("VLLM_API_KEY", key)
        with pytest.raises(UserError, match=said) as error:
            connect(fake(key="k"))
        assert "heim" not in str(error.value)
    monkeypatch.setenv("VLLM_API_KEY", " k\n")
    connect(fake(key="k")).sync(0)


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "play", ["old cache", *map(slow, ("refuses a reload", "half a reload", "old weights"))]
)
def test_a_server_without_the_weights_is_left_out(play, connect, fake, model, capsys):
    good, bad = fake(), fake(play=play)
    found = connect(bad, good)
    for step in range(3):  # with the old cache and the old weights, the first push is right
        found.sync(step)
        agree(model, found.sample(PROMPTS, KEYS))
        move(model)
    assert list(found.failed) == [bad.url]
    reason = "it does not sample from .*, 0.001 is the most" if play == "old cache" else ""
    assert re.search(f"{bad.url} is left out: {reason}", capsys.readouterr().out)


@pytest.mark.parametrize(("dtype", "by", "steps"), [("float32", 5e-5, 2), ("bfloat16", 2e-3, 8)])
def test_old_weights_show_before_they_are_far(dtype, by, steps, connect, fake, model):
    """By less than the bound of a probe, all at once or little by little: the server's answer stays what it
    was."""
    found = connect(fake(play="old weights", dtype=dtype))
    with pytest.raises(OutsideError, match=r"still samples from old weights: .* moved by (0|\d.*e-)"):
        for step in range(steps):
            found.sync(step)
            move(model, by)


def test_old_weights_show_if_each_push_moves_little(connect, fake, model):
    found = connect(fake(play="old weights"))
    found.tolerance = ROUNDED
    with pytest.raises(OutsideError, match="still samples from old weights: .* moved by"):
        for step in range(60):
            found.sync(step)
            move(model, 1e-4)
    assert step > 2


def test_servers_get_an_adapter_merged(connect, fake):
    pytest.importorskip("peft")
    model = add_lora(CommonArgs(lora_r=4), wrap(tiny_lm("llama")))
    model.stop_ids = STOPS
    found = connect(fake(), trained=model)
    for step in range(2):
        found.sync(step)  # whose probe compares the two
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p) * p.requires_grad


def test_two_runs_do_not_share_a_server(connect, fake):
    server = fake()
    one, two = connect(server), connect(server)
    one.sync(0)
    two.sync(0)
    with pytest.raises(
        OutsideError, match="none is left .*weights are '0-.*', not '0-.*': restarted, or used by"
    ):
        one.sample(PROMPTS, KEYS)


# --- faults in a rollout ------------------------------------------------------------------------------------

SEEN = {
    "restarts": "its weights are 'default', not '0-",
    "another prompt": "an answer that is no completion of 12 tokens",
    "stops anywhere": "an answer that is no completion of 12 tokens",
}
FAULTS = (
    "500",
    "dies in a rollout",
    "hangs",
    "aborts",
    "unknown token",
    "cuts the prompt",
    "NaN",
    "a long number",
)


@pytest.mark.parametrize("play", [*SEEN, *map(slow, FAULTS)])
def test_the_others_take_over_and_draw_the_same(play, connect, fake, capsys, monkeypatch):
    if play == "hangs":
        monkeypatch.setattr(vllm, "LOAD_TIMEOUT", 1.5)
        monkeypatch.setattr(vllm, "TOKEN_TIMEOUT", 0.0)
    alone = connect(fake())
    alone.sync(0)
    good, bad = fake(), fake(play=play)
    found = connect(bad, good)
    found.sync(0)
    for _ in range(2):
        assert found.sample(MANY, MANY_KEYS) == alone.sample(MANY, MANY_KEYS)
    assert len(lines(capsys, f"{bad.url} has failed ({SEEN.get(play, '')}")) == 1


def test_a_request_is_tried_three_times(connect, fake):
    alone, only = connect(fake()), fake(play="500 twice")
    found = connect(only)
    for servers in (alone, found):
        servers.sync(0)
    assert found.sample(MANY, MANY_KEYS) == alone.sample(MANY, MANY_KEYS)
    assert not found.failed and set(only.tries.values()) == {0, 3}


def test_a_server_that_is_back_samples_again(connect, fake, model, capsys):
    good, bad = fake(), fake(play="500")
    found = connect(good, bad)
    found.sync(0)
    found.sample(PROMPTS, KEYS)
    assert list(found.failed) == [bad.url]
    bad.play, before = "", bad.served
    move(model)
    found.sync(1)
    agree(model, found.sample(PROMPTS, KEYS))
    assert not found.failed and bad.served > before
    bad.version, bad.mode = "default", "raw_logits"  # started anew, with other settings
    for step in (2, 3):
        found.sync(step)
    said = capsys.readouterr().out
    assert said.count(f"{bad.url} is left out") == 2 and "rollouts come from 2 vLLM servers\n" in said


def test_with_none_left_the_run_ends_in_one_line(connect, fake):
    found = connect(fake(play="dies in a rollout"), fake(play="500"))
    found.sync(0)
    with pytest.raises(
        OutsideError, match="none is left .*HTTP 500.*start it with: VLLM_SERVER_DEV_MODE=1"
    ) as error:
        found.sample(PROMPTS, KEYS)
    assert "\n" not in str(error.value) and len(str(error.value)) < 2000


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([3, V], f"Token id {V} is out of vocabulary"), ([3] * 60, "no completion of 12 tokens: {'")],
)
def test_a_request_that_cannot_be_served_is_one_line(prompt, said, connect, fake, model):
    """Also one that a server cuts without a word."""
    server = fake(max_model_len=64)
    found = connect(server)
    model.stop_ids = []
    found.sync(0)
    with pytest.raises(OutsideError, match=rf"none is left \({server.url}: .*{said}"):
        found.sample([prompt], [(0, 0, 0)])


def test_a_rollout_is_of_one_set_of_weights(connect, fake, model):
    """A push waits for what is being sampled."""
    found = connect(fake(play="slow"))
    found.sync(0)
    begun = found.begin(PROMPTS, KEYS)
    before = copy.deepcopy(model)
    move(model)
    found.sync(1)
    agree(before, begun.result())
    agree(model, found.sample(PROMPTS, KEYS))
