"""The arithmetic of the LM head (lm_head.py), in chunks of logits: log-probabilities, and the gradient of a
weighted sum.

A row of the gradient with respect to the logits is `w · (p - onehot) = (w / Z) · (e - Z · onehot)`, with
`e = exp(logits - largest)` and `Z = Σ e`. Only `e - Z · onehot` is of size (n, V), and overwrites the chunk of
logits; `w / Z`, a number per row, is applied in the matrix products, to what is of size (n, D).

Shapes: N trained positions, V tokens of the vocabulary, D hidden size, n rows of a chunk.
"""

from collections.abc import Iterator, Sequence
import math
from typing import Any, NamedTuple

from common.memory import HALF
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


class Scoring(NamedTuple):
    """What is computed from hidden states and a head."""

    tokens: Tensor  # (N,) int64
    transform: LogitTransform
    dtype: torch.dtype  # of the matrix products
    stats: bool = True  # whether entropy and correct are needed
    entropy_grad: bool = False  # whether the entropy gets a gradient


def token_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """logps, entropy and correct, (N,) each: see `log_probs`."""
    trains_head = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or trains_head):
        return _Chunks(weight, bias, scoring).scores(hidden).unbind()
    if scoring.entropy_grad:
        function = Recomputed
    elif not trains_head:
        function = FrozenHead
    elif 0 < len(hidden) <= chunk_rows(hidden.device, len(weight)):
        function = OneChunk
    else:
        function = Recomputed
    return function.apply(hidden, weight, bias, scoring)


# --- a chunk ------------------------------------------------------------------------------------------------


class _Chunks:
    """The head's matrix products, one chunk of logits at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scoring: Scoring):
        self.scoring = scoring
        self.dtype = scoring.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)  # for the softmax, sums and results
        self.weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.product = None

    def logits(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield for each chunk its rows, hidden states (n, D) and logits (n, V); the next chunk overwrites
        the logits."""
        V = self.weight.shape[0]
        rows = max(1, min(chunk_rows(hidden.device, V), len(hidden)))
        buffer = hidden.new_empty(rows, V, dtype=self.wide)
        self.product = buffer
        if self.dtype != self.wide:
            multiple = of_device(ROW_MULTIPLE, hidden.device)
            stride = math.ceil(V / multiple) * multiple
            self.product = hidden.new_empty(rows, stride, dtype=self.dtype)[:, :V]
        in_float32 = gives_float32(self.weight, self.bias, self.dtype)  # one pass less, too
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            h = hidden[chunk].to(self.dtype)
            logits = buffer[: len(h)]
            product = self.product[: len(h)]
            if self.bias is not None:
                torch.addmm(self.bias, h, self.weight.t(), out=product)
            elif in_float32:
                torch.mm(h, self.weight.t(), out_dtype=self.wide, out=logits)
            else:
                torch.mm(h, self.weight.t(), out=product)
            if self.dtype != self.wide and not in_float32:
                logits.copy_(product)
            yield chunk, h, logits

    def softmax(
        self, chunk: slice, logits: Tensor, *, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`_softmax_` of the current logits, compiled where that pays and works: its scores and factor, and
        with gradient the rest of the derivative (n, V), in the dtype of the matrix products."""
        scoring = self.scoring
        tokens = scoring.tokens[chunk]
        if self.dtype != self.wide and logits.shape[1] >= of_device(COMPILED_FROM, logits.device):
            derivative = self.product[: len(logits)] if gradient else None
            normalize = self.dtype == torch.float16
            compiled = compiled_head.softmax(derivative, logits, tokens, scoring.transform, normalize)
            if compiled is not None:
                return *compiled, derivative
        scores, factor = _softmax_(logits, tokens, scoring, gradient)
        return scores, factor, self.rounded(logits) if gradient else None

    def rounded(self, gradient: Tensor) -> Tensor:
        """The gradient of the current logits in the dtype of the matrix products, in the buffer of their
        product."""
        if self.dtype == self.wide:
            return gradient
        return self.product[: len(gradient)].copy_(gradient)

    def backward(self, chunk: slice, h: Tensor, gradient: Tensor, factor: Tensor, gradients: tuple) -> None:
        """Send `factor[:, None] * gradient`, (n, V), through the matrix product, to the gradients of hidden
        (N, D), weight (V, D) and bias (V,), each None if it is not needed: sets the chunk of the first, adds
        to the others."""
        d_hidden, d_weight, d_bias = gradients
        if d_hidden is not None:
            torch.mul(torch.mm(gradient, self.weight), factor[:, None], out=d_hidden[chunk])
        if d_weight is not None:
            scaled = (h * factor[:, None]).to(self.dtype)
            if self.dtype == self.wide:
                d_weight.addmm_(gradient.t(), scaled)
            elif h.device.type == "cuda":  # added in float32: no product to round and to keep
                torch.addmm(d_weight, gradient.t(), scaled, out_dtype=self.wide, out=d_weight)
            else:
                size = max(1, of_device(BLOCK_ELEMENTS, h.device) // h.shape[1])
                for part, columns in zip(d_weight.split(size), gradient.split(size, dim=1), strict=True):
                    part.add_(torch.mm(columns.t(), scaled))  # chunks are accumulated in float32
        if d_bias is not None:
            d_bias.add_(factor.to(self.dtype) @ gradient)

    def empty_gradients(self, needed: Sequence[bool], hidden: Tensor) -> tuple:
        """Buffers for those that are needed of hidden, weight and bias; the last two are zeros."""
        d_hidden = torch.empty_like(hidden) if needed[0] else None
        d_weight = torch.zeros_like(self.weight, dtype=self.wide) if needed[1] else None
        d_bias = torch.zeros_like(self.bias, dtype=self.wide) if needed[2] else None
        return d_hidden, d_weight, d_bias

    def scores(self, hidden: Tensor, gradients: tuple | None = None, weights: Tensor | None = None) -> Tensor:
        """logps, entropy and correct, (3, N). gradients: those of `Σ weights · logps` are written there,
        weights (N,); None: 1 for each token."""
        scores = hidden.new_empty(3, len(hidden), dtype=self.wide)
        with_gradient = gradients is not None
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk, h, logits in self.logits(hidden):
                scores[:, chunk], factor, gradient = self.softmax(chunk, logits, gradient=with_gradient)
                if weights is not None:
                    factor = factor * weights[chunk]
                if with_gradient:
                    self.backward(chunk, h, gradient, factor, gradients)
        return scores


def _blocks(logits: Tensor) -> list[slice]:
    """Rows in blocks small enough to stay in a CPU's cache through all passes of the softmax."""
    size = max(1, of_device(BLOCK_ELEMENTS, logits.device) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _softmax_(logits: Tensor, tokens: Tensor, scoring: Scoring, gradient: bool) -> tuple[Tensor, Tensor]:
    """The scores of tokens (n,) from a chunk of raw logits (n, V), which it overwrites.

    Returns logps, entropy and correct (3, n), the last two zero without stats, and factor (n,). Afterwards,
    with gradient, the derivative of logps by the logits is `factor[:, None] * logits`; for float16, no logit
    is above 1.
    """
    scores = logits.new_zeros(3, len(logits))
    factor = logits.new_empty(len(logits))
    for rows in _blocks(logits):
        block = logits[rows]
        index = tokens[rows, None]
        derivative = apply_(scoring.transform, block, gradient)
        block.sub_(block.amax(-1, keepdim=True))
        chosen = block.gather(-1, index)
        exponentials = block.exp() if scoring.stats else block.exp_()
        total = exponentials.sum(-1, keepdim=True)
        log_total = total.log()
        scores[0, rows] = (chosen - log_total)[:, 0]
        if scoring.stats:
            entropy = log_total - block.mul_(exponentials).sum(-1, keepdim=True) / total
            scores[1, rows] = entropy[:, 0]
            scores[2, rows] = (chosen >= 0)[:, 0].to(scores.dtype)
        if gradient:  # exp - denominator at the token, exp elsewhere
            if scoring.stats:
                block.copy_(exponentials)
            if scoring.dtype == torch.float16:
                block.div_(total)
                total.fill_(1)
            block.scatter_add_(-1, index, -total)
            if derivative is not None:
                block.mul_(derivative)
            factor[rows] = (-scoring.transform.scale / total)[:, 0]
    return scores, factor


def _entropy_gradient_(
    logits: Tensor, tokens: Tensor, transform: LogitTransform, d_logps: Tensor, d_entropy: Tensor
) -> None:
    """Overwrite logits (n, V) with the gradient of `Σ d_logps · logps + d_entropy · entropy`, divided by the
    scale."""
    for rows in _blocks(logits):
        block = logits[rows]
        index = tokens[rows, None]
        by_logp = d_logps[rows, None]
        by_entropy = d_entropy[rows, None]
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
    def forward(ctx: Any, hidden, weight, bias, weights, scoring):
        chunks = _Chunks(weight, bias, scoring)
        ctx.gradients = chunks.empty_gradients(ctx.needs_input_grad, hidden)
        logps, entropy, correct = chunks.scores(hidden, ctx.gradients, -weights)
        ctx.mark_non_differentiable(logps, entropy, correct)
        return -(weights * logps).sum(), logps, entropy, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss of weighted_nll can be sent backward only once: its gradients are scaled in place"
            )
        gradients = [None if g is None else g.mul_(d_loss) for g in ctx.gradients]
        ctx.gradients = None
        return *gradients, None, None


class FrozenHead(torch.autograd.Function):
    """`log_probs` with a head that is not trained. The backward pass receives one number per token, a factor of
    its row in the gradient of the hidden states, so the forward pass computes everything else."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, scoring):
        chunks = _Chunks(weight, bias, scoring)
        ctx.d_hidden = torch.empty_like(hidden)
        logps, entropy, correct = chunks.scores(hidden, (ctx.d_hidden, None, None))
        ctx.mark_non_differentiable(entropy, correct)
        return logps, entropy, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logps, *_):
        d_hidden = ctx.d_hidden * d_logps[:, None]
        return d_hidden.to(ctx.d_hidden.dtype), None, None, None


class OneChunk(torch.autograd.Function):
    """`log_probs` with a head that is trained, at positions whose logits are a single chunk: its derivative is
    kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, scoring):
        chunks = _Chunks(weight, bias, scoring)
        with torch.autocast(hidden.device.type, enabled=False):
            [(chunk, _, logits)] = chunks.logits(hidden)
            scores, ctx.factor, ctx.gradient = chunks.softmax(chunk, logits, gradient=True)
        ctx.scoring = scoring
        ctx.save_for_backward(hidden, weight, bias)
        logps, entropy, correct = scores
        ctx.mark_non_differentiable(entropy, correct)
        return logps, entropy, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logps, *_):
        hidden, weight, bias = ctx.saved_tensors
        chunks = _Chunks(weight, bias, ctx.scoring)
        gradients = chunks.empty_gradients(ctx.needs_input_grad, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            h = hidden.to(chunks.dtype)
            chunks.backward(slice(None), h, ctx.gradient, ctx.factor * d_logps, gradients)
        return *gradients, None


class Recomputed(torch.autograd.Function):
    """`log_probs` in any other case: the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, scoring):
        ctx.scoring = scoring
        ctx.save_for_backward(hidden, weight, bias)
        logps, entropy, correct = _Chunks(weight, bias, scoring).scores(hidden)
        if scoring.entropy_grad:
            ctx.mark_non_differentiable(correct)
        else:
            ctx.mark_non_differentiable(entropy, correct)
        return logps, entropy, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logps, d_entropy, _):
        hidden, weight, bias = ctx.saved_tensors
        scoring = ctx.scoring
        chunks = _Chunks(weight, bias, scoring._replace(stats=False))
        gradients = chunks.empty_gradients(ctx.needs_input_grad, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk, h, logits in chunks.logits(hidden):
                by_logp = d_logps[chunk]
                if scoring.entropy_grad:
                    tokens = scoring.tokens[chunk]
                    _entropy_gradient_(logits, tokens, scoring.transform, by_logp, d_entropy[chunk])
                    gradient = chunks.rounded(logits)
                    factor = torch.full_like(by_logp, scoring.transform.scale)
                else:
                    _, factor, gradient = chunks.softmax(chunk, logits, gradient=True)
                    factor = factor * by_logp
                chunks.backward(chunk, h, gradient, factor, gradients)
        return *gradients, None
