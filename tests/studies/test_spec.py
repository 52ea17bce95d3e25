"""Studies are read from TOML; mistakes in it raise ConfigError naming them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vitral
from vitral.studies.cell import build_network
from vitral.studies.spec import read_study, study_names, study_path, upgrade_result


@pytest.mark.parametrize("name", study_names())
def test_every_cell_is_a_network_that_can_be_built(name: str) -> None:
    study = read_study(name)
    assert len(study.seeds) >= 2
    assert all(cell.settings["tune.what"] == "all" for cell in study.cells)  # the default for a checkpoint is LoRA
    assert len({cell.name for cell in study.cells}) == len(study.cells)
    for cell in study.cells:
        with torch.device("meta"):
            model, _ = build_network(cell.settings, classes=10)
        assert sum(parameter.numel() for parameter in model.parameters()) < 9e6


def write_study(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


MINIMAL = 'title = "Mine"\n[[cells]]\nname = "a"\n'


def test_a_minimal_study_takes_its_settings_from_the_shipped_base(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, MINIMAL))
    assert (study.name, study.seeds, study.question) == ("mine", (0,), "")
    assert study.cells[0].settings["model"] == "vit-pico4"
    assert study.cells[0].settings["network.pool"] == "mean"
    assert [job.seed for job in read_study(study.path, (4, 5)).jobs()] == [4, 5]


def test_another_model_discards_the_network_of_the_base(tmp_path: Path) -> None:
    text = 'title = "Mine"\n[base]\noptim.lr = 1e-4\n[[cells]]\nname = "a"\nmodel = "bit-r50x1"\n'
    text += '[[cells]]\nname = "b"\nfrom = "vit-cifar10"\nnetwork.registers = 2\n'
    bit, checkpoint = read_study(write_study(tmp_path, text)).cells
    assert bit.settings["model"] == "bit-r50x1"
    assert bit.settings["optim.lr"] == 1e-4
    assert "network.pool" not in bit.settings
    assert "model" not in checkpoint.settings
    assert {name for name in checkpoint.settings if name.startswith("network.")} == {"network.registers"}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("title = ", "mine.toml is not valid TOML"),
        ('[[cells]]\nname = "a"\n', "mine.toml has no title"),
        ('title = "x"\n', "mine.toml has no cells"),
        ('title = "x"\ncells = []\n', "mine.toml has no cells"),
        ('title = "x"\ncells = [1]\n', r"cells must be a list of tables"),
        ("title = 3\n" + MINIMAL.partition("\n")[2], "title must be text"),
        ('titel = "x"\n' + MINIMAL, "unknown key 'titel'.*Did you mean 'title'"),
        ("seeds = 3\n" + MINIMAL, "seeds must be a list"),
        ("seeds = [0.5]\n" + MINIMAL, "seeds must be an integer"),
        ("seeds = []\n" + MINIMAL, "seeds must be a list"),
        ("base = 1\n" + MINIMAL, "base must be a table"),
        ('title = "x"\n[[cells]]\nsteps = 3\n', "cell 1: name"),
        ('title = "x"\n[[cells]]\nname = ".."\n', "name must be printable"),
        (MINIMAL + "stepz = 3\n", "cell 'a': there is no setting 'stepz'.*steps"),
        (MINIMAL + "optim.rate = 3\n", "cell 'a': there is no setting 'optim.rate'"),
        (MINIMAL + 'steps = "many"\n', "cell 'a': steps"),
        (MINIMAL + "images = 0\n", "cell 'a': images must be an integer"),
        (MINIMAL + "canvas = 10000000\n", "cell 'a': canvas must be an integer"),
        (MINIMAL + "x = 0\n", "cell 'a': x must be"),
        (MINIMAL + "untrained = 1\n", "untrained must be true or false"),
        (MINIMAL + 'start = "b"\n', "start='b' is not an earlier cell"),
        (MINIMAL + "evaluations = 3\n", "evaluations must be a table"),
        (MINIMAL + "evaluations = {near = 3}\n", "evaluation 'near' must be a table"),
        (MINIMAL + "evaluations = {near = {kn = 3}}\n", "evaluation 'near': unknown key 'kn'.*Did you mean 'knn'"),
        (MINIMAL + '[[cells]]\nname = "a"\n', "two cells named 'a'"),
    ],
)
def test_mistakes_are_named(text: str, facts: str, tmp_path: Path) -> None:
    with pytest.raises(vitral.ConfigError, match=facts):
        read_study(write_study(tmp_path, text))


def test_a_study_is_a_file_or_a_shipped_name(tmp_path: Path) -> None:
    assert study_path("positions").name == "positions.toml"
    assert study_path(write_study(tmp_path, MINIMAL)) == tmp_path / "mine.toml"
    with pytest.raises(vitral.ConfigError, match="'position'.*Did you mean 'positions'"):
        study_path("position")
    with pytest.raises(vitral.ConfigError, match=r"nowhere.toml does not exist.*positions"):
        study_path(tmp_path / "nowhere.toml")
    with pytest.raises(vitral.ConfigError, match="got 5"):
        study_path(5)  # type: ignore[arg-type]


def test_results_of_earlier_versions_match() -> None:
    cells = read_study("masked-patches").cells
    cell = next(cell for cell in cells if cell.start is not None)
    assert cell.start_training is not None

    def before(training: dict) -> dict:  # type: ignore[type-arg]
        settings = dict(training["settings"])
        settings["selection"] = settings.pop("val_fraction")
        return {**training, "settings": settings}

    old = {"training": before(cell.training), "begins_as": before(cell.start_training), "others": {"knn": 0.5}}
    result = upgrade_result(old)
    assert cell.matches(result)
    assert result["scores"] == {"knn": 0.5}
    longer = {**cell.start_training, "settings": {**cell.start_training["settings"], "steps": 4}}
    assert not replace(cell, start_training=longer).matches(result)  # its starting weights have changed
