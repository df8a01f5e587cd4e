"""Models of our own that learn to call a calculator, in the forms of released models' chat templates."""

import random

import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import train_metrics, write_rows
from tests.scripts.texts import BASE
from tests.scripts.tool_forms import tokenizer_of

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out a sum.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def question(draw: random.Random) -> tuple[dict, str, str]:
    """A user's turn, its sum and the result."""
    one, other = draw.randint(100, 999), draw.randint(100, 999)
    written = f"{one}+{other}"
    return {"role": "user", "content": f"What is {written}?"}, written, str(one + other)


def chats(count: int) -> list[dict]:
    """Every other one asks the calculator."""
    draw, rows = random.Random(0), []
    for number in range(count):
        user, written, result = question(draw)
        final = {"role": "assistant", "content": f"Answer: {result}"}
        if number % 2:
            rows.append({"messages": [user, final], "tools": [TOOL]})
            continue
        call = {"id": "a", "function": {"name": "calculate", "arguments": {"expression": written}}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        output = {"role": "tool", "name": "calculate", "tool_call_id": "a", "content": result}
        rows.append({"messages": [user, turn, output, final], "tools": [TOOL]})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("form", ["XML", "gpt-oss"])
def test_a_model_learns_to_call_in_the_form_of_its_template(launch, tmp_path, form):
    """Having seen calls in half of its chats, it is rewarded for right answers."""
    tokenizer = tokenizer_of(form)
    model = AutoModelForCausalLM.from_pretrained(BASE)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    few = ["--eval_steps", 0, "--save_steps", 0, "--logging_steps", 1]
    seen = write_rows(tmp_path / "chats.jsonl", chats(1600))
    steps = ["--max_steps", 320, "--per_device_train_batch_size", 16, "--learning_rate", 1e-3]
    base = ["--model_name_or_path", tmp_path / "base", "--dataset_name", seen]
    sft = launch("sft", *base, *steps, *few, "--num_samples", 0, output="sft")
    draw, prompts = random.Random(1), []
    for _ in range(200):
        user, _, result = question(draw)
        prompts.append({"prompt": [user], "answer": result})
    rows = write_rows(tmp_path / "prompts.jsonl", prompts)
    demo = ["--config", "experiments/configs/tools.yaml", "--max_steps", 10, "--max_completion_length", 160]
    own = ["--model_name_or_path", sft, "--dataset_name", rows, "--learning_rate", 2e-4]
    output = launch("tools", *demo, *own, *few, "--per_device_train_batch_size", 64, output="tools")
    metrics = train_metrics(output)
    calls = [row["tools/call_frequency"] for row in metrics]
    rewards = [row["reward"] for row in metrics]
    assert max(calls[:2]) < 0.6 and min(calls[-3:]) > 0.75
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1
    assert all(row["tools/failure_frequency"] < 0.4 for row in metrics)  # the others have been read
