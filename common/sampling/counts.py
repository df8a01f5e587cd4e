"""Statistics of passed cases: pass@k, an interval for a rate, whether a fall is more than chance. Pure maths."""

import math

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution, for a 95 % interval


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k answers is right, given n answers of which c are: 1 - C(n-c, k) / C(n, k).

    Unbiased for n >= k (Chen et al. 2021, arXiv 2107.03374, eq. 1); k = 1 gives c / n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} right ones among {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(passed: float, total: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927) for the rate behind `passed` of `total`; (0, 1) if total is 0.

    Unlike p ± 1.96 sqrt(p (1-p) / n) it is accurate for few cases, and has a width at 0 of n and n of n. `passed` may be a
    sum of fractions in [0, 1], which vary less than the zeros and ones that the formula assumes: the interval is then too
    wide.
    """
    if not total:
        return 0.0, 1.0
    p, z2 = passed / total, Z * Z / total
    half = Z * math.sqrt(p * (1.0 - p) / total + z2 / (4.0 * total))
    low, high = (p + z2 / 2.0 - half) / (1.0 + z2), (p + z2 / 2.0 + half) / (1.0 + z2)
    return (0.0 if passed == 0 else low), (1.0 if passed == total else high)


def fall_p_value(fell: int, rose: int) -> float:
    """The probability of at least `fell` falls among the `fell + rose` cases that changed, if either direction were equally
    likely.

    McNemar's test (1947) in its exact form, one-sided: the sum of C(n, i) / 2^n for i from `fell` to n. For cases with a
    fraction of passed answers rather than a verdict, it is the sign test of the pairs. 1 if nothing changed.
    """
    n, term, total = fell + rose, math.comb(fell + rose, fell), 0
    for i in range(fell, n + 1):
        total += term
        term = term * (n - i) // (i + 1)
    return total / 2**n
