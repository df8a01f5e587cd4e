"""How memory grows with the work: live tensors are counted one by one, so that every figure is exact and free
of noise."""

from common.collators import flat_batch
from common.data.types import all_trained
from common.model.fused_head import chunk_rows
from common.model.wrap import wrap
from common.run.dry_run import Live
from common.sampling.generate import sample
import numpy as np
import pytest
import torch
import transformers

from tests.tiny import SIZE

CPU = torch.device("cpu")
D, LAYERS, NEW = SIZE["hidden_size"], 1, 16
# Bytes of the keys and values of a token.
TOKEN = 2 * LAYERS * SIZE["num_key_value_heads"] * (D // SIZE["num_attention_heads"]) * 4


def tiny(V=61, **changes):
    torch.manual_seed(0)
    sizes = (
        SIZE
        | {
            "vocab_size": V,
            "max_position_embeddings": 8192,
            "num_hidden_layers": LAYERS,
            "tie_word_embeddings": True,
        }
        | changes
    )
    return wrap(transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))).train()


def held(model, lengths, objective="known weights", trained=1.0):
    """Bytes: the most that lives at once while the gradients of a row are made, beside the weights."""
    draw = np.random.default_rng(0)
    row = [all_trained(draw.integers(2, 61, size=n)) for n in lengths]
    for sequence in row:
        sequence["loss_mask"][: int((1 - trained) * len(sequence["loss_mask"]))] = 0
    batch = flat_batch([row], CPU)
    with Live(model.parameters()) as live:
        if objective == "known weights":
            loss = model(batch, nll_weights=batch["loss_mask"]).nll
        else:
            loss = -(model(batch).logps * batch["loss_mask"]).sum()
        loss.backward()
        model.zero_grad()
        return live.most


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of the head that every row here has several of."""
    monkeypatch.setattr("common.model.fused_head.HEAD_CHUNK_ELEMENTS", {"cpu": 2**14, "cuda": 2**14})
    monkeypatch.setattr("common.model.fused_head.HEAD_CHUNK_ROWS", {"cpu": 64, "cuda": 64})


def test_one_long_sequence_costs_no_more_than_many_short_ones():
    model = tiny()
    one = {n: held(model, [n]) for n in (2048, 4096, 8192)}
    assert one[8192] == pytest.approx(held(model, [128] * 64), rel=0.01)
    # in strips, for speed: their outputs are there twice, and a mask
    assert held(model, [512] * 16) < 1.15 * one[8192]
    # A mask or scores of every pair of tokens would be 64 MiB (bool) or more for 8k, and 16 times those of
    # 2k.
    assert one[8192] - one[4096] == pytest.approx(2 * (one[4096] - one[2048]), rel=0.01)


@pytest.mark.parametrize("objective", ["known weights", "log-probabilities"])
def test_the_vocabulary_costs_its_gradient_and_one_chunk(objective):
    small, large = (held(tiny(V), [128] * 32, objective=objective) for V in (1000, 9000))
    gradients = 2 * 8000 * D * 4  # of the head and of the embedding, which are one matrix
    chunk = chunk_rows(CPU, 9000) * 9000 * 4
    assert large - small < gradients + 2 * chunk
    # all logits would be far more: the bound says something
    assert gradients + 2 * chunk < 8000 * 128 * 32 * 4 / 15


def sampled(model, prompt, G, new=NEW):
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 61, size=prompt).tolist()] * G
    with Live(model.parameters()) as live:
        found = sample(model, prompts, [(i,) for i in range(G)], stop_ids=[61], max_new_tokens=new)
        assert {len(completion.ids) for completion in found} == {new}
        return live.most


def test_sampling_holds_no_copy_of_the_prompt_for_each_completion():
    model = tiny()
    few, many = sampled(model, 1024, 1), sampled(model, 1024, 16)
    # a copy of the prompt's keys and values would be twice that
    assert (many - few) / 15 < 0.5 * TOKEN * 1024


def test_an_update_holds_the_prompt_of_a_group_once():
    model, prompt, answer = tiny(), 1024, 32
    draw = np.random.default_rng(0)
    start = draw.integers(2, 61, size=prompt)

    def held_by(G):
        mask = np.array([0] * prompt + [1] * answer, np.uint8)
        examples = [
            [{"input_ids": np.concatenate([start, draw.integers(2, 61, size=answer)]), "loss_mask": mask}]
            for _ in range(G)
        ]
        batch = flat_batch(examples, CPU)
        with Live(model.parameters()) as live:
            (-(model(batch).logps * batch["loss_mask"]).sum()).backward()
            model.zero_grad()
            return live.most, batch["input_ids"].numel()

    (one, tokens_of_one), (many, tokens_of_many) = held_by(1), held_by(16)
    assert tokens_of_many - tokens_of_one == 15 * answer
    # Attention sees each sequence in full, so that its keys and values are written out; the rest is not.
    alone = held(model, [prompt + answer])
    assert one == pytest.approx(alone, rel=0.02)
    assert many < 0.4 * 16 * alone
