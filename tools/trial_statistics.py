"""The statistics of tools.trial: is a mean difference more than luck, and how many seeds would show it?

Differences are between two runs with one seed: over seeds (S,), or over seeds and prompts (S, P). An
`Estimate` is their mean with its standard error and degrees of freedom; from it follow, by Student's t,
`p_value`, `interval` and `seeds_needed`. benchmarks/trials.py simulates how often they err, and what they find.

Sources: Student (1908) for one difference a seed. For scored prompts, seeds and prompts are both samples of
something larger, crossed with each other: the variance of the mean has a part of each (Clark 1973, "The
language-as-fixed-effect fallacy"), estimated from mean squares (Cornfield & Tukey 1956), with the degrees of
freedom of Satterthwaite (1946). Several comparisons: Holm (1979). The distribution of t: the continued
fraction of the incomplete beta function (DLMF 8.17.22), evaluated as by Lentz (1976).
"""

import bisect
from collections.abc import Iterable
import functools
import math
from statistics import NormalDist
from typing import NamedTuple

from common.run.parts.regression import fall_p_value
import numpy as np

POWER = 0.8  # seeds_needed: how often so many seeds would tell the difference apart
MOST_SEEDS = 1000
ROUNDING = 1e-6  # of a difference


class Estimate(NamedTuple):
    """A mean difference over seeds, or over seeds and prompts."""

    mean: float
    error: float  # its standard error
    df: float  # degrees of freedom of the error
    seeds: int
    of_seeds: float = 0.0  # the part of the error's square that falls as 1 / seeds, times the seeds
    of_prompts: float = 0.0  # the part that more seeds leave as it is


# --- estimates ----------------------------------------------------------------------------------------------


def over_seeds(differences: np.ndarray) -> Estimate:
    """Of one difference for each of two or more seeds, (S,): the paired t test."""
    seeds = len(differences)
    variance = float(differences.var(ddof=1))
    return Estimate(
        float(differences.mean()), math.sqrt(variance / seeds), seeds - 1, seeds, of_seeds=variance
    )


def over_prompts(differences: np.ndarray) -> Estimate:
    """Of one seed's difference on each prompt, (P,): what is found holds for these weights."""
    prompts = len(differences)
    variance = float(differences.var(ddof=1)) if prompts > 1 else 0.0
    mean, part = float(differences.mean()), variance / prompts
    return Estimate(mean, math.sqrt(part), max(prompts - 1, 1), 1, of_prompts=part)


def over_seeds_and_prompts(differences: np.ndarray) -> Estimate:
    """Of the differences of two or more seeds on each of several prompts, (S, P).

    difference = mean + of the seed + of the prompt + rest; the mean squares of the three say how large each
    is. A part that comes out negative is 0.
    """
    seeds, prompts = differences.shape
    mean = differences.mean()
    by_seed = differences.mean(axis=1) - mean  # (S,)
    by_prompt = differences.mean(axis=0) - mean  # (P,)
    rest = differences - mean - by_seed[:, None] - by_prompt[None, :]
    seed_df, prompt_df = seeds - 1, prompts - 1
    rest_df = seed_df * prompt_df
    seed_square = prompts * float((by_seed**2).sum()) / seed_df
    prompt_square = seeds * float((by_prompt**2).sum()) / prompt_df
    rest_square = float((rest**2).sum()) / rest_df

    seed_part = max(seed_square - rest_square, 0.0) / prompts  # the variance of what is of the seed
    prompt_part = max(prompt_square - rest_square, 0.0) / seeds
    of_seeds = seed_part + rest_square / prompts
    of_prompts = prompt_part / prompts
    variance = of_seeds / seeds + of_prompts

    uncertain = rest_square**2 / rest_df
    uncertain += seed_square**2 / seed_df if seed_part else 0.0
    uncertain += prompt_square**2 / prompt_df if prompt_part else 0.0
    squares = variance * seeds * prompts  # the sum of mean squares that Satterthwaite's formula is for
    df = squares**2 / uncertain if uncertain else 1.0
    # Two seeds say too little of the part of the seeds: in simulations the formula errs up to 13 % of the time.
    df = df if seeds > 2 else 1.0
    return Estimate(float(mean), math.sqrt(variance), df, seeds, of_seeds, of_prompts)


# --- what follows from them ---------------------------------------------------------------------------------


def p_value(estimate: Estimate) -> float | None:
    """Two-sided: how often chance alone gives such a mean. None without a spread to measure it by: all
    differences are equal, as of scores with few values."""
    if has_no_spread(estimate):
        return None
    return t_tails(estimate.mean / estimate.error, estimate.df)


def has_no_spread(estimate: Estimate) -> bool:
    """Whether all differences are equal, but for rounding: 0.4 - 0.3 is not quite 0.2 - 0.1."""
    return estimate.error <= ROUNDING * abs(estimate.mean)


def interval(estimate: Estimate, alpha: float = 0.05) -> tuple[float, float]:
    """The interval of 1 - alpha for the mean."""
    half = t_quantile(alpha, estimate.df) * estimate.error
    return estimate.mean - half, estimate.mean + half


def seeds_needed(estimate: Estimate, alpha: float = 0.05) -> int | None:
    """The seeds that would tell a difference of this size, with a spread of this size, apart in POWER of
    all trials. None: not even MOST_SEEDS, as where the spread is between prompts."""
    if has_no_spread(estimate) or estimate.seeds < 2:
        return None

    def is_found(seeds: int) -> bool:
        error = math.sqrt(estimate.of_seeds / seeds + estimate.of_prompts)
        df = estimate.df * (seeds - 1) / (estimate.seeds - 1)
        return abs(estimate.mean) >= (t_quantile(alpha, df) + t_quantile(2 * (1 - POWER), df)) * error

    seeds = bisect.bisect_left(range(MOST_SEEDS + 1), True, lo=2, key=is_found)
    return seeds if seeds <= MOST_SEEDS else None


def sign_p_value(gained: int, lost: int) -> float:
    """McNemar's test (1947), exact and two-sided: of the prompts on which two runs differ, each wins half by
    chance."""
    return min(1.0, 2 * fall_p_value(max(gained, lost), min(gained, lost)))


def holm(p_values: Iterable[float]) -> list[float]:
    """The p-values corrected for their number, in the same order: if all that are at most alpha are taken for
    real, one of them is luck in at most alpha of all trials."""
    given = list(p_values)
    corrected = [1.0] * len(given)
    largest = 0.0
    order = sorted(range(len(given)), key=lambda i: given[i])
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(given) - rank) * given[i]))
        corrected[i] = largest
    return corrected


# --- Student's t --------------------------------------------------------------------------------------------


def t_tails(t: float, df: float) -> float:
    """P(|T| >= |t|)."""
    return beta_share(df / 2, 0.5, df / (df + t * t))


@functools.cache
def t_quantile(tails: float, df: float) -> float:
    """The t >= 0 with P(|T| >= t) = tails, by Newton's method. It starts at the normal distribution's, which
    is smaller, and, as the density only falls from there, never goes too far."""
    t = -NormalDist().inv_cdf(tails / 2)
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    for _ in range(100):
        density = scale * (1 + t * t / df) ** (-(df + 1) / 2)
        change = (t_tails(t, df) - tails) / (2 * density)
        t += change
        if abs(change) <= 1e-12 * t:
            break
    return t


def beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, by symmetry
        return 1 - beta_share(b, a, 1 - x)
    tiny = 1e-300
    value = above = 1.0
    below = 0.0
    for k in range(1000):
        m = k // 2
        if k == 0:
            term = 1.0
        elif k % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        below = 1 / ((1 + term * below) or tiny)
        above = (1 + term / above) or tiny
        value *= above * below
        if abs(above * below - 1) < 1e-15:
            break
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) / a * (value - 1)
