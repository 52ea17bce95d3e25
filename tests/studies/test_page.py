"""The page of a study, and the published pages."""

import json
from pathlib import Path
from typing import Any

import pytest

import vitral
from vitral.studies.cell import build_network, training_flops
from vitral.studies.page import BEGIN, END, image_flops, page_head, results_table, write_page
from vitral.studies.spec import Study, read_study, study_names

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def result(study: Study, **changes: Any) -> dict[str, Any]:
    cell = study.cells[0]
    row = {"cell": cell.name, "training": cell.training, "start_training": None, "top1": 0.5, "seconds": 60.0}
    return row | {"parameters": 1000, "steps": 900, "flops": 7.2e12, "scores": {}, "images": 21} | changes


def test_the_table_shows_what_is_missing() -> None:
    study = read_study("positions")
    rows = {cell.name: [] for cell in study.cells} | {"none": [result(study), result(study, top1=0.52)]}
    lines = results_table(study, rows).split("\n")
    assert lines[2] == "| none | 51.00 ± 1.41 | 2 | 1,000 | 7.2 | 1 |"
    assert lines[-1].startswith("Mean ± standard deviation over the seeds.")
    assert "21 test images give an accuracy a 95 % confidence interval of ± 21.4 points" in lines[-1]
    assert lines[-1].endswith("All cells and seeds together: 2 minutes on one core, 1 on two.")
    assert "not run yet" in lines[3]


def test_one_seed_claims_no_standard_deviation() -> None:
    study = read_study("positions")
    rows = {cell.name: [] for cell in study.cells} | {"none": [result(study)]}
    table = results_table(study, rows)
    assert "| none | 50.00 | 1 |" in table
    assert "deviation" not in table
    assert "One seed per cell." in table
    assert "±" not in table.split("\n")[2]


@pytest.mark.parametrize("name", study_names())
def test_published_results_were_measured_with_todays_settings(name: str) -> None:
    study, page = read_study(name), RESULTS / f"{name}.md"
    cells = json.loads(page.with_suffix(".json").read_text())["cells"]
    assert list(cells) == [cell.name for cell in study.cells]
    for cell in study.cells:
        rows = cells[cell.name]
        assert tuple(row["seed"] for row in rows) == study.seeds
        assert all(cell.matches(row) and row["scores"].keys() == cell.evaluations.keys() for row in rows)
    text = page.read_text()
    assert text.startswith(f"{page_head(study, RESULTS)}{BEGIN}\n{results_table(study, cells)}")
    assert study.paper.strip() in text


def published_rows(name: str) -> dict[str, list[dict[str, Any]]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["cells"]


def test_the_operations_of_training_are_three_forward_passes() -> None:
    cell = read_study("positions").cells[0]
    model, _ = build_network(cell.settings, classes=10)
    flops = training_flops(model.config, cell.settings, cell.settings["steps"])
    assert flops == pytest.approx(3 * 63e6 * 64 * cell.settings["steps"], rel=0.05)
    assert published_rows("positions")["none"][0]["flops"] == flops


def test_the_head_of_masked_patches_is_counted() -> None:
    cells = {cell.name: cell for cell in read_study("masked-patches").cells}
    outputs = {"mean color": 512, "4x4 colors": 16 * 512, "pixels": 48}
    flops = {}
    for name in outputs:
        config = build_network(cells[name].settings, classes=10)[0].config
        flops[name] = training_flops(config, cells[name].settings, 1) / (3 * 64)
    for name in ("4x4 colors", "mean color"):
        assert flops[name] - flops["pixels"] == 2 * 32 * 96 * (outputs[name] - outputs["pixels"])


def test_an_image_of_more_tokens_costs_more() -> None:
    flops = image_flops(read_study("resolution"), published_rows("resolution"))
    assert set(flops) == {64, 144, 256}
    assert flops[64] * 144 / 64 < flops[144] < flops[256]  # attention grows faster than the tokens


def test_a_page_keeps_the_text_below_its_table(tmp_path: Path) -> None:
    study = read_study("axial")
    page = write_page(study, tmp_path, tmp_path / "results")
    assert page.read_text().count("not run yet") == 4
    page.write_text(page.read_text() + "What this shows.\n")
    folder = next(study.jobs()).folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(result(study)))
    write_page(study, tmp_path, tmp_path / "results")
    text = page.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.count("not run yet") == 3
    assert "| 50.00 |" in text
    assert text.endswith("What this shows.\n")
    assert (tmp_path / "results" / "axial.png").is_file()
    other = {**study.cells[0].training, "images": 500}
    (folder / "study.json").write_text(json.dumps(result(study, training=other)))
    write_page(study, tmp_path, tmp_path / "results")
    assert page.read_text().count("not run yet") == 4  # trained with other settings than today's


def test_a_page_without_markers_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "axial.md").write_text("my own page")
    with pytest.raises(vitral.ConfigError, match="axial.md must contain"):
        write_page(read_study("axial"), tmp_path, tmp_path)
    assert (tmp_path / "axial.md").read_text() == "my own page"


def test_the_page_names_a_command_that_works(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('title = "Mine"\nseeds = [0]\n[[cells]]\nname = "a"\n')
    assert "`vitral study mine.toml DATA`" in page_head(read_study(path), tmp_path)
    assert "`vitral study positions DATA`" in page_head(read_study("positions"), tmp_path)
