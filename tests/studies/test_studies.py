"""Every study can be read, every cell is a run that could begin, and a study that was stopped goes on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from studies import report
from studies.cell import nested
from studies.plan import names, read_study
from studies.report import _table
from vitral.train.build import build_model
from vitral.train.config import with_settings
from vitral.train.layers import flat


@pytest.mark.parametrize("name", names())
def test_every_cell_is_a_network_that_can_be_built(name: str) -> None:
    study = read_study(name)
    assert len(study.seeds) >= 2
    assert len({cell.name for cell in study.cells}) == len(study.cells)
    for cell in study.cells:
        settings = {key: value for key, value in cell.settings.items() if key != "recipe"}
        config = with_settings(None, {"data": "x", "channels": 3, **flat(nested(settings))}, cell.name)
        model, _, _ = build_model(config, classes=10)
        assert sum(parameter.numel() for parameter in model.parameters()) < 3e6


def test_the_table_says_what_is_missing() -> None:
    study = read_study("positions")
    one = {"top1": 0.5, "seconds": 60.0, "parameters": 1000, "others": {}}
    rows = {cell.name: [] for cell in study.cells} | {"none": [one, {**one, "top1": 0.52}]}
    lines = _table(study, rows).split("\n")
    assert lines[2] == "| none | 51.00 | 1.41 | 2 | 1,000 | 1.0 |"
    assert "not run yet" in lines[3]


def test_a_cell_is_trained_measured_and_not_trained_again(tmp_path: Path) -> None:
    settings = {"model": "vit-pico7", "network.depth": 1, "steps": 4, "batch_size": 32, "device": "cpu"}
    told = json.dumps({"cell": "x", "settings": settings, "evaluations": {"at 35 px": {"image_size": [35, 35]}}})
    command = [sys.executable, "-m", "studies.cell", "builtin:digits", str(tmp_path / "run"), "3", told]
    subprocess.run(command, check=True, timeout=120)
    found = json.loads((tmp_path / "run" / "study.json").read_text())
    assert found["seed"] == 3
    assert found["steps"] == 4
    assert 0 <= found["others"]["at 35 px"] <= 1
    subprocess.run(command, check=True, timeout=120)
    assert json.loads((tmp_path / "run" / "study.json").read_text()) == found


def test_a_page_keeps_the_words_around_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    study = read_study("axial")
    report.write_report(study, tmp_path)
    page = tmp_path / "results" / "axial.md"
    assert page.read_text().count("not run yet") == 3
    page.write_text(page.read_text() + "What this says.\n")
    folder = next(study.jobs()).folder(tmp_path)
    folder.mkdir(parents=True)
    found = {"cell": study.cells[0].name, "top1": 0.5, "seconds": 60.0, "parameters": 1000, "others": {}}
    (folder / "study.json").write_text(json.dumps(found))
    report.write_report(study, tmp_path)
    text = page.read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1
    assert text.count("not run yet") == 2
    assert "| 50.00 |" in text
    assert text.endswith("What this says.\n")
    assert (tmp_path / "results" / "axial.png").is_file()
