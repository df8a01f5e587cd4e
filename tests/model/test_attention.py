"""Attention over a flat row: the numbers of each sequence alone, with a shared start in it once, and by every
kernel."""

import copy
import functools

from common.collators import flat_batch, split_row
from common.data import sharing
from common.model import attention, varlen
from common.model.attention import flat_attention, plan_flat_row
from common.model.flat_model import base_lm, body
from common.model.lm_head import logits_of
from common.model.wrap import wrap
import pytest
import torch

from tests.tiny import TINY, V, sequence, tiny_lm, tokens

CPU = torch.device("cpu")
OTHERS = ("bloom", "mamba")


def group(prompt_length, answer_lengths, seed=0):
    """Examples of one completion each, of one prompt; their first tokens differ."""
    answers = [[2 + i, *tokens(n - 1, 100 * seed + i)] if n else [] for i, n in enumerate(answer_lengths)]
    return [[sequence(tokens(prompt_length, seed), answer)] for answer in answers]


# Examples, and how many tokens the row of them has.
ROWS = {
    "a group": (group(12, [5, 1, 9, 3]), 12 + 18),
    "two groups and what stands between them": (
        [*group(9, [4, 7], 1), *group(6, [3], 2), *group(6, [3], 2), *group(20, [2, 30, 2], 3)],
        9 + 11 + 2 * 9 + 20 + 34,
    ),
    "the same completion twice": ([*group(10, [4], 4), *group(10, [4], 4)], 10 + 8),
    # One without a trained token has its last one for itself, which may be what counts in it.
    "completions without a token": (group(10, [2, 0, 3, 1], 5), 10 + 2 + 10 + 3 + 1),
    "as long as others, with more tokens of their own": (
        [*group(40, [3, 2], 8), *group(20, [3, 22], 9)],
        40 + 5 + 20 + 25,
    ),
    "a start that a later one shares in part": (
        [[sequence(tokens(n, 6), tokens(4, 60 + n))] for n in (30, 20, 25, 40)],
        30 + 20 - 20 + 25 - 20 + 40 - 25 + 16,
    ),
    "an answer that the next one has in its prompt": (
        [[sequence(tokens(10, 7), [5, 6, 7])], [sequence([*tokens(10, 7), 5, 6, 7, 8, 9], [3, 4])]],
        13 + 4,
    ),
}


def in_float64(lm):
    """The model in float64 throughout: transformers' RMSNorm goes through float32."""
    for module in lm.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = lambda x, m=module: (
                m.weight * x * (x.square().mean(-1, keepdim=True) + m.variance_epsilon).rsqrt()
            )
    return lm.double()


def alone(lm, examples, weights):
    """Logits of every sequence by itself, and the gradients of their sum with these weights."""
    sequences = [torch.as_tensor(s["input_ids"])[None] for example in examples for s in example]
    logits = torch.cat([lm(input_ids=ids, use_cache=False).logits[0].double() for ids in sequences])
    return logits, torch.autograd.grad((logits * weights).sum(), list(lm.parameters()), allow_unused=True)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", [*TINY, *OTHERS])
def test_a_shared_start_changes_nothing(kind, row):
    examples, T = ROWS[row]
    lm = tiny_lm(kind)
    model = wrap(copy.deepcopy(lm))
    assert model.padded == (kind == "bloom")
    in_float64(model.lm), in_float64(lm)
    batch = flat_batch(examples, CPU)
    assert batch["input_ids"].shape == (1, T) and T < sum(batch["lengths"])
    weights = torch.randn(
        sum(batch["lengths"]), V, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    wanted, wanted_gradients = alone(lm, examples, weights)

    hidden = model.hidden(batch)
    logits = torch.cat(split_row(logits_of(base_lm(model.lm), hidden), batch))
    tolerance = 1e-5 if kind in OTHERS else 1e-10  # Bloom and Mamba go through float32 in other places, too
    torch.testing.assert_close(logits, wanted, atol=tolerance, rtol=tolerance)
    gradients = torch.autograd.grad((logits * weights).sum(), list(model.lm.parameters()), allow_unused=True)
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        if expected is not None:
            torch.testing.assert_close(
                found, expected, atol=tolerance * float(expected.abs().max() + 1), rtol=tolerance
            )


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    "setting",
    [
        {"MAX_OWN_TOKENS": 0},
        {"MAX_OWN_TOKENS": 3},
        {"MIN_REAL_QUERIES": 0.0, "MIN_RELATIVE_LENGTH": 0.0},
        {"MIN_RELATIVE_LENGTH": 1.0},
    ],
)
def test_buckets_do_not_change_the_result(row, setting, monkeypatch):
    batch = flat_batch(ROWS[row][0], CPU)
    model = wrap(tiny_lm("mistral")).double()  # with a sliding window
    results = []
    for change in ({}, setting):
        for name, value in change.items():
            monkeypatch.setattr(attention, name, value)
        hidden = model.hidden(batch)
        results.append(
            (hidden, *torch.autograd.grad(hidden.square().sum(), list(body(model.lm).parameters())))
        )
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


def test_a_model_with_own_positions_is_padded(capsys):
    """In a row whose sequences stand one after the other rotary embeddings would hide it; in one that shares
    they do not."""
    lm = tiny_lm("llama")
    forward = lm.model.forward
    lm.model.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    assert wrap(lm).padded
    assert "padded batches instead" in capsys.readouterr().out


def naive(q, k, v, scale, window, softcap, sinks):
    """One sequence, head by head: (H, L, Dh), (Hkv, L, Dh) twice -> (L, H, Dh), by the formulas."""
    outputs, seen = [], torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    if window is not None:
        seen &= ~torch.ones_like(seen).tril(-window)
    for h in range(len(q)):
        kv = h * len(k) // len(q)
        scores = scale * q[h] @ k[kv].T
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        weights = scores.exp() * seen
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[h].exp())
        outputs.append(weights / total @ v[kv])
    return torch.stack(outputs, 1)


LENGTHS = [
    [300, 280, 37],
    [256, 256],
    [257],
    [640],
    [641, 255],
    [14, 3, 3],
    [3, 3, 14],
    [7],
    [9, 8, 8, 2, 1],
    [9, 9],
    [12, 2],
]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention_of_a_row_is_the_formulas(kind, window, lengths):
    """Sequences that are strips, one bucket, several buckets, in the order of the buckets and in another
    one."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    T = sum(lengths)
    numbers = [draw(1, heads, T, 8) for heads in (4, 2, 2)] + [draw(4)] * (kind == "sinks")
    weights, softcap = draw(T, 4, 8), 1.5 if kind == "softcap" else None
    exact = [x.double().requires_grad_() for x in numbers]
    parts = zip(*(x[0].split(lengths, 1) for x in exact[:3]), strict=True)
    wanted = torch.cat([naive(*part, 8**-0.5, window, softcap, *(exact[3:] or [None])) for part in parts])
    wanted_gradients = torch.autograd.grad((wanted * weights).sum(), exact)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        inputs = [x.to(dtype).requires_grad_() for x in numbers]
        options = {
            "sliding_window": window,
            "softcap": softcap,
            "s_aux": inputs[3] if kind == "sinks" else None,
        }
        row = plan_flat_row(lengths, CPU)
        found = flat_attention(torch.nn.Module(), *inputs[:3], None, flat_row=row, **options)[0][0]
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
        dropped = flat_attention(torch.nn.Module(), *inputs[:3], None, flat_row=row, dropout=0.5, **options)[
            0
        ][0]
        assert (dropped - found).abs().mean() > 0.1 * found.abs().mean()
        gradients = torch.autograd.grad((found * weights).sum(), inputs)
        for a, b in zip(gradients, wanted_gradients, strict=True):
            torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["softcap", "sinks"])
@pytest.mark.parametrize("row", ["a group", "as long as others, with more tokens of their own"])
def test_soft_capping_and_sinks_with_shared_starts(kind, row, window):
    """The row of the shared start against the same sequences written out in full."""
    examples, _ = ROWS[row]
    batch = flat_batch(examples, CPU)
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    T, token_map = batch["input_ids"].shape[1], batch["token_map"]
    row = [draw(1, heads, T, 8).requires_grad_() for heads in (4, 2, 2)]
    options = {"softcap": 1.5} if kind == "softcap" else {"s_aux": draw(4)}
    plans = plan_flat_row(batch["lengths"], CPU, token_map), plan_flat_row(batch["lengths"], CPU)
    options |= {"sliding_window": window}
    shared = flat_attention(torch.nn.Module(), *row, None, flat_row=plans[0], **options)[0][0][token_map]
    full = [x[:, :, token_map] for x in row]
    written_out = flat_attention(torch.nn.Module(), *full, None, flat_row=plans[1], **options)[0][0]
    torch.testing.assert_close(shared, written_out, atol=1e-12, rtol=1e-12)
    weights = draw(shared.shape)
    found = torch.autograd.grad((shared * weights).sum(), row)
    wanted = torch.autograd.grad((written_out * weights).sum(), row)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


def unshared(monkeypatch):
    monkeypatch.setattr(sharing, "LEAST_SHARED", 10**9)


# --- the kernel for sequences of unequal length -------------------------------------------------------------


def naive_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What PyTorch documents of varlen_attn, sequence by sequence, with its demands on the arguments.

    Queries and keys of a sequence end together, as in FlashAttention, whose kernel it is.
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    for longest, borders in ((max_q, cu_seq_q), (max_k, cu_seq_k)):
        assert longest == int(borders.diff().max()) and type(longest) is int
    assert (
        enable_gqa == (query.shape[1] != key.shape[1]) and query.shape[-1] == key.shape[-1] == value.shape[-1]
    )
    outputs = []
    lengths = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    for q, k, v in zip(query.split(lengths[0]), *(x.split(lengths[1]) for x in (key, value)), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (H, n, Dh)
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * (scale if scale is not None else q.shape[-1] ** -0.5)
        distance = torch.arange(len(k[0]) - len(q[0]), len(k[0]))[:, None] - torch.arange(len(k[0]))
        left, right = window_size
        seen = (distance >= -right) & ((distance <= left) | (left < 0))
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral", "deepseek-v3"])
def test_the_varlen_kernel_gets_the_same_attention(kind, sharing, monkeypatch):
    examples = ROWS["two groups and what stands between them"][0]
    if not sharing:
        unshared(monkeypatch)
    batch = flat_batch(examples, CPU)
    model = wrap(tiny_lm(kind)).double()
    wanted = model.hidden(batch)
    calls = []

    def kernel(*args, **kwargs):
        calls.append(len(args[0]))
        return naive_varlen(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "TAKES_ENABLE_GQA", True)
    monkeypatch.setattr(attention, "capability", lambda device: (8, 0))
    # float64: the kernel cannot, the buckets do it
    assert not calls and torch.equal(model.hidden(batch), wanted)
    monkeypatch.setattr(varlen.Ragged, "dtype", lambda self, value: value.dtype)
    found = model.hidden(batch)
    assert calls == [batch["input_ids"].shape[1]] * 2  # layers; no query twice
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, other = (
        torch.autograd.grad((x * weights).sum(), list(body(model.lm).parameters())) for x in (found, wanted)
    )
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("sharing", "Dv"), [(False, 64), (True, 64), (True, 32)])
def test_varlen_and_buckets_agree_on_a_gpu(sharing, Dv, window, monkeypatch):
    cuda = torch.device("cuda")
    if not sharing:
        unshared(monkeypatch)
    batch = flat_batch(ROWS["two groups and what stands between them"][0], cuda)
    T, plan = batch["input_ids"].shape[1], plan_flat_row(batch["lengths"], cuda, batch["token_map"])
    assert plan.ragged is not None
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, h, T, D, device=cuda, requires_grad=True) for h, D in ((4, 64), (2, 64), (2, Dv))
    ]
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # the kernel; the buckets
        out, _ = flat_attention(
            None, *(x.to(dtype) for x in inputs), None, sliding_window=window, flat_row=plan
        )
        results.append((out.float(), *torch.autograd.grad(out.float().square().sum(), inputs)))
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() < 0.02 * wanted.norm()  # as the kernel rounds, 0.0055
