"""How often tools.trial calls an edit better that changes nothing, and what it finds: simulated trials.

python -m benchmarks.trials    # 10 seconds
"""

import math
from statistics import NormalDist

import numpy as np

from tools.trial_statistics import over_seeds_and_prompts, p_value


def simulate(
    random: np.random.Generator,
    seeds: int,
    prompts: int = 200,
    rate: float = 0.55,
    effect: float = 0.0,
    spread: float = 0.04,
) -> np.ndarray:
    """Differences (S, P) of scores of 0 or 1, as of the demo.

    rate: of right answers of the parent. effect: by how much the copy's rate is above it. spread: standard
    deviation of a run's rate over seeds. Prompts are easy or hard for both; the same seed makes no two runs
    alike.
    """
    rates = [rate, rate + effect]
    scores = []
    hardness = random.normal(size=prompts)
    for mean in rates:
        rates_of_runs = np.clip(mean + spread * random.normal(size=seeds), 0.001, 0.999)
        # A prompt is solved if hardness + luck, a normal variable of variance 2, is below the run's threshold.
        thresholds = np.array([NormalDist(0, math.sqrt(2)).inv_cdf(run) for run in rates_of_runs])
        luck = random.normal(size=(seeds, prompts))
        scores.append((hardness[None, :] + luck < thresholds[:, None]).astype(float))
    return scores[1] - scores[0]


def main() -> None:
    random = np.random.default_rng(0)
    trials, effects = 1000, (0.0, 0.03, 0.05, 0.08, 0.1, 0.15)
    print("200 prompts, 55 % right, runs of one script 4 points apart: how often a copy is called better")
    print("seeds  " + "".join(f"{f'+{100 * effect:.0f} points':>12}" for effect in effects))
    for seeds in (2, 3, 5, 10):
        shares = []
        for effect in effects:
            better = 0
            for _ in range(trials):
                estimate = over_seeds_and_prompts(simulate(random, seeds, effect=effect))
                p = p_value(estimate)
                better += p is not None and p < 0.05 and estimate.mean > 0
            shares.append(better / trials)
        print(f"{seeds:5}  " + "".join(f"{100 * share:10.1f} %" for share in shares))


if __name__ == "__main__":
    main()
