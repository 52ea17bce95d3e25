"""Every study can be read, every cell is a run that could begin, and a study that was stopped goes on."""

import io
import json
import random
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

import vitral
from studies import report
from studies.cell import build_network, run_cell
from studies.pictures import on_canvas
from studies.plan import Cell, Job, names, read_study
from studies.report import _head, _table, picture_flops, training_flops
from studies.run import keep_to_one_data, main, run_job
from vitral.data.sources import open_dataset
from vitral.model.cost import count_cost

RESULTS = Path(report.__file__).parents[1] / "docs" / "results"


@pytest.mark.parametrize("name", names())
def test_every_cell_is_a_network_that_can_be_built(name: str) -> None:
    study = read_study(name)
    assert len(study.seeds) >= 2
    assert all(cell.settings["tune.what"] == "all" for cell in study.cells)  # by itself, a checkpoint brings LoRA
    assert len({cell.name for cell in study.cells}) == len(study.cells)
    for cell in study.cells:
        model, _ = build_network(cell.settings)
        assert sum(parameter.numel() for parameter in model.parameters()) < 9e6
        assert cell.start is None or cell.start in {before.name for before in study.cells[: study.cells.index(cell)]}


def test_the_table_says_what_is_missing() -> None:
    study = read_study("positions")
    one = {"top1": 0.5, "seconds": 60.0, "parameters": 1000, "steps": 900, "others": {}, "images": 21}
    rows = {cell.name: [] for cell in study.cells} | {"none": [one, {**one, "top1": 0.52}]}
    lines = _table(study, rows).split("\n")
    tflop = training_flops(study.cells[0]) / 1e12
    assert tflop == pytest.approx(3 * 63e6 * 64 * study.cells[0].settings["steps"] / 1e12, rel=0.05)
    assert lines[2] == f"| none | 51.00 ± 1.41 | 2 | 1,000 | {tflop:.2g} | 1 |"
    assert "An accuracy near 50 % of 21 test pictures has a 95 % interval of ± 21.4 points" in lines[-1]
    assert lines[-1].endswith("2 for all cells and seeds at that speed, 1 on two cores.")
    assert "not run yet" in lines[3]


@pytest.mark.parametrize("name", names())
def test_what_is_published_was_measured_with_the_settings_that_are_here(name: str) -> None:
    study, page = read_study(name), RESULTS / f"{name}.md"
    told = json.loads(page.with_suffix(".json").read_text())
    assert list(told["cells"]) == [cell.name for cell in study.cells]
    for cell in study.cells:
        found = told["cells"][cell.name]
        assert tuple(one["seed"] for one in found) == study.seeds
        assert all(cell.was_trained_so(one) and one["others"].keys() == cell.evaluations.keys() for one in found)
    text = page.read_text()
    assert text.startswith(f"{_head(study)}{report.BEGIN}\n{_table(study, told['cells'])}")
    assert study.paper.strip() in text


def test_the_head_that_fills_in_is_counted() -> None:
    cells = {cell.name: cell for cell in read_study("masked-patches").cells}
    heads = {"mean colour": 512, "4x4 colours": 16 * 512, "pixels": 48}
    found = {name: training_flops(cells[name]) / (3 * 64 * 1200) for name in heads}
    assert found["4x4 colours"] - found["pixels"] == 2 * 32 * 96 * (heads["4x4 colours"] - heads["pixels"])
    assert found["mean colour"] - found["pixels"] == 2 * 32 * 96 * (heads["mean colour"] - heads["pixels"])


def test_a_picture_of_more_tokens_costs_more() -> None:
    costs = picture_flops(read_study("resolution"))
    assert (
        costs[64]
        == count_cost(vitral.create("vit-pico4", image_size=32, num_classes=10, pool="mean").config).forward_flops
    )
    assert costs[64] * 144 / 64 < costs[144] < costs[256]  # attention grows faster than the tokens


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Ten pictures of each digit to train on and five to test on, as shards."""
    found = open_dataset("builtin:digits")
    by_class = {label: [item for item in found.splits["train"] if item.label == label] for label in range(10)}
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "classes.txt").write_text("\n".join(found.classes))
    for split, part in (("train", slice(10)), ("test", slice(10, 15))):
        with tarfile.open(folder / f"{split}-000.tar", "w") as tar:
            for label, items in by_class.items():
                for number, item in enumerate(items[part]):
                    written = io.BytesIO()
                    pixels = item.source.read()
                    assert isinstance(pixels, np.ndarray)
                    Image.fromarray(pixels.squeeze()).save(written, "PNG")
                    for suffix, content in (("png", written.getvalue()), ("cls", str(label).encode())):
                        info = tarfile.TarInfo(f"{label}-{number}.{suffix}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    return folder


SMALL = {
    "tune.what": "all",
    "model": "vit-pico7",
    "image_size": 28,
    "resize": "squash",
    "network.depth": 1,
    "steps": 3,
    "batch_size": 32,
    "device": "cpu",
    "channels": 3,
}


def test_cells_are_trained_measured_and_not_trained_again(digits: Path, tmp_path: Path) -> None:
    evaluations = {
        "at 35 px": {"image_size": [35, 35]},
        "packed": {"packed": [21, 28]},
        "canvas": {"canvas": 35, "image_size": [35, 35]},
        "10-NN": {"knn": 3},
        "probe": {"few_shot": 10},
    }
    first = Job("x", Cell("first", SMALL, evaluations), 3)
    then = Job("x", Cell("then", SMALL, images=50, start="first", begins_as=first.cell.training), 3)
    fresh = Job("x", Cell("fresh", SMALL, {"10-NN": {"knn": 3}}, untrained=True), 3)
    for job in (first, then, fresh):
        run_cell(job, str(digits), tmp_path)
    found = json.loads((first.folder(tmp_path) / "study.json").read_text())
    assert (found["seed"], found["steps"]) == (3, 3)
    assert found["others"].keys() == evaluations.keys()
    assert all(0 <= value <= 1 for value in found["others"].values())
    run_cell(first, str(digits), tmp_path)
    assert json.loads((first.folder(tmp_path) / "study.json").read_text()) == found
    assert run_job(first, str(digits), tmp_path, 1, None) == "was there"
    changed = replace(first, cell=replace(first.cell, evaluations={"5-NN": {"knn": 5}}))
    assert "x.toml" in run_job(changed, str(digits), tmp_path, 1, None)  # it would be measured anew, but for its TOML
    run_cell(changed, str(digits), tmp_path)
    again = json.loads((first.folder(tmp_path) / "study.json").read_text())
    assert again["others"].keys() == {"5-NN"}
    assert again["seconds"] == found["seconds"]
    run_cell(first, str(digits), tmp_path)
    with pytest.raises(vitral.ConfigError, match="batch_size"):
        run_cell(replace(first, cell=replace(first.cell, settings=SMALL | {"batch_size": 16})), str(digits), tmp_path)
    assert "first-seed3" in (then.folder(tmp_path) / "config.toml").read_text()
    found_then = json.loads((then.folder(tmp_path) / "study.json").read_text())
    assert then.cell.was_trained_so(found_then)
    longer = replace(then.cell, begins_as=replace(first.cell, settings=SMALL | {"steps": 4}).training)
    assert not longer.was_trained_so(found_then)  # what it began with has changed since
    part = open_dataset(next((tmp_path / "data").glob("images50-*")))
    assert Counter(item.label for item in part.splits["train"]) == dict.fromkeys(range(10), 5)
    assert len(part.splits["test"]) == 50
    elsewhere = Job("y", Cell("the same", SMALL, {"probe": {"few_shot": 10}}), 3)
    run_cell(elsewhere, str(digits), tmp_path)
    again = json.loads((elsewhere.folder(tmp_path) / "study.json").read_text())
    assert again["seconds"] == found["seconds"]  # it was not trained again
    assert again["others"] == {"probe": found["others"]["probe"]}
    untrained = json.loads((fresh.folder(tmp_path) / "study.json").read_text())
    assert untrained["top1"] is None
    assert untrained["steps"] == 0


def test_packed_pictures_of_one_size_count_as_those_of_a_batch(digits: Path, tmp_path: Path) -> None:
    job = Job("x", Cell("first", SMALL, {"packed": {"packed": [28]}}), 0)
    run_cell(job, str(digits), tmp_path)
    found = json.loads((job.folder(tmp_path) / "study.json").read_text())
    assert found["others"]["packed"] == found["top1"]


def test_a_canvas_keeps_every_pixel_of_the_picture() -> None:
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    whole = on_canvas(picture, 9, random.Random(0))
    assert whole.size == (9, 9)
    left, top, right, bottom = ImageChops.difference(whole, Image.new("RGB", (9, 9), (127,) * 3)).getbbox() or (0,) * 4
    assert (right - left, bottom - top) == (4, 4)
    assert whole.crop((left, top, right, bottom)).tobytes() == picture.tobytes()


def test_a_page_keeps_the_words_around_its_table(tmp_path: Path) -> None:
    study = read_study("axial")
    page = report.write_report(study, tmp_path, tmp_path / "results")
    assert page.read_text().count("not run yet") == 4
    page.write_text(page.read_text() + "What this says.\n")
    folder = next(study.jobs()).folder(tmp_path)
    folder.mkdir(parents=True)
    found = {
        "cell": study.cells[0].name,
        "training": study.cells[0].training,
        "top1": 0.5,
        "seconds": 60.0,
        "parameters": 1000,
        "steps": 9,
        "others": {},
        "images": 21,
    }
    (folder / "study.json").write_text(json.dumps(found))
    report.write_report(study, tmp_path, tmp_path / "results")
    text = page.read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1
    assert text.count("not run yet") == 3
    assert "| 50.00 |" in text
    assert text.endswith("What this says.\n")
    assert (tmp_path / "results" / "axial.png").is_file()
    found["training"] = {**found["training"], "images": 500}
    (folder / "study.json").write_text(json.dumps(found))
    report.write_report(study, tmp_path, tmp_path / "results")
    assert page.read_text().count("not run yet") == 4  # it was trained with other settings than those of now


def test_a_place_keeps_to_the_data_that_it_began_with(tmp_path: Path) -> None:
    keep_to_one_data(tmp_path / "runs", "one")
    keep_to_one_data(tmp_path / "runs", "one")
    with pytest.raises(vitral.DataError, match="other data"):
        keep_to_one_data(tmp_path / "runs", "another")


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ("axial", 2, "the data are missing"),
        ("axial /nowhere", 2, "There is no folder /nowhere"),
        ("axial builtin:digits --jobs 0", 2, "at least 1"),
        ("axial builtin:digits --threads two", 2, "at least 1"),
        ("axial --report --place /nowhere", 1, "its page stays as it is"),
    ],
)
def test_wrong_use(
    words: str, code: int, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", *words.split()])
    before = {path: path.read_bytes() for path in RESULTS.iterdir()}
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code
    assert reason in capsys.readouterr().err
    assert {path: path.read_bytes() for path in RESULTS.iterdir()} == before
