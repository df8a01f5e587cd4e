"""The proof at loading: a model whose longer sequences would differ on flat rows is padded, or refused."""

import copy

from common.collators import flat_batch
from common.errors import UserError
from common.model.flat_model import FlatModel
from common.model.wrap import wrap
import numpy as np
import pytest
import torch
import transformers

from tests.tiny import FAMILIES, HEAD, SIZE, V, spread, tiny_config

INDEXED = {**SIZE, **HEAD, "index_n_heads": 2, "index_head_dim": 8, "num_experts_per_tok": 2}
LONG = {
    # Two blocks of four keys are chosen for each token.
    "minimax-m3": (
        "MiniMaxM3VLTextConfig",
        {
            **INDEXED,
            "num_local_experts": 4,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 48,
            "rotary_dim": 4,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
        },
    ),
    # Its layers add a key for each 128 tokens.
    "deepseek-v4": (
        "DeepseekV4Config",
        {
            **INDEXED,
            "max_position_embeddings": 512,
            "num_key_value_heads": 1,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "q_lora_rank": 16,
            "o_lora_rank": 16,
            "o_groups": 2,
            "sliding_window": 6,
            "layer_types": ["heavily_compressed_attention"] * 2,
        },
    ),
    # Eight keys are chosen for each token, all of equal scores in a new model.
    "doge": ("DogeConfig", {**SIZE, "keep_window_size": 8}),
    # Four, often of score 0.
    "deepseek-v32": ("DeepseekV32Config", {**FAMILIES["deepseek-v32"][1], "index_n_heads": 1}),
}


def make(name: str) -> transformers.PreTrainedModel:
    config, sizes = LONG[name]
    if not hasattr(transformers, config):
        pytest.skip("transformers does not have it")
    return spread(config, sizes)


def sequence(ids: np.ndarray, prompt: int) -> dict[str, np.ndarray]:
    """Of which all but the prompt is trained."""
    return {"input_ids": ids, "loss_mask": (np.arange(len(ids)) >= prompt).astype(np.uint8)}


def assert_as_alone(model: FlatModel, lm: transformers.PreTrainedModel, example: list[dict]) -> None:
    """The log-probabilities of an example's trained tokens are those of transformers' model on each sequence."""
    batch = flat_batch([example], torch.device("cpu"))
    with torch.no_grad():
        found = model.eval()(batch).logps[batch["targets"]]
        wanted = []
        for one in example:
            ids, mask = torch.tensor(one["input_ids"]), torch.tensor(one["loss_mask"][1:], dtype=torch.bool)
            logps = lm(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            wanted.append(logps.gather(-1, ids[1:, None])[:, 0][mask])
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LONG)
def test_sequences_longer_than_any_length_of_the_config(name):
    """What attention chooses or compresses, which a few tokens do not show."""
    lm = make(name)
    model = wrap(copy.deepcopy(lm))
    lengths = [300, 150, 3, 140] if name == "deepseek-v4" else [24, 9, 40, 3]
    rng = np.random.default_rng(0)
    assert_as_alone(model, lm, [sequence(rng.integers(2, V, n), 1) for n in lengths])


@pytest.mark.parametrize("name", LONG)
def test_completions_of_one_prompt(name):
    """The state of the prompt's last token, which predicts a completion's first, is that of its sequence alone,
    whatever the lengths of the others."""
    lm = make(name)
    model = wrap(copy.deepcopy(lm))
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, V, 12)
    completions = [np.append(prompt, rng.integers(2, V, n)) for n in (57, 3, 20, 8)]
    assert_as_alone(model, lm, [sequence(ids, len(prompt)) for ids in completions])


@pytest.mark.parametrize("setting", ["is_causal", "use_bidirectional_attention"])
def test_a_model_that_sees_later_tokens_is_refused(setting):
    if setting == "is_causal":
        config = tiny_config("llama")
        config.is_causal = False
    else:
        config = tiny_config("gemma3")
        config.use_bidirectional_attention = True
    lm = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="a token changes the logits before it"):
        wrap(lm)


def test_a_head_that_is_cut_is_refused():
    """Inkling's logits are those of fewer tokens than its head has."""
    if not hasattr(transformers, "InklingTextConfig"):
        pytest.skip("transformers does not have it")
    sizes = {**SIZE, **HEAD, "n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": V - 1}
    with pytest.raises(
        UserError, match=r"the model \(InklingForCausalLM\): its head does not give its logits"
    ):
        wrap(spread("InklingTextConfig", sizes))
