"""Runs side by side: which settings differ, and whether rates differ by more than chance."""

import math
from typing import Any

from common.run.report.read import Folder, Row
from common.sampling.counts import fall_p_value, wilson

OF_THE_FOLDER = ("output_dir", "overwrite_output_dir", "run_name", "resume_from_checkpoint", "accept_changes")
Rate = dict[str, int]  # {"passed", "of"}


def compare_runs(runs: list[dict[str, Any]], folders: list[Folder]) -> dict[str, Any]:
    """The part of a page that compares several runs. The others are compared with the first one."""
    return {"settings": differing(runs), "rates": rates(runs, folders)}


def differing(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """[name, [the value in each run]] of the settings that differ, the output folder excepted."""
    tables = [{name: value for group in run["settings"] for name, value, _ in group["rows"]} for run in runs]
    tables = [table | {"script": run["script"]} for table, run in zip(tables, runs, strict=True)]
    names = dict.fromkeys(name for table in tables for name in table)
    found = [[name, [table.get(name, "") for table in tables]] for name in names if name not in OF_THE_FOLDER]
    return [[name, values] for name, values in found if len(set(values)) > 1]


def rates(runs: list[dict[str, Any]], folders: list[Folder]) -> list[dict[str, Any]]:
    """For each score that is pass or fail: the rate of each run with its interval, and tests against the first run.

    If two runs were given the same prompts, or cases, the test uses those on which they differ (McNemar, exact); otherwise
    two proportions.
    """
    tables = [run["rates"] | suite(run["regression"]) for run in runs]
    outcomes = [outcomes_of(folder.samples()[-1:]) | suite_outcomes(folder.regression[-1:]) for folder in folders]
    found = []
    for name in dict.fromkeys(name for table in tables for name in table):
        rows = []
        for k, table in enumerate(tables):
            if name not in table:
                rows.append(None)
                continue
            rate = table[name]
            row: dict[str, Any] = rate | {"interval": [round(end, 4) for end in wilson(rate["passed"], rate["of"])]}
            if k and name in tables[0]:
                row |= {"p": two_proportions(tables[0][name], rate), "test": "two proportions"}
                first, here = outcomes[0].get(name, {}), outcomes[k].get(name, {})
                if first and first.keys() == here.keys() and len(first) == min(rate["of"], tables[0][name]["of"]):
                    gained = sum(here[key] > first[key] for key in first)
                    lost = sum(here[key] < first[key] for key in first)
                    row |= {"p": mcnemar(gained, lost), "test": "McNemar, exact", "gained": gained, "lost": lost}
            rows.append(row)
        found.append({"name": name, "runs": rows})
    return found


def suite(evaluations: list[Row] | None) -> dict[str, Rate]:
    """The pass rates of the last evaluation of a regression suite."""
    groups = evaluations[-1]["groups"] if evaluations else {}
    whole = {n: g for n, g in groups.items() if float(g["passed"]).is_integer() and float(g["total"]).is_integer()}
    return {f"suite: {name}": {"passed": int(g["passed"]), "of": int(g["total"])} for name, g in whole.items()}


def outcomes_of(last: list[list[Row]]) -> dict[str, dict[Any, float]]:
    """{score: {prompt: 0 or 1}} of the last evaluation."""
    found: dict[str, dict[Any, float]] = {}
    for row in last[0] if last else []:
        if row.get("temperature", last[0][0].get("temperature")) == last[0][0].get("temperature"):
            for name, value in row["scores"].items():
                if value is not None:
                    found.setdefault(name, {})[row["key"]] = value
    return found


def suite_outcomes(last: list[Row]) -> dict[str, dict[Any, float]]:
    """{rate of `suite`: {the case's text: 0 or 1}} of the last evaluation of a suite. Malformed lines are tolerated."""
    cases = last[0].get("cases") if last else {}
    found: dict[str, dict[Any, float]] = {}
    for name, case in cases.items() if isinstance(cases, dict) else ():
        if isinstance(case, dict) and case.get("rate") in (0, 1) and isinstance(case.get("digest"), str):
            for group in ("all", str(case.get("group"))):
                found.setdefault(f"suite: {group}", {})[name, case["digest"]] = float(case["rate"])
    return found


def two_proportions(first: Rate, second: Rate) -> float | None:
    """The p-value of the difference of two rates: z-test of two proportions, pooled, two-sided."""
    n, m = first["of"], second["of"]
    if not n or not m:
        return None
    pooled = (first["passed"] + second["passed"]) / (n + m)
    if pooled in (0, 1):
        return 1.0
    z = (second["passed"] / m - first["passed"] / n) / math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return math.erfc(abs(z) / math.sqrt(2))


def mcnemar(gained: int, lost: int) -> float:
    """The p-value for one set of prompts: of those on which two runs differ, each run would win half by chance (McNemar
    1947; exact, two-sided)."""
    return min(1.0, 2 * fall_p_value(max(gained, lost), min(gained, lost)))
