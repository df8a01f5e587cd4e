"""Rotary positions that look at the whole call: each sequence of a row gets those of its own length."""

import copy

from common.collators import flat_batch
from common.model.wrap import wrap
import numpy as np
import pytest
import torch
import transformers

V, ORIGINAL = 97, 16
SIZE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZE |= {
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
CONFIGS = {
    "longrope": lambda: transformers.Phi3Config(
        **SIZE,
        max_position_embeddings=64,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=LONGROPE,
    ),
    "dynamic": lambda: transformers.LlamaConfig(
        **SIZE, max_position_embeddings=ORIGINAL, rope_parameters=DYNAMIC
    ),
    "longrope, padded": lambda: transformers.PhimoeConfig(
        **SIZE,
        max_position_embeddings=64,
        sliding_window=5,
        num_local_experts=4,
        rope_parameters=LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
    ),
}


def make(name):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def pair_and_others():
    """A pair with 12 tokens in common, one of them within the original length; a long and a short sequence,
    and two at the limit."""
    rng = np.random.default_rng(0)
    start = rng.integers(3, V, 12)
    rows = [np.r_[start, rng.integers(3, V, 2)], np.r_[start, rng.integers(3, V, 28)]]
    rows += [rng.integers(3, V, n) for n in (33, 5, ORIGINAL, ORIGINAL + 1)]
    masks = [
        np.r_[np.zeros(12), np.ones(len(ids) - 12)] if len(ids) in (14, 40) else np.ones(len(ids))
        for ids in rows
    ]
    return [
        [{"input_ids": ids, "loss_mask": mask.astype(np.uint8)}]
        for ids, mask in zip(rows, masks, strict=True)
    ]


def alone(name, example):
    """By an untouched model that has not been called before: (n,), 0 where nothing is trained."""
    ids = torch.as_tensor(example[0]["input_ids"])
    logps = make(name)(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    chosen = torch.cat([torch.zeros(1), logps.gather(-1, ids[1:, None])[:, 0]])
    return chosen[torch.as_tensor(example[0]["loss_mask"], dtype=torch.bool) & (torch.arange(len(ids)) > 0)]


@pytest.mark.parametrize("name", CONFIGS)
def test_positions_are_those_of_the_own_length(name):
    examples = pair_and_others()
    with torch.no_grad():
        expected = torch.cat([alone(name, example) for example in examples])
        model = wrap(make(name))
        assert model.padded == ("padded" in name)
        for order in (examples, examples[::-1]):  # a call leaves no trace for the next
            batch = flat_batch(order, torch.device("cpu"))
            found = model(batch).logps[batch["targets"]]
            want = expected if order is examples else torch.cat([alone(name, example) for example in order])
            torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def test_a_copied_model_follows_its_own_rows():
    model = wrap(make("dynamic"))
    other = copy.deepcopy(model)
    batch = flat_batch(pair_and_others(), torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(other(batch).logps, model(batch).logps)
    assert other.hybrid.rotaries[0] is not model.hybrid.rotaries[0]
