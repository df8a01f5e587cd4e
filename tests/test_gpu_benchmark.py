"""The command that measures on a GPU, without one: what it measures next, what it keeps, what lands in the pages; and
all sections at toy sizes on the CPU, as on a machine that has no `datasets` and no TRL."""

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_pages  # noqa: E402

MACHINE = {
    "card": "NVIDIA H100",
    "torch": "2.11.0",
    "transformers": "5.17.0",
    "commit": "abc",
    "date": "2026-12-01",
}
OTHER = MACHINE | {"card": "NVIDIA L4"}
EAGER, LOOP = "0.6B 16 x 512, eager", "0.6B 16 x 512, transformers"


def figure(section, side, machine=MACHINE, **value):
    return {"section": section, "side": side, "value": value} | machine


def failure(section, side, machine=MACHINE):
    return {"section": section, "side": side, "failed": "OutOfMemoryError: 9 GiB"} | machine


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results.jsonl")
    return tmp_path / "results.jsonl"


@pytest.fixture
def started(tmp_path, monkeypatch, results):
    """started(seconds) -> the sections that would be started, each with its sides."""
    monkeypatch.setattr(gpu, "facts", lambda device, tiny: MACHINE)
    monkeypatch.setattr(gpu, "lacks", lambda section, tiny: ["trl"] if section == "trl" else [])

    def measure(seconds, only=None):
        found = []
        monkeypatch.setattr(gpu, "run_section", lambda section, sides, *_: found.append((section, sides)))
        args = argparse.Namespace(
            seconds=seconds, only=only, device="cuda", tiny=False, out=tmp_path / "out.jsonl"
        )
        gpu.measure_all(args)
        return found

    return measure


# --- what is measured next ----------------------------------------------------------------------------------


def test_every_side_has_a_function_that_takes_its_words():
    import gpu_sections

    for sides in gpu.SECTIONS.values():
        for seconds, function, *words in sides.values():
            assert seconds > 0
            inspect.signature(getattr(gpu_sections, function)).bind("bench", *words)
    for section, sides in gpu.QUICK.items():
        assert set(sides) <= gpu.SECTIONS[section].keys()
    for section, side, *_ in gpu_pages.FIGURES:
        assert side in gpu.SECTIONS[section]


def test_it_goes_on_with_what_is_missing_and_what_has_failed_comes_last(started, results):
    held = [figure("right", side, loss=1.0) for side in gpu.SECTIONS["right"] if side != "SFT, bf16"]
    gpu.append(results, [*held, failure("sft", EAGER), figure("sft", LOOP, OTHER, **{"tokens/s": 1})])
    found = started(10**6)
    assert found[0] == ("right", ["SFT, bf16"])
    assert found[1] == (
        "sft",
        [side for side in gpu.SECTIONS["sft"] if side != EAGER],
    )  # LOOP: another card's
    assert found[-1] == ("sft", [EAGER])
    assert [section for section, _ in found[:-1]] == [section for section in gpu.SECTIONS if section != "trl"]
    assert started(10**6, only=["dpo"]) == [("dpo", list(gpu.SECTIONS["dpo"]))]


def test_only_what_fits_is_started(started):
    assert started(gpu.START) == []
    (section, sides), *_ = started(60)
    seconds = [gpu.SECTIONS[section][side][0] for side in sides]
    assert section == "right" and gpu.START + sum(seconds) <= 60 and sides


def test_without_options_it_measures_little_and_all_of_it(started, results):
    gpu.append(results, [figure("sft", EAGER, **{"tokens/s": 1})])
    assert dict(started(None)) == gpu.QUICK


# --- nothing is lost ----------------------------------------------------------------------------------------


def test_a_file_that_was_cut_is_read_up_to_the_cut(tmp_path, capsys):
    file = tmp_path / "gpu.jsonl"
    rows = [figure("sft", EAGER, **{"tokens/s": 1}), figure("sft", LOOP, **{"tokens/s": 2})]
    gpu.append(file, rows)
    file.write_text(file.read_text()[:-9])
    assert gpu.read(file) == rows[:1] and "line 2 was cut" in capsys.readouterr().err
    gpu.append(file, rows[1:])
    assert gpu.read(file) == rows
    assert gpu.read(tmp_path / "none.jsonl") == []


def test_a_side_that_fails_leaves_a_line_and_the_next_one_runs(tmp_path, monkeypatch):
    def ceilings(bench):
        raise ValueError("no such\nkernel")

    fake = SimpleNamespace(
        Bench=lambda *_: SimpleNamespace(begin=lambda: None),
        ceilings=ceilings,
        sft=lambda bench, *words: {"tokens/s": 7},
    )
    monkeypatch.setitem(sys.modules, "gpu_sections", fake)
    out = tmp_path / "gpu.jsonl"
    job = {"section": "sft", "sides": ["ceilings of the card", EAGER], "out": str(out), "known": MACHINE}
    gpu.do_job(job | {"device": "cpu", "tiny": True})
    first, second = gpu.read(out)
    assert first["failed"] == "ValueError: no such kernel" and first["card"] == "NVIDIA H100"
    assert second["value"] == {"tokens/s": 7}


def test_a_process_whose_time_is_over_is_ended_and_named(tmp_path):
    args = argparse.Namespace(out=tmp_path / "gpu.jsonl", device="cpu", tiny=True)
    gpu.run_section("sft", [EAGER, LOOP], 0.2, args, MACHINE)
    (row,) = gpu.read(args.out)
    assert (row["side"], row["failed"]) == (EAGER, "its 0 s were over")


def test_kept_once_and_never_a_rehearsal(results, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(gpu_pages, "write_pages", lambda rows, root: written.append(rows))
    file = tmp_path / "came_back.jsonl"
    real = figure("sft", EAGER, **{"tokens/s": 1})
    toy = figure("sft", EAGER, MACHINE | {"card": "NVIDIA H100" + gpu.TOY}, **{"tokens/s": 1})
    gpu.append(file, [real, toy, figure("sft", EAGER, MACHINE | {"card": "CPU"}, **{"tokens/s": 1})])
    gpu.keep([file])
    gpu.keep([file])
    assert gpu.read(results) == [real] and written == [[real], [real]]


def test_the_plan_names_what_is_measured_failed_and_missing(results):
    gpu.append(results, [figure("sft", EAGER, **{"tokens/s": 63000}), failure("sft", LOOP)])
    text = gpu.plan()
    assert f"2026-12-01  {EAGER}: tokens/s 63,000" in text
    assert f"missing     {LOOP} OutOfMemoryError: 9 GiB" in text
    assert f"dpo: 0 of {len(gpu.SECTIONS['dpo'])} sides measured" in text


# --- the pages ----------------------------------------------------------------------------------------------

PAGES = ("README.md", "README.zh-CN.md", "docs/benchmarks.md", "docs/memory.md")


@pytest.fixture
def pages(tmp_path):
    """pages(figures) -> the texts of the pages with them."""
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        shutil.copy(ROOT / page, tmp_path / page)

    def write(rows):
        gpu_pages.write_pages(rows, tmp_path)
        return [(tmp_path / page).read_text(encoding="utf-8") for page in PAGES]

    return write


def test_the_pages_show_what_the_file_holds(pages):
    assert pages(gpu.read(gpu.RESULTS)) == [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]


def test_figures_land_in_the_pages(pages):
    rows = [
        figure("sft", EAGER, **{"tokens/s": 12345, "MFU": 0.271, "peak GiB": 20.5}),
        figure("sft", EAGER, **{"tokens/s": 63000, "MFU": 0.271, "peak GiB": 20.5}),  # the last one counts
        figure("sft", LOOP, **{"tokens/s": 42000}),
        figure("right", "SFT, CPU", loss=2.0),
        figure("right", "SFT, bf16", loss=2.002),
        figure("memory", "Qwen2.5-3B, full", GiB=55.5),
        failure("dpo", "DPO, TRL"),
    ]
    english, chinese, benchmarks, memory = pages(rows)
    for text in (english, chinese):
        assert all(
            value in text for value in ("NVIDIA H100", "2.11.0", "abc", "63,000", "27%", "20.5", "1.001")
        )
    assert "Not yet run on a GPU" not in english and "还没有在 GPU 上跑过" not in chinese
    assert f"| {EAGER} | 63,000 | 0.271 | 20.5 | 1.5 |" in benchmarks  # times the loop
    assert "OutOfMemoryError" in benchmarks and "grpo, shakespeare, real, trl, next, dpo." in benchmarks
    assert (
        "| Qwen2.5-3B, full | 55.5 |" in memory
        and "Qwen2.5-0.5B, full" in memory.split("Not measured there")[1]
    )
    assert pages([])[0] == (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_of_two_cards_are_in_no_ratio(pages):
    rows = [figure("sft", EAGER, **{"tokens/s": 63000}), figure("sft", LOOP, OTHER, **{"tokens/s": 42000})]
    text = pages(rows)[2]
    assert "| 63,000 |" in text and "| 42,000 |" in text and "times that of" not in text
    assert text.index("NVIDIA H100") < text.index("63,000") < text.index("NVIDIA L4") < text.index("42,000")


# --- the sections themselves --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_section_runs_at_toy_sizes(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('datasets', 'trl'): sys.modules[name] = None\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    out = tmp_path / "gpu.jsonl"
    command = [sys.executable, *"benchmarks/gpu.py --device cpu --tiny --seconds 3500".split()]
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=3550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = gpu.read(out)
    values = {(row["section"], row["side"]): row["value"] for row in rows if "value" in row}
    failed = {(row["section"], row["side"]): row["failed"] for row in rows if "failed" in row}
    wanted = {
        (name, side) for name, sides in gpu.SECTIONS.items() for side in sides if name not in ("trl", "dpo")
    }
    assert values.keys() | failed.keys() == wanted
    assert failed.keys() <= {("shakespeare", "nanoGPT, seed 0"), ("right", "SFT, fp16")}, (
        failed
    )  # not there; a GPU's
    assert "trl: left out, it needs" in done.stdout
    for stage in ("SFT", "SFT LoRA", "DPO", "pretrain"):
        loss = values["right", f"{stage}, CPU"]["loss"]
        assert values["right", f"{stage}, bf16"]["loss"] == pytest.approx(loss, rel=1e-2)
    same = [values["right", f"SFT, {side}"]["weights"] for side in ("CPU", "float32", "float32 again")]
    assert {values["right", "SFT, float32, killed and resumed"]["weights"]} == set(same)
    losses = [value["first loss"] for value in values.values() if "first loss" in value]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-2)  # ours and transformers'
    assert json.loads(out.read_text().splitlines()[0])["card"] == "CPU" + gpu.TOY
