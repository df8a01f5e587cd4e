"""nanoGPT's model and training step with a clock, on the rows of shakespeare.py.

    python benchmarks/peer_nanogpt.py result.json spec.json     # called by shakespeare.py

spec: as of peers.py; "model": a checkout of nanoGPT, of which `model.py` is used as it is: the model, its
initial weights, its optimizer. train.py cannot be imported, and draws its windows at random; what it does in
a step is written out here. With "weights", a folder of transformers' GPT-2, it starts from those, and has
biases as they do. Beside the clock's figures the result has "evaluations", [step, loss of all held-out rows].
"""

from contextlib import nullcontext
import json
import math
from pathlib import Path
import sys

sys.path.insert(0, str(Path(__file__).resolve().parent))

from clock import Clock  # noqa: E402
import numpy as np  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
import torch  # noqa: E402

IGNORED = -1  # as a target, by nanoGPT's loss; pads the last row


def inputs_and_targets(rows: np.ndarray, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """rows (B, T) of token ids -> inputs (B, T) and targets (B, T): the next token, IGNORED at the end of a
    row."""
    tokens = torch.from_numpy(rows).to(device)
    targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], dim=1)
    return tokens.clamp(min=0), targets


@torch.no_grad()
def loss_of(model: torch.nn.Module, rows: np.ndarray, device: str) -> float:
    """Nats per target over all rows."""
    model.eval()
    total = count = 0.0
    for first in range(0, len(rows), 16):
        x, y = inputs_and_targets(rows[first : first + 16], device)
        scored = (y != IGNORED).sum().item()
        total, count = total + model(x, y)[1].item() * scored, count + scored
    model.train()
    return total / count


@torch.no_grad()
def load_gpt2(model: torch.nn.Module, folder: str) -> None:
    weights = load_file(Path(folder) / "model.safetensors")
    for name, parameter in model.named_parameters():
        transposed = parameter.dim() == 2 and ".h." in name  # Conv1D
        parameter.copy_(weights[name].T if transposed else weights[name])


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def main() -> None:
    spec, clock = json.loads(Path(sys.argv[2]).read_text()), Clock()
    options, steps = spec["options"], spec["steps"]
    sys.path.insert(0, spec["model"])
    from model import GPT, GPTConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()
    rows, held_out = np.load(spec["rows"]), np.load(options["held_out"])  # (steps · batch, T), (V, T)
    torch.manual_seed(options["seed"])
    model = GPT(GPTConfig(bias=bool(options["weights"]), **options["config"])).to(device)
    if options["weights"]:
        load_gpt2(model, options["weights"])
    optimizer = model.configure_optimizers(0.1, options["learning_rate"], (0.9, 0.99), device)
    # its README's command for a CPU has --compile=False
    step_model = torch.compile(model) if device == "cuda" else model
    evaluations = clock.result["evaluations"] = []

    clock.begin()
    for step in range(steps):
        if options["eval_steps"] and step % options["eval_steps"] == 0:
            with precision:
                evaluations.append([step, loss_of(model, held_out, device)])
            clock.write(sys.argv[1])  # for one who ends it before its end
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, options["warmup"], options["learning_rate"])
        x, y = inputs_and_targets(rows[step * spec["batch"] : (step + 1) * spec["batch"]], device)
        with precision:
            loss = step_model(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.result["loss"].append(loss.item())
        print(f"iter {step}: loss {clock.result['loss'][-1]:.4f}")
        clock.step()
    if options["eval_steps"]:
        with precision:
            evaluations.append([steps, loss_of(model, held_out, device)])
    clock.write(sys.argv[1])


if __name__ == "__main__":
    main()
