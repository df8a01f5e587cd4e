"""The arithmetic of the LM head (lm_head.py), in chunks of logits: log-probabilities, and the gradient of a
weighted sum.

A row of the gradient with respect to the logits is `w · (p - onehot)`: `w` and the softmax denominator are
folded into the (n, D) factors of the matrix products, and the chunk of logits is overwritten by `exp(logits -
largest)`, minus the denominator at the token.

Shapes: N trained positions, V tokens of the vocabulary, D hidden size, n rows of a chunk.
"""

from collections.abc import Iterator
from typing import Any

from common.memory import HALF, compute_dtype
from common.model import compiled_head
from common.model.logit_transform import LogitTransform, apply_
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits per chunk, and the minimum number of rows: matrix products with fewer are slow. Each chunk also
# passes over the gradient of the head: a large GPU takes more, up to MOST_ELEMENTS, in float32 a hundredth of
# its memory at most.
HEAD_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
MOST_ELEMENTS = 2**28
HEAD_CHUNK_ROWS = {"cpu": 256, "cuda": 256}
# Elementwise operations take this many at a time, and as much extra memory: they fit into a CPU's cache.
BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
# Row stride of the 16-bit logits, in elements: CUDA's fast matrix products need rows aligned to 16 bytes,
# which an odd vocabulary size (GPT-2's 50,257) prevents. The float32 ones, read by elementwise operations,
# stay dense.
ROW_MULTIPLE = {"cpu": 1, "cuda": 64}
# The vocabulary from which compiling the softmax pays: it takes seconds, and then a quarter of the passes
# over memory.
COMPILED_FROM = {"cpu": 2**62, "cuda": 2**14}


def chunk_rows(device: torch.device, V: int) -> int:
    """The number of positions whose logits exist at once."""
    elements = of_device(HEAD_CHUNK_ELEMENTS, device)
    if device.type == "cuda" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(device).total_memory
        elements = max(elements, min(MOST_ELEMENTS, total // 400))
    return max(of_device(HEAD_CHUNK_ROWS, device), elements // V)


def of_device(table: dict[str, int], device: torch.device) -> int:
    return table.get(device.type, table["cpu"])


def gives_float32(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the product of 16-bit hidden states and the head's weight (V, D) is written in float32, not
    rounded: CUDA's can be, and is fast where its rows are aligned."""
    aligned = weight.shape[0] % of_device(ROW_MULTIPLE, weight.device) == 0
    return weight.device.type == "cuda" and dtype in HALF and bias is None and aligned


# --- a chunk ------------------------------------------------------------------------------------------------


class _Chunks:
    """The head's matrix products, one chunk of logits at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        self.dtype = dtype
        self.exact = torch.promote_types(dtype, torch.float32)  # for the softmax, sums and results
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        self.product = None

    def logits(self, hidden: Tensor, rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield for each chunk its rows, hidden states (n, D) and logits (n, V); the next chunk overwrites
        the logits."""
        rows = max(1, min(rows, len(hidden)))
        V, multiple = self.weight.shape[0], of_device(ROW_MULTIPLE, hidden.device)
        exact = hidden.new_empty(rows, V, dtype=self.exact)
        self.product = exact
        if self.dtype != self.exact:
            self.product = hidden.new_empty(rows, -(-V // multiple) * multiple, dtype=self.dtype)[:, :V]
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            h = hidden[chunk].to(self.dtype)
            out, logits = self.product[: len(h)], exact[: len(h)]
            if self.bias is not None:
                torch.addmm(self.bias, h, self.weight.t(), out=out)
            elif gives_float32(self.weight, self.bias, self.dtype):  # one pass less, too
                torch.mm(h, self.weight.t(), out_dtype=self.exact, out=logits)
                out = logits
            else:
                torch.mm(h, self.weight.t(), out=out)
            yield chunk, h, logits if out.dtype == self.exact else logits.copy_(out)

    def softmax(
        self, logits: Tensor, tokens: Tensor, transform: LogitTransform, *, stats: bool, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`_softmax_` of the current logits, compiled where that pays and works: its scores and factor, and
        with gradient the rest of the derivative (n, V), in the dtype of the matrix products."""
        normalize = self.dtype == torch.float16
        if self.dtype != self.exact and logits.shape[1] >= of_device(COMPILED_FROM, logits.device):
            derivative = self.product[: len(logits)] if gradient else None
            found = compiled_head.softmax(derivative, logits, tokens, transform, normalize)
            if found is not None:
                return *found, derivative
        scores, factor = _softmax_(
            logits, tokens, transform, stats=stats, gradient=gradient, normalize=normalize
        )
        return scores, factor, self.rounded(logits) if gradient else None

    def rounded(self, gradient: Tensor) -> Tensor:
        """The gradient of the current logits in the dtype of the matrix products, in the buffer of their
        product."""
        return gradient if self.dtype == self.exact else self.product[: len(gradient)].copy_(gradient)

    def backward(
        self,
        h: Tensor,
        gradient: Tensor,
        factor: Tensor,
        d_hidden: Tensor | None,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
    ) -> None:
        """Send `factor[:, None] * gradient`, (n, V), through the matrix product: sets d_hidden (n, D), adds
        to the others."""
        if d_hidden is not None:
            torch.mul(torch.mm(gradient, self.weight), factor[:, None], out=d_hidden)
        if d_weight is not None:
            scaled = (h * factor[:, None]).to(self.dtype)
            if self.dtype == self.exact:
                d_weight.addmm_(gradient.t(), scaled)
            elif h.device.type == "cuda":  # added in float32: no product to round and to keep
                torch.addmm(d_weight, gradient.t(), scaled, out_dtype=self.exact, out=d_weight)
            else:
                size = max(1, of_device(BLOCK_ELEMENTS, h.device) // h.shape[1])
                for part, columns in zip(d_weight.split(size), gradient.split(size, dim=1), strict=True):
                    part.add_(torch.mm(columns.t(), scaled))  # chunks are accumulated in float32
        if d_bias is not None:
            d_bias.add_(factor.to(self.dtype) @ gradient)


def _blocks(logits: Tensor) -> list[slice]:
    """Rows in blocks small enough to stay in a CPU's cache through all passes of the softmax."""
    size = max(1, of_device(BLOCK_ELEMENTS, logits.device) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _softmax_(
    logits: Tensor,
    tokens: Tensor,
    transform: LogitTransform,
    *,
    stats: bool,
    gradient: bool,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """The scores of tokens (n,) from a chunk of raw logits (n, V), which it overwrites.

    Returns logps, entropy and correct (3, n), the last two zero without stats, and factor (n,). Afterwards,
    with gradient, the derivative of logps by the logits is `factor[:, None] * logits`; with normalize, no
    logit is above 1.
    """
    scores, factor = logits.new_zeros(3, len(logits)), logits.new_empty(len(logits))
    for rows in _blocks(logits):
        block, index = logits[rows], tokens[rows, None]
        derivative = apply_(transform, block, gradient)
        block.sub_(block.amax(-1, keepdim=True))
        chosen = block.gather(-1, index)
        exponentials = block.exp() if stats else block.exp_()
        total = exponentials.sum(-1, keepdim=True)
        log_total = total.log()
        scores[0, rows] = (chosen - log_total)[:, 0]
        if stats:
            scores[1, rows] = (log_total - block.mul_(exponentials).sum(-1, keepdim=True) / total)[:, 0]
            scores[2, rows] = (chosen >= 0)[:, 0].to(scores.dtype)
        if gradient:  # exp - denominator at the token, exp elsewhere
            if stats:
                block.copy_(exponentials)
            if normalize:
                block.div_(total)
                total.fill_(1)
            block.scatter_add_(-1, index, -total)
            if derivative is not None:
                block.mul_(derivative)
            factor[rows] = (-transform.scale / total)[:, 0]
    return scores, factor


def _entropy_gradient_(
    logits: Tensor, tokens: Tensor, transform: LogitTransform, d_logps: Tensor, d_entropy: Tensor
) -> None:
    """Overwrite logits (n, V) with the gradient of `Σ d_logps · logps + d_entropy · entropy`, divided by the
    scale."""
    for rows in _blocks(logits):
        block, index, by_logp, by_entropy = (
            logits[rows],
            tokens[rows, None],
            d_logps[rows, None],
            d_entropy[rows, None],
        )
        derivative = apply_(transform, block, gradient=True)
        block.sub_(block.logsumexp(-1, keepdim=True))
        p = block.exp()
        entropy = -(p * block).sum(-1, keepdim=True)
        # -p · (d_logps + d_entropy · (log p + entropy))
        block.add_(entropy).mul_(by_entropy).add_(by_logp).mul_(p).neg_()
        block.scatter_add_(-1, index, by_logp)
        if derivative is not None:
            block.mul_(derivative)


# --- the gradients ------------------------------------------------------------------------------------------


class WeightedNLL(torch.autograd.Function):
    """See `weighted_nll`. The gradients are complete except for the backward pass's factor; the head's is
    float32."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, tokens, weights, transform, rows):
        chunks = _Chunks(weight, bias, compute_dtype(weight))
        scores = hidden.new_empty(3, len(hidden), dtype=chunks.exact)
        d_hidden, d_weight, d_bias = ctx.gradients = _empty_gradients(ctx, hidden, weight, bias, chunks.exact)
        ctx.dtype = weight.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk, h, logits in chunks.logits(hidden, rows):
                scores[:, chunk], factor, gradient = chunks.softmax(
                    logits, tokens[chunk], transform, stats=True, gradient=True
                )
                d_h = None if d_hidden is None else d_hidden[chunk]
                chunks.backward(h, gradient, factor * -weights[chunk], d_h, d_weight, d_bias)
        logps, entropy, correct = scores
        ctx.mark_non_differentiable(logps, entropy, correct)
        return -(weights * logps).sum(), logps, entropy, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss of weighted_nll can be sent backward only once: its gradients are scaled in place"
            )
        d_hidden, d_weight, d_bias = (None if g is None else g.mul_(d_loss) for g in ctx.gradients)
        ctx.gradients = None
        return d_hidden, d_weight, d_bias, None, None, None, None


class LogProbs(torch.autograd.Function):
    """See `log_probs`. The backward pass receives one number per token, a factor of its row in all
    gradients."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, tokens, transform, rows, grad, stats, entropy_grad):
        chunks = _Chunks(weight, bias, compute_dtype(weight))
        ctx.dtype, ctx.transform, ctx.rows, ctx.entropy_grad = chunks.dtype, transform, rows, entropy_grad
        ctx.d_hidden = ctx.one_chunk = None
        trains_head = any(ctx.needs_input_grad[1:3])
        at_once = (
            grad
            and any(ctx.needs_input_grad)
            and not entropy_grad
            and (not trains_head or len(hidden) <= rows)
        )
        if at_once and not trains_head:
            ctx.d_hidden = torch.empty_like(hidden)
        scores = hidden.new_empty(3, len(hidden), dtype=chunks.exact)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk, h, logits in chunks.logits(hidden, rows):
                scores[:, chunk], factor, gradient = chunks.softmax(
                    logits, tokens[chunk], transform, stats=stats, gradient=at_once
                )
                if ctx.d_hidden is not None:
                    chunks.backward(h, gradient, factor, ctx.d_hidden[chunk], None, None)
                elif at_once:
                    ctx.one_chunk = gradient, factor
        if ctx.d_hidden is None:
            ctx.save_for_backward(hidden, weight, bias, tokens)
        logps, entropy, correct = scores
        ctx.mark_non_differentiable(*((correct,) if entropy_grad else (entropy, correct)))
        return logps, entropy, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logps, d_entropy, _):
        if ctx.d_hidden is not None:
            return (ctx.d_hidden * d_logps[:, None]).to(ctx.d_hidden.dtype), *[None] * 8
        hidden, weight, bias, tokens = ctx.saved_tensors
        chunks = _Chunks(weight, bias, ctx.dtype)
        d_hidden, d_weight, d_bias = _empty_gradients(ctx, hidden, weight, bias, chunks.exact)

        def pass_on(chunk: slice, h: Tensor, gradient: Tensor, factor: Tensor) -> None:
            chunks.backward(
                h, gradient, factor, None if d_hidden is None else d_hidden[chunk], d_weight, d_bias
            )

        with torch.autocast(hidden.device.type, enabled=False):
            if ctx.one_chunk is not None:
                gradient, factor = ctx.one_chunk
                pass_on(slice(None), hidden.to(ctx.dtype), gradient, factor * d_logps)
                return d_hidden, d_weight, d_bias, *[None] * 6
            for chunk, h, logits in chunks.logits(hidden, ctx.rows):
                if ctx.entropy_grad:
                    _entropy_gradient_(logits, tokens[chunk], ctx.transform, d_logps[chunk], d_entropy[chunk])
                    factor, gradient = (
                        torch.full_like(d_logps[chunk], ctx.transform.scale),
                        chunks.rounded(logits),
                    )
                else:
                    _, factor, gradient = chunks.softmax(
                        logits, tokens[chunk], ctx.transform, stats=False, gradient=True
                    )
                    factor = factor * d_logps[chunk]
                pass_on(chunk, h, gradient, factor)
        return d_hidden, d_weight, d_bias, *[None] * 6


def _empty_gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple:
    """Buffers for the requested gradients of (hidden, weight, bias); the last two are zeros of the given
    dtype."""
    wanted = ctx.needs_input_grad
    return (
        torch.empty_like(hidden) if wanted[0] else None,
        torch.zeros_like(weight, dtype=dtype) if wanted[1] else None,
        torch.zeros_like(bias, dtype=dtype) if wanted[2] else None,
    )
