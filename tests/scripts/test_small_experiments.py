"""The small experiments from train_sft.py against float64: one step of each, its gradient, and DFT's recorded
values."""

import json

from common.model.wrap import wrap
from common.sampling import sample
import pytest
from safetensors.torch import load_file
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT, read_rows, write_rows
from tests.run.test_health import break_calls
from tests.scripts.one_step import assert_step, exact, logits_of, nll_window, watched
from tests.scripts.texts import END, chat, ids_of, prompt_ids, tokenizer

RECORDED = json.loads((ROOT / "tests" / "trl_recorded.json").read_text())["sft_dft"]
CHATS = [
    ("What is 2+3?", "2+3=5. Answer: 5"),
    ("Hi", "Hello! How are you?"),
    ("How much is 9-4-1?", "Answer: 4"),
]


def chats(folder):
    return write_rows(folder / "rows.jsonl", [{"messages": chat(*turns)} for turns in CHATS])


def sequences():
    """(ids, mask) of each chat: the answer and its end of turn are trained."""
    found = [(prompt_ids(chat(question)), ids_of(answer + END)) for question, answer in CHATS]
    return [(before + after, [0] * len(before) + [1] * len(after)) for before, after in found]


def trained_logits(policy):
    """Of all trained tokens: logits (N, V) and the tokens (N,)."""
    keeps = [(ids, mask.index(1)) for ids, mask in sequences()]  # the first that is trained
    logits = torch.cat([logits_of(policy, ids)[start - 1 : -1] for ids, start in keeps])
    return logits, torch.tensor([token for ids, start in keeps for token in ids[start:]])


def dft(logps, count):
    """2508.05629, of the log-probabilities of the trained tokens."""
    return -(logps.detach().exp() * logps).sum() / count


@pytest.mark.parametrize("case", [case for case in RECORDED["cases"] if case["loss_type"] == "dft"], ids=str)
def test_the_formula_of_dft_below_is_trls(case):
    logps = torch.tensor(RECORDED["inputs"]["logps"][case["inputs"]], requires_grad=True)
    keep = torch.tensor(RECORDED["inputs"]["labels"][case["labels"]])[:, 1:] != -100
    loss = dft(logps[keep], case["num_items_in_batch"] or keep.sum())
    loss.backward()
    torch.testing.assert_close(loss.item(), case["loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logps.grad, torch.tensor(case["grad_logps"]), rtol=1e-5, atol=1e-6)


def loss_of(name, policy):
    logits, tokens = trained_logits(policy)
    if name == "dft":
        return dft(logits.log_softmax(-1).gather(-1, tokens[:, None]), len(tokens))
    return torch.nn.functional.cross_entropy(logits, tokens, label_smoothing=0.2)


@pytest.mark.parametrize("name", ["dft", "label_smoothing"])
def test_a_step_is_that_of_the_paper(name, launch, model, tmp_path):
    """The loss that is logged stays the cross-entropy, which compares with that of train_sft.py."""
    script, flags = {
        "dft": ("sft", ["--loss_type", "dft"]),
        "label_smoothing": (name, ["--label_smoothing", "0.2"]),
    }[name]
    words = ["--dataset_name", chats(tmp_path), "--per_device_train_batch_size", 3, "--max_steps", 2]
    words += ["--learning_rate", "3e-3"]
    run = watched(launch, script, model, *words, *flags)
    for step in range(2):
        policy = run.policy(step)
        assert_step(run, step, policy, loss_of(name, policy), nll_window(policy, sequences())[1])


@pytest.mark.parametrize("best", [[], ["--save_best", "max:eval_loss"]], ids=["last", "best"])
def test_the_average_is_evaluated_and_exported(best, launch, model, tmp_path, monkeypatch):
    """What is trained are the weights of train_sft.py, bit for bit; their average, in float64, is what the
    rest of the run sees. The third step is passed over, and is none of the average either."""
    data = chats(tmp_path)
    words = [
        "--dataset_name",
        data,
        "--per_device_train_batch_size",
        2,
        "--max_steps",
        6,
        "--learning_rate",
        "3e-2",
    ]
    words += ["--eval_dataset_name", data, "--eval_steps", 2]
    break_calls(monkeypatch, {2})
    plain = watched(launch, "sft", model, *words, output="plain")
    break_calls(monkeypatch, {2})
    run = watched(launch, "ema", model, *words, "--ema_decay", 0.6, *best)
    trained = [*plain.weights, load_file(plain.output / "model.safetensors")]  # after 0, 1, ... 5 updates
    assert all(
        torch.equal(run.weights[step][name], w) for step in range(5) for name, w in trained[step].items()
    )
    averages = [{name: w.double() for name, w in trained[0].items()}]
    for weights in trained[1:]:
        averages.append({name: 0.6 * w + 0.4 * weights[name].double() for name, w in averages[-1].items()})
    found = {row["step"]: row["eval_loss"] for row in run.evals}
    of = {0: 0, 2: 2, 4: 3, 6: 5}  # updates
    assert found == pytest.approx(
        {s: nll_window(exact(model, averages[n]), sequences())[1]["loss"] for s, n in of.items()}
    )
    step = of[max((2, 4, 6), key=found.get) if best else 6]
    for name, w in load_file(run.output / "model.safetensors").items():
        torch.testing.assert_close(w.double(), averages[step][name], rtol=1e-5, atol=1e-6)


def test_rejection_sampling_trains_on_the_answers_that_are_accepted(launch, model, tmp_path, capsys):
    """Each once, finished, in the order of the prompts; a run that goes on does not sample again."""
    rows = [{"prompt": chat(q), "kind": q[0]} for q, _ in CHATS]
    rows[1]["tools"] = [
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
    ]
    code = "def short(completion_ids, kind, **_):\n    return [None if k == 'W' else len(ids) / 10 for k, ids in zip(kind, completion_ids)]"
    (tmp_path / "rewards.py").write_text(code)
    words = ["--model_name_or_path", model, "--dataset_name", write_rows(tmp_path / "rows.jsonl", rows)]
    words += ["--reward_funcs", f"{tmp_path}/rewards.py:short", "--reward_threshold", "0.2", "--seed", 5]
    words += ["--num_generations", 40]
    words += [
        "--max_completion_length",
        20,
        "--max_steps",
        2,
        "--eval_steps",
        0,
        "--save_steps",
        2,
        "--num_samples",
        0,
    ]
    output = launch("rft", *words)
    written = read_rows(output / "accepted.jsonl")
    accepted = [(row["prompt"], row["completion"][0]["content"]) for row in written]
    assert any("tools" in row for row in written)  # what the chat template has shown while they were sampled
    assert all(
        row.get("tools") == (rows[1]["tools"] if row["prompt"] == rows[1]["prompt"] else None)
        for row in written
    )
    assert f"{len(accepted)} distinct answers to 2 of 3 prompts are accepted" in capsys.readouterr().out
    elsewhere = ("--resume_from_checkpoint", output / "checkpoint-2")
    for name, steps, more in (("out", 3, ()), ("other", 4, elsewhere), ("other", 5, ())):
        launch("rft", *words, "--max_steps", steps, *more, output=name)
        assert "are accepted" not in capsys.readouterr().out
    # The same draws by the sampler: what it gives for these keys is tested in tests/sampling.
    lm = wrap(AutoModelForCausalLM.from_pretrained(model))
    prompts = [prompt_ids(row["prompt"]) for row in rows]
    keys = [(5, i) for i in range(120)]
    found = sample(lm, [prompts[i // 40] for _, i in keys], keys, stop_ids=[0, 2], max_new_tokens=20)
    wanted = [
        (i // 40, tokenizer().decode(c.ids, skip_special_tokens=True))
        for (_, i), c in zip(keys, found, strict=True)
        if c.finished and len(c.ids) >= 2 and i >= 40
    ]
    assert len({*wanted}) < len(wanted)  # an answer came twice
    assert [(rows[i]["prompt"], text) for i, text in sorted({*wanted})] == accepted and len(accepted) > 4
