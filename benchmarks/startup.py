"""From the start of the process to the end of the first step.

    python benchmarks/startup.py [--rounds 5]

SFT on the tiny model and 80 chats, tokenised anew: nothing is cached.
"""

import shutil

from compare import INPUTS, WORK, alternate, arguments, ours, peer, ratios, save, shown, spread

STEPS = 1
OURS, TRL = "ours, first step", "TRL, first step"


def main() -> None:
    args = arguments(__doc__, rounds=5)
    rows = {}
    for name in ("chats.jsonl", "chats.ordered.jsonl"):  # the same 80 rows
        rows[name] = WORK / name
        rows[name].write_text("".join((INPUTS / name).read_text().splitlines(keepends=True)[:80]))
    words = ["--model_name_or_path", INPUTS / "tiny", "--dataset_name", rows["chats.jsonl"]]
    first_step = ours("train_sft.py", *words, "--max_steps", STEPS)
    cache = WORK / "startup_cache"

    def anew() -> dict:
        shutil.rmtree(cache, ignore_errors=True)
        return first_step(cache)

    trl = peer("trl_sft", "tiny", str(rows["chats.ordered.jsonl"]), STEPS, 8)
    seconds = {}
    for name, results in alternate({OURS: anew, TRL: trl}, args.rounds).items():
        seconds[name] = [result["to_first_step_s"] for result in results]
    share = ratios(seconds[OURS], seconds[TRL])
    sides = {OURS: {"seconds": spread(seconds[OURS])}, TRL: {"seconds": spread(seconds[TRL]), "share": share}}
    table = {"title": "start-up", "rounds": args.rounds, "sides": sides}
    lines = [
        f"**start-up**, medians of {args.rounds} alternating rounds",
        "",
        "| what | seconds | ours takes |",
        "|---|---|---|",
        f"| {OURS} | {sides[OURS]['seconds']['median']:.2f} | |",
        f"| {TRL} | {sides[TRL]['seconds']['median']:.2f} | {shown(share)} |",
    ]
    save("startup", [table | {"markdown": "\n".join(lines) + "\n"}])


if __name__ == "__main__":
    main()
