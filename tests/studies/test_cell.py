"""A cell is trained once, evaluated, and trained again only if its settings change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vitral
from vitral.studies.cell import run_cell
from vitral.studies.spec import Cell, Job, load_result

SETTINGS = {
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


def job(name: str, study: str = "x", seed: int = 3, **fields: Any) -> Job:
    return Job(study=study, cell=Cell(**{"name": name, "settings": SETTINGS, **fields}), seed=seed)


def run(job: Job, data: Path, out: Path) -> dict[str, Any]:
    run_cell(job, str(data), out)
    result = load_result(job.folder(out))
    assert result is not None
    return result


def test_a_cell_is_evaluated_in_every_way(digits: Path, tmp_path: Path) -> None:
    evaluations = {
        "at 35 px": {"image_size": [35, 35]},
        "packed": {"packed": [21, 28]},
        "canvas": {"canvas": 35, "image_size": [35, 35]},
        "10-NN": {"knn": 3},
        "probe": {"few_shot": 10},
    }
    first = job("first", evaluations=evaluations)
    result = run(first, digits, tmp_path)
    assert (result["seed"], result["steps"]) == (3, 3)
    assert result["scores"].keys() == evaluations.keys()
    assert all(0 <= score <= 1 for score in result["scores"].values())
    assert result["evaluation_flops"]["at 35 px"] > result["forward_flops"]
    assert run(first, digits, tmp_path) == result
    other = replace(first, cell=replace(first.cell, evaluations={"5-NN": {"knn": 5}}))
    again = run(other, digits, tmp_path)
    assert again["scores"].keys() == {"5-NN"}
    assert again["seconds"] == result["seconds"]  # evaluated again, but not trained again


def test_changed_settings_are_refused(digits: Path, tmp_path: Path) -> None:
    run(job("first"), digits, tmp_path)
    with pytest.raises(vitral.ConfigError, match="batch_size"):
        run_cell(job("first", settings=SETTINGS | {"batch_size": 16}), str(digits), tmp_path)


def test_a_cell_starts_from_another_one(digits: Path, tmp_path: Path) -> None:
    first = job("first")
    run(first, digits, tmp_path)
    then = job("then", images=50, start="first", start_training=first.cell.training)
    result = run(then, digits, tmp_path)
    assert "first-seed3" in (then.folder(tmp_path) / "config.toml").read_text()
    assert then.cell.matches(result)


def test_an_equal_cell_of_another_study_is_not_trained_again(digits: Path, tmp_path: Path) -> None:
    first = job("first", evaluations={"probe": {"few_shot": 10}})
    result = run(first, digits, tmp_path)
    copy = run(job("the same", study="y", evaluations=first.cell.evaluations), digits, tmp_path)
    assert copy["seconds"] == result["seconds"]
    assert copy["scores"] == result["scores"]


def test_an_untrained_cell_is_evaluated_as_initialized(digits: Path, tmp_path: Path) -> None:
    result = run(job("untrained", untrained=True, evaluations={"10-NN": {"knn": 3}}), digits, tmp_path)
    assert result["top1"] is None
    assert (result["steps"], result["flops"]) == (0, 0)
    assert 0 < result["scores"]["10-NN"] <= 1


def test_packed_images_of_one_size_score_as_in_a_batch(digits: Path, tmp_path: Path) -> None:
    result = run(job("first", seed=0, evaluations={"packed": {"packed": [28]}}), digits, tmp_path)
    assert result["scores"]["packed"] == result["top1"]


def test_a_run_that_was_killed_before_it_started_starts_over(digits: Path, tmp_path: Path) -> None:
    first = job("first")
    first.folder(tmp_path).mkdir(parents=True)
    (first.folder(tmp_path) / "log.txt").write_text("killed")
    assert run(first, digits, tmp_path)["steps"] == 3
    assert json.loads((first.folder(tmp_path) / "study.json").read_text())["cell"] == "first"
