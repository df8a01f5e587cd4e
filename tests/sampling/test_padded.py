"""Models in padded batches, or without a cache: the numbers of each sequence alone."""

import copy

from common.collators import flat_batch
from common.errors import UserError
from common.model.wrap import wrap
from common.sampling import sample
from common.sampling.generate import choose_method
from common.sampling.padded import WholeDecoder
import numpy as np
import pytest
import torch
import transformers

from benchmarks.models import tiny_config
from tests.model.test_rope import make as rope_model
from tests.tiny import V

PROMPTS = [np.random.default_rng(n).integers(2, V, n).tolist() for n in (5, 3, 9, 5)]
KEYS = [(0, i) for i in range(4)]


def test_a_model_with_its_own_cache():
    torch.manual_seed(0)
    config = transformers.RwkvConfig(
        vocab_size=V, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2
    )
    lm = transformers.RwkvForCausalLM(config).eval()
    model = wrap(copy.deepcopy(lm)).train()
    assert choose_method(model, 9).decoder.func is WholeDecoder
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(6):
            ids = torch.cat([ids, lm(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        wanted.append(ids[0, len(prompt) :].tolist())
    stop = wanted[0][2]  # so that completions leave at different times
    found = sample(model, PROMPTS, KEYS, max_new_tokens=6, stop_ids=[stop], temperature=0.0)
    assert [c.ids for c in found] == [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in wanted]
    assert model.training


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_positions_follow_the_text_so_far(name):
    """16 tokens in these models; a prompt of 9 goes past them, and with a short completion it has a cache."""
    model = wrap(rope_model(name))
    assert [choose_method(model, longest).decoder.func is WholeDecoder for longest in (16, 17)] == [
        False,
        True,
    ]
    found = sample(model, PROMPTS, KEYS, max_new_tokens=12, stop_ids=[], temperature=0.0)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(12):
                lm = rope_model(name)  # a new one: it has not been called on anything longer
                ids = torch.cat([ids, lm(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert ids[0, len(prompt) :].tolist() == completion.ids


def whole(model, ids):
    """The log-probabilities of a sequence alone."""
    logps = model(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.nn.functional.pad(logps.gather(-1, torch.as_tensor(ids[1:])[:, None])[:, 0], (1, 0))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_ties_among_selected_keys_meet_no_padding(family):
    """With few heads many scores are 0: which of them are chosen depends on the number of keys."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config.index_n_heads = 4
    lm = transformers.AutoModelForCausalLM.from_config(config).eval()
    model, rng = wrap(copy.deepcopy(lm)), np.random.default_rng(1)
    sequences = [rng.integers(2, V, n) for n in (24, 17, 24, 9)]
    batch = flat_batch(
        [[{"input_ids": ids, "loss_mask": np.ones(len(ids))}] for ids in sequences], torch.device("cpu")
    )
    found, alone = model(batch).logps, torch.cat([whole(lm, ids) for ids in sequences])
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
    found.sum().backward(), alone.sum().backward()
    for (name, p), q in zip(model.lm.named_parameters(), lm.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(
                p.grad, q.grad, atol=1e-4 * float(q.grad.abs().max() + 1), rtol=1e-3, msg=name
            )
    # as ZeRO-3 marks it: its processes have to call the model equally often
    model.lm.lm_head.weight.ds_id = 0
    with pytest.raises(UserError, match="one sequence at a time"):
        model(batch)


def test_positions_counted_with_the_padding():
    """Llama 4 scales late queries by their place in the cache: prompts of unequal length are not joined."""
    torch.manual_seed(0)
    config = tiny_config("llama4_text")
    config.floor_scale = 4
    lm = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = wrap(copy.deepcopy(lm))
    for prompt, found in zip(
        PROMPTS, sample(model, PROMPTS, KEYS, max_new_tokens=9, stop_ids=[]), strict=True
    ):
        with torch.no_grad():
            logps = whole(lm, np.array(prompt + found.ids))
        torch.testing.assert_close(torch.tensor(found.logps), logps[len(prompt) :], atol=1e-4, rtol=1e-4)
