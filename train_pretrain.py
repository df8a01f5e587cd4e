"""Pretraining: text -> base model.

Over the N scored tokens of a window (all micro-batches of all processes that make one optimizer step):

    loss = -1/N · Σ_t log p(token_t | token_<t)

Documents are tokenised once, each with an end-of-text token at its end, and become rows of `max_length`
tokens: cut from one long stream ("wrapped": a row may begin in the middle of a document), or packed whole
("bfd", best-fit decreasing: a document never sees its neighbours).

    python train_pretrain.py                                       # the embedded demo, ~2 minutes on a CPU
    python train_pretrain.py --dataset_name corpus.txt --tokenizer_name gpt2 --hidden_size 768 --num_layers 12
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_pretrain.py --config my_run.yaml

Shapes: T tokens of the flat row, S sequences in it. `flat_batch` (common/collators.py) says what a batch
holds (neighbours may share a beginning: `split_row`), `Output` (common/model/flat_model.py) what the model
returns.
"""

from dataclasses import dataclass
import math
from typing import Literal

from common.args import CommonArgs, arg
from common.collators import Window, Windows
from common.command_line import launch
from common.data import Row, Tokenizer, as_text, chunk, load_data, pack
from common.data.tokenizer import train_tokenizer
from common.errors import UserError
from common.evaluate import bytes_per_token, complete_prompts, evaluate_nll, load_eval_prompts
from common.model import (
    llama_config,
    load_config,
    load_model,
    load_tokenizer,
    make_optimizer,
    schedule,
    set_lr,
)
from common.run import Run

# For `needs` of common/args.py: the flags of a new model, or tokenizer, act only if none of these is given.
NEW = "no model_name_or_path, no config_name"
NEW_TOKENIZER = f"no tokenizer_name, {NEW}"


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/pretrain", help="folder for everything that the run writes")
    learning_rate: float = arg(6e-4, help="peak learning rate of AdamW")
    weight_decay: float = arg(0.1, help="on matrices only, not on norms and biases")
    adam_beta2: float = arg(0.95, help="AdamW")
    per_device_train_batch_size: int = arg(8, help="rows of max_length tokens per process and micro-batch")
    dataset_text_field: str = arg("text", help="column of the documents")
    max_length: int = arg(1024, help="tokens of a row", within="[2, 1e8]")
    max_tokens_per_batch: int = arg(
        0, help="tokens of a micro-batch, instead of a batch size; 0: off", within="[0, 1e9]"
    )
    packing_strategy: Literal["wrapped", "bfd"] = arg(
        "wrapped", help="wrapped: one stream, cut into rows; bfd: whole documents, packed"
    )
    vocab_size: int = arg(
        8192, help="of a new byte-level BPE tokenizer", within="[1, 1e7]", needs=NEW_TOKENIZER
    )
    # --model_name_or_path continues training a model; otherwise a new one, from --config_name or these sizes
    # (Llama type)
    config_name: str | None = arg(None, help="Hub name or folder with a config.json", is_path=True)
    hidden_size: int = arg(512, help="hidden size of a new model", within="[1, 1e6]", needs=NEW)
    num_layers: int = arg(8, help="transformer blocks", within="[1, 1e4]", needs=NEW)
    num_heads: int = arg(8, help="attention heads", within="[1, 1e5]", needs=NEW)
    num_kv_heads: int | None = arg(
        None, help="key/value heads; unset: as many as heads", within="[1, 1e5]", needs=NEW
    )
    intermediate_size: int | None = arg(
        None, help="of the MLP; unset: 8/3 of hidden_size", within="[1, 1e7]", needs=NEW
    )
    num_experts: int = arg(
        0, help="experts in place of each MLP (Mixtral type); 0: none", within="0 or [2, 1e4]"
    )
    num_experts_per_tok: int = arg(
        2, help="experts that a token is routed to", within="[1, 1e4]", needs="num_experts"
    )
    moe_intermediate_size: int | None = arg(
        None,
        help="width of an expert; unset: a token's experts together as the MLP",
        within="[1, 1e7]",
        needs="num_experts",
    )
    initializer_range: float = arg(
        0.02, help="standard deviation of the initial weights", within="(0, 10]", needs=NEW
    )
    tie_word_embeddings: bool = arg(
        True, help="one matrix for the input embedding and the LM head", needs=NEW
    )

    def __post_init__(self) -> None:
        if self.use_peft and not self.model_name_or_path:
            raise UserError("--use_peft adapts an existing model: name it with --model_name_or_path")
        if self.num_experts and (self.model_name_or_path or self.config_name):
            raise UserError(
                "--num_experts is for a new model: not with --model_name_or_path or --config_name"
            )
        if self.num_experts and self.router_aux_loss_coef is None:
            self.router_aux_loss_coef = 0.01  # otherwise a new model soon routes all tokens to a few experts


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> str:
    """The document of a dataset row. (Or a list of one tokenised sequence, with fields of your own, as in
    train_sft.py; where rows hold several documents, n numbers each.) A row that raises BadRow is left out,
    counted and reported."""
    return as_text(row, args.dataset_text_field)


def new_model_config(args: Args, tokenizer: Tokenizer):
    """The configuration of a new model, unless one is named."""
    if args.config_name:
        return load_config(args.config_name, tokenizer)
    return llama_config(
        tokenizer,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        intermediate_size=args.intermediate_size,
        max_position_embeddings=max(args.max_length, 512),
        initializer_range=args.initializer_range,
        tie_word_embeddings=args.tie_word_embeddings,
        num_experts=args.num_experts,
        num_experts_per_tok=args.num_experts_per_tok,
        moe_intermediate_size=args.moe_intermediate_size,
    )


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer_source = run.resume_from or args.tokenizer_name or args.model_name_or_path or args.config_name
    if tokenizer_source:
        tokenizer = load_tokenizer(args, tokenizer_source)
    else:
        tokenizer = train_tokenizer(args, accelerator, args.vocab_size, args.dataset_text_field)
    train, held_out = load_data(args, accelerator, encode, tokenizer)

    def first_words(row: Row) -> dict[str, str]:
        """The start of a document, which evaluations continue."""
        text = as_text(row, args.dataset_text_field)
        return {"prompt": " ".join(text[:100].split()[:8])}

    prompts = load_eval_prompts(args, accelerator, tokenizer, train, held_out, prompt_of=first_words)
    # joined documents are cut as one text; otherwise only documents of more than max_length tokens are cut
    is_joined = args.packing_strategy == "wrapped"
    train = chunk(train, args.max_length, across=is_joined)
    held_out = chunk(held_out, args.max_length, across=is_joined)
    if not is_joined:
        train = pack(train, args.max_length)
        held_out = pack(held_out, args.max_length)
    # windows[step]: window of an update
    windows = Windows(args, accelerator, train, max_tokens=args.max_tokens_per_batch)
    token_bytes = bytes_per_token(held_out, tokenizer)

    # --- model ----------------------------------------------------------------------------------------------
    config = None if args.model_name_or_path else new_model_config(args, tokenizer)
    # LoRA, recomputation, compilation as the flags say
    model = load_model(args, accelerator, tokenizer, run.resume_from, config)
    optimizer = make_optimizer(args, model)
    lr_at = schedule(args, len(windows))
    run.describe(model, tokenizer, windows, held_out, example_name="document")
    if args.dry_run:
        return
    model, optimizer = run.prepare(model, optimizer)  # Accelerate's prepare; then resumes the run

    # --- the gradient of a window ---------------------------------------------------------------------------
    def gradients(window: Window) -> None:
        """A function, so that a window can be repeated in smaller micro-batches when memory runs out."""
        N = window.total("loss_mask")  # over all processes
        for batch in window:  # micro-batches of this process
            with accelerator.accumulate(model):
                mask = batch["loss_mask"]  # (T,)
                out = model(batch, nll_weights=mask / N)
                loss = out.nll  # the sum -Σ_t m_t/N · log p(token_t)   <- the algorithm
                window.backward(loss + out.aux_loss)  # accelerator.backward of a sum over the window
            run.metrics.add(mask, loss=-out.logps, mean_token_accuracy=out.correct, entropy=out.entropy)

    # --- loop -----------------------------------------------------------------------------------------------
    # step: updates done so far; at the last one it only evaluates and ends
    for step in run.steps(last=len(windows)):
        if run.eval_due(step):
            values = evaluate_nll(args, accelerator, model, held_out)
            if values:
                values["eval_bits_per_byte"] = values["eval_loss"] / math.log(2) / token_bytes
            scores, samples = complete_prompts(args, accelerator, model, tokenizer, prompts)
            run.log_eval(step, values | scores, samples)
        # saves if it is due; true after the last step or by early stopping; at a signal the run exits here
        if run.checkpoint(step):
            break

        window = windows[step]
        set_lr(optimizer, lr_at(step))
        # out of memory: from the start, in smaller micro-batches, on all processes
        run.retry_smaller(gradients, window)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        if run.is_finite(grad_norm, window):  # otherwise reported, counted, and its rows kept in bad_batches/
            optimizer.step()
        optimizer.zero_grad()
        run.log(step + 1, window, grad_norm=grad_norm, learning_rate=lr_at(step))

    run.finish(try_next="python train_sft.py")


if __name__ == "__main__":
    launch(main, Args, demo="data/configs/pretrain.yaml")
