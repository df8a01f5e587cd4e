"""Sampling without a cache: what every model can, as it is trained."""

import copy

from common.model.wrap import wrap
from common.sampling import sample, why_no_cache
import numpy as np
import pytest
import torch
import transformers

from tests.extras.test_rope import make as rope_model
from tests.tiny import V

PROMPTS = [np.random.default_rng(n).integers(2, V, n).tolist() for n in (5, 3, 9, 5)]
KEYS = [(0, i) for i in range(4)]


def test_a_model_with_its_own_cache():
    torch.manual_seed(0)
    config = transformers.RwkvConfig(vocab_size=V, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    lm = transformers.RwkvForCausalLM(config).eval()
    model = wrap(copy.deepcopy(lm)).train()
    assert "RwkvForCausalLM" in why_no_cache(model)
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
    assert why_no_cache(model, 16) is None and "original length" in why_no_cache(model, 17)
    found = sample(model, PROMPTS, KEYS, max_new_tokens=12, stop_ids=[], temperature=0.0)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(12):
                lm = rope_model(name)  # a new one: it has not been called on anything longer
                ids = torch.cat([ids, lm(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert ids[0, len(prompt) :].tolist() == completion.ids
