"""SFT, DPO and pretraining beside LLaMA-Factory, LitGPT, torchtune and minimind's loop, on the CPU.

    python benchmarks/others.py --python llamafactory=PYTHON litgpt=PYTHON torchtune=PYTHON
        [--rounds 2] [--quick] [--only sft dpo pretrain sft20m compiled]

PYTHON: the interpreter of an environment in which that one is installed; their versions of other libraries
exclude each other. One that is not named is left out. Without --only: sft, dpo, pretrain. As in sft.py,
dpo.py and pretrain.py all sides have the same weights, rows, order, batch and learning rate, float32, one
thread, no evaluation, no saving. LLaMA-Factory's defaults include gradient checkpointing; its packing lets
chats of a row see each other, its neat packing does not. Its padding is to multiples of 8. torchtune's
chunked loss is its default. How each is called: peer_*.py.

Start-up is from the start of the process to the end of the first step of SFT, which is of 8 chats, nothing
cached. Ours and LLaMA-Factory tokenise all 192 chats before it, the bare loop what it needs; the others are
given tokens.
"""

from collections.abc import Callable
import json
from pathlib import Path
import shutil
import subprocess
import sys
from typing import Any

from compare import INPUTS, WORK, Result, arguments, compare, markdown, ours, peer, save

BATCH, LENGTH = 8, 1024
INSTALL = {  # pip's words, in an environment of its own; torch as here
    "llamafactory": "llamafactory==0.9.5 torch==2.13.0   # then, if built for CUDA: pip uninstall torchvision torchaudio",
    "litgpt": "litgpt==0.5.13 torch==2.13.0 transformers",
    "torchtune": "torchtune==0.6.1 torch==2.13.0 torchao==0.10.0",
}
PACKAGES = ("llamafactory", "litgpt", "torchtune", "torch", "transformers", "trl", "torchao", "lightning")
Side = Callable[[], Result]


def version_of(python: str) -> str:
    code = f"""
import importlib.metadata as m
found = {{d.metadata["Name"].lower(): d.version for d in m.distributions()}}
print(", ".join(f"{{name}} {{found[name]}}" for name in {PACKAGES} if name in found))"""
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class Peers:
    def __init__(self, pythons: dict[str, str]):
        self.pythons = pythons

    def __call__(
        self, name: str, kind: str, model: str, rows: str, steps: int, batch: int = BATCH, **options: Any
    ) -> Side:
        python = self.pythons.get(name, sys.executable)
        return peer(kind, model, rows, steps, batch, script=f"peer_{name}.py", python=python, **options)

    def there(self, sides: dict[str, Side | None]) -> dict[str, Side]:
        """Without those of a peer that has no interpreter. A side begins with the peer's name."""
        names = {"LLaMA-Factory": "llamafactory", "LitGPT": "litgpt", "torchtune": "torchtune"}
        needs = {
            name: next((n for word, n in names.items() if name.startswith(word)), None) for name in sides
        }
        return {
            name: side for name, side in sides.items() if needs[name] is None or needs[name] in self.pythons
        }


def uncached(side: Callable[[Path], Result]) -> Side:
    def inner() -> Result:
        shutil.rmtree(WORK / "others_cache", ignore_errors=True)
        return side(WORK / "others_cache")

    return inner


def only_there(names: tuple[str, ...], sides: dict[str, Side]) -> tuple[str, ...]:
    return tuple(name for name in names if name in sides)


def sft(
    peers: Peers, model: str, title: str, rounds: int, steps: int, packs: int, own: int
) -> dict[str, Any]:
    """steps: of the sides that pad; packs: of those that pack; own: ours."""
    lengths = json.loads((INPUTS / "chats.lengths.json").read_text())
    in_order = [sum(lengths[i : i + BATCH]) for i in range(0, len(lengths), BATCH)]
    tokens, text, fast = "chats.tokens.json", "chats.ordered.jsonl", {"disable_gradient_checkpointing": True}
    sides = peers.there({
        "ours": uncached(ours(
            "train_sft.py", "--model_name_or_path", INPUTS / model, "--dataset_name", INPUTS / "chats.jsonl",
            "--max_length", LENGTH, "--per_device_train_batch_size", BATCH, "--max_steps", own,
        )),
        "LLaMA-Factory defaults": peers("llamafactory", "sft", model, text, steps),
        "LLaMA-Factory without checkpointing": peers("llamafactory", "sft", model, text, steps, **fast),
        "LLaMA-Factory, packing": peers("llamafactory", "sft", model, text, packs, 1, packing=True, **fast),
        "LLaMA-Factory, neat packing": peers("llamafactory", "sft", model, text, packs, 1, neat_packing=True, **fast),
        "LitGPT finetune_full": peers("litgpt", "sft", model, tokens, steps),
        "torchtune full_finetune_single_device": peers("torchtune", "sft", model, tokens, steps),
        "torchtune, packed": peers("torchtune", "sft", model, tokens, packs, 1, packed=LENGTH),
        "minimind's loop": peers("minimind", "sft", model, tokens, steps),
        "bare loop, no mask": peer("bare_sft", model, text, steps, BATCH, mask=False),
    })  # fmt: skip
    same = (
        "LLaMA-Factory defaults", "LLaMA-Factory without checkpointing", "LitGPT finetune_full",
        "torchtune full_finetune_single_device", "minimind's loop", "bare loop, no mask",
    )  # fmt: skip
    return compare(
        title,
        "useful tokens/s",
        sides,
        rounds,
        amounts=lambda side, found: [b["useful"] for b in found["batches"]] if "pack" in side else in_order,
        same_maths=only_there(same, sides),
        best_of=tuple(name for name in sides if name != "ours"),
    )


def dpo(peers: Peers, rounds: int, steps: int) -> dict[str, Any]:
    text = "pairs.ordered.jsonl"
    sides = peers.there({
        "ours": uncached(ours(
            "train_dpo.py", "--model_name_or_path", INPUTS / "tiny", "--dataset_name", INPUTS / "pairs.jsonl",
            "--max_length", LENGTH, "--per_device_train_batch_size", BATCH, "--max_steps", steps, "--beta", 0.1,
        )),
        "LLaMA-Factory defaults": peers("llamafactory", "dpo", "tiny", text, steps),
        "LLaMA-Factory without checkpointing": peers(
            "llamafactory", "dpo", "tiny", text, steps, disable_gradient_checkpointing=True
        ),
        "torchtune full_dpo_distributed": peers("torchtune", "dpo", "tiny", "pairs.tokens.json", steps),
        "minimind's loop": peers("minimind", "dpo", "tiny", "pairs.tokens.json", steps),
    })  # fmt: skip
    others = tuple(name for name in sides if name != "ours")
    return compare(
        "DPO, 1.3M parameters, other peers", "pairs/s", sides, rounds,
        amounts=lambda side, found: [BATCH] * steps, same_maths=others, best_of=others,
    )  # fmt: skip


def pretrain(peers: Peers, rounds: int, steps: int, compiled: bool) -> dict[str, Any]:
    """compiled: ours beside LitGPT as it is by default, which compiles its model."""
    rows, length = "text512.ordered.npy", 512
    plain = {"TORCHDYNAMO_DISABLE": "1"}
    fast = {"disable_gradient_checkpointing": True, "cutoff_len": length}
    sides = {
        "ours": uncached(ours(
            "train_pretrain.py", "--model_name_or_path", INPUTS / "tiny", "--dataset_name", INPUTS / "text.jsonl",
            "--max_length", length, "--per_device_train_batch_size", BATCH, "--max_steps", steps,
        )),
        "LLaMA-Factory defaults": peers("llamafactory", "pt", "tiny", rows, steps, cutoff_len=length),
        "LLaMA-Factory without checkpointing": peers("llamafactory", "pt", "tiny", rows, steps, **fast),
        "LitGPT pretrain, not compiled": peers("litgpt", "pretrain", "tiny", rows, steps, env=plain),
        "LitGPT pretrain, compiled": peers("litgpt", "pretrain", "tiny", rows, steps),
        "torchtune full_finetune_single_device": peers("torchtune", "pretrain", "tiny", rows, steps),
        "minimind's loop": peers("minimind", "pretrain", "tiny", rows, steps),
    }  # fmt: skip
    if compiled:
        sides = {name: sides[name] for name in ("ours", "LitGPT pretrain, compiled")}
    else:
        del sides["LitGPT pretrain, compiled"]
    sides = peers.there(sides)
    others = tuple(name for name in sides if name != "ours")
    which = "LitGPT compiled" if compiled else "other peers"
    return compare(
        f"pretrain, 1.3M parameters, full rows of 512, {which}", "tokens/s", sides, rounds,
        amounts=lambda side, found: [BATCH * length] * steps, same_maths=others, best_of=others,
    )  # fmt: skip


def startup(table: dict[str, Any]) -> str:
    """Of a table of `compare`, the start-up as Markdown."""
    lines = ["**start-up, other peers**, process start to the end of the first step of SFT", ""]
    lines += ["| side | seconds | ours takes |", "|---|---|---|"]
    first = {name: entry["to_first_step_s"]["median"] for name, entry in table["sides"].items()}
    for name, seconds in first.items():
        share = "" if name == "ours" else f"{first['ours'] / seconds:.2f}×"
        lines.append(f"| {name} | {seconds:.2f} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = arguments(
        __doc__,
        rounds=2,
        python={"nargs": "+", "default": [], "metavar": "PEER=PYTHON", "help": "their interpreters"},
        quick={"action": "store_true", "help": "3 steps of each, to see that all run; nothing is written"},
    )
    pythons = dict(word.split("=", 1) for word in args.python)
    if unknown := set(pythons) - set(INSTALL):
        raise SystemExit(f"--python {unknown.pop()}=...: expected {', '.join(INSTALL)}")
    for name in INSTALL.keys() - pythons.keys():
        print(
            f"{name} is left out: python -m venv {name} && {name}/bin/pip install {INSTALL[name]}",
            file=sys.stderr,
        )
    peers = Peers(pythons)
    versions = "; ".join(version_of(python) for python in pythons.values())

    def steps(usual: int) -> int:
        return 3 if args.quick else usual

    small, large = "SFT, 1.3M parameters, other peers", "SFT, 20M parameters, other peers"
    tables: dict[str, Callable[[], dict[str, Any]]] = {
        "sft": lambda: sft(peers, "tiny", small, args.rounds, steps=steps(7), packs=steps(36), own=steps(24)),
        "dpo": lambda: dpo(peers, args.rounds, steps(4)),
        "pretrain": lambda: pretrain(peers, args.rounds, steps(7), compiled=False),
        "sft20m": lambda: sft(peers, "20m", large, args.rounds, steps=steps(5), packs=steps(8), own=steps(5)),
        "compiled": lambda: pretrain(peers, args.rounds, steps(7), compiled=True),
    }
    failed = []
    for name in args.only or ("sft", "dpo", "pretrain"):
        try:
            table = tables[name]()
        except SystemExit as problem:  # the other tables are no worse for it
            failed.append(f"{name}: {problem}")
            continue
        table |= {
            "peers": versions,
            "markdown": f"{markdown(table)}\n{f'({versions})' if versions else ''}\n",
        }
        if name == "sft":
            table["markdown"] += "\n" + startup(table)
        if args.quick:
            print(table["markdown"])
        else:
            save("others", [table], ["one after the other"])
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
