"""The model of a run in a few words, printed at its start and kept in dataset.json."""

import hashlib
from typing import Any

from common.args import CommonArgs
from common.data.types import Tokenizer
from common.model.flat_model import FlatModel, base_lm, count_parameters, sizes
from common.model.save import base_dtype, final_dtype

import torch
from accelerate import Accelerator


def load_report(args: CommonArgs, accelerator: Accelerator, model: FlatModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Class, parameters, precision, calling convention, parts left out, adapted or frozen, chat template, stop tokens."""
    lm = base_lm(model.lm)
    trained, parameters = count_parameters(model)
    adapted = sorted({name.split(".")[-1] for name, part in model.lm.named_modules() if hasattr(part, "lora_A")})
    text = {id(p) for part in (lm.get_decoder(), lm.get_output_embeddings()) for p in part.parameters()}
    beside = sum(sizes(p for p in lm.parameters() if id(p) not in text))
    quantised = sum(sizes(p for p in lm.parameters() if p.dtype in (torch.uint8, torch.int8)))
    template, names = tokenizer.chat_template, tokenizer.convert_ids_to_tokens(model.stop_ids)
    return {
        "class": type(lm).__name__,
        "parameters": {"trained": trained, "all": parameters},
        "quantised": quantised,
        "dtype": {
            "base": base_dtype(model),
            "weights": args.dtype,
            "autocast": accelerator.mixed_precision,
            "export": final_dtype(args, base_dtype(model)),
        },
        "called_on": "padded batches" if model.padded else "flat rows",
        "adapted_layers": adapted,
        "frozen_beside_text": beside if lm.config.get_text_config() is not lm.config else 0,
        "left_out": getattr(lm, "left_out", ""),
        "embedding_rows": lm.get_input_embeddings().weight.shape[0],
        "chat_template": args.chat_template or ("the tokenizer's" if template else None),
        "chat_template_hash": hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else None,
        "stop_tokens": [str(token or i) for i, token in zip(model.stop_ids, names, strict=True)],
    }


def in_a_line(report: dict[str, Any]) -> str:
    """The report as one line, leaving out what is as usual."""
    trained, every = report["parameters"]["trained"], report["parameters"]["all"]
    precision = report["dtype"]["weights"]
    if report["dtype"]["autocast"] != "no":
        precision += f" with {report['dtype']['autocast']} autocast"
    if report["dtype"]["export"] != report["dtype"]["weights"]:
        precision += f", exported in {report['dtype']['export']}"
    if report["quantised"]:
        precision += f", {report['quantised']:,} parameters quantised"
    parts = [f"{report['class']}, {trained:,} of {every:,} parameters trained", precision, report["called_on"]]
    if report["adapted_layers"]:
        parts.append(f"adapters on {', '.join(report['adapted_layers'])}")
    if report["frozen_beside_text"]:
        parts.append(f"{report['frozen_beside_text']:,} parameters beside the text model frozen, exported as they are")
    if report["left_out"]:
        parts.append(f"left out: {report['left_out']}")
    parts.append(f"answers end with {' or '.join(report['stop_tokens'])}")
    return f"model: {'; '.join(parts)}"
