"""python -m tools.report: the page of a run again, and a page that compares runs."""

from common.errors import UserError
from tests.run.test_page import a_run, data_of
from tools import report

import pytest


def test_one_folder_gets_its_page_again_and_several_a_page_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    one, two = a_run(tmp_path / "sft", name="same"), a_run(tmp_path / "other" / "sft", name="same")
    report.main([str(one)])
    assert "open it in a browser" in capsys.readouterr().out
    assert data_of((one / "report.html").read_text())["runs"][0]["name"] == "same"
    report.main([str(one), str(two)])
    shown = data_of((tmp_path / "comparison.html").read_text())
    assert [run["name"] for run in shown["runs"]] == [str(one), str(two)], "of one name: they are told apart"
    report.main([str(one), str(two), "--to", "pages/all.html"])
    assert (tmp_path / "pages" / "all.html").exists()


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="is not the output folder of a run"):
        report.main([str(tmp_path)])
    with pytest.raises(UserError, match="a page compares 8 at most"):
        report.main(["x"] * 9)
    with pytest.raises(UserError, match="cannot be written"):
        report.main([str(a_run(tmp_path / "run")), "--to", "/proc/nowhere/page.html"])
