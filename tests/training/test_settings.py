"""Settings from TOML, the command line and Python: the same names and the same checks."""

from pathlib import Path
from typing import Any

import pytest

import vitral
from vitral.training.config import Masking, TrainConfig
from vitral.training.settings import (
    as_settings,
    as_toml,
    field_texts,
    flatten,
    read_toml,
    recipe_names,
    recipe_path,
    with_settings,
)


def read_recipe(name: str) -> TrainConfig:
    return with_settings(None, {"data": "x", **read_toml(recipe_path(name))}, name)


def test_settings_survive_a_file(tmp_path: Path) -> None:
    config = with_settings(
        None,
        {
            "data": 'a "quoted" \\ folder',
            "optim.lr": "3e-4",
            "optim.betas": "0.9,0.95",
            "image_size": "128x96",
            "network.pool": "mean",
            "network.stem": {"kind": "convolutions", "widths": [16, 32]},
            "epochs": 2,
            "compile": "true",
        },
        "test",
    )
    assert config.optim.lr == 3e-4
    assert config.optim.betas == (0.9, 0.95)
    assert config.image_size == (128, 96)
    assert config.compile is True
    (tmp_path / "x.toml").write_text(as_toml(config))
    assert with_settings(None, read_toml(tmp_path / "x.toml"), "x") == config


def test_every_field_has_a_text_in_the_file() -> None:
    texts, file = field_texts(), as_toml(TrainConfig(data="x"))
    for name in as_settings(TrainConfig(data="x")):
        assert texts.get(name), name
        assert f"# {texts[name]}\n" in file


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"optim.lr": "fast"}, r"test: optim\.lr must be a number.*got 'fast'"),
        ({"optim.lrr": 1}, r"no setting 'optim\.lrr'.*Did you mean 'optim\.lr'"),
        ({"lr": 1}, r"Did you mean optim\.lr\?"),
        ({"smoothing": 1}, r"Did you mean loss\.smoothing\?"),
        ({"optim.name": "adma"}, r"optim\.name must be sgd, adamw, muon .*got 'adma'"),
        ({"optim.name": "adam"}, r"got 'adam'.*use adamw"),
        ({"optim.lr": -1}, r"optim\.lr must be .*above 0"),
        ({"epochs": -1}, "epochs must be"),
        ({"batch_size": 2.5}, r"batch_size must be an integer.*got 2\.5"),
        ({"batch_size": True}, "batch_size must be an integer"),
        ({"compile": "yes"}, "compile must be true or false"),
        ({"tune.what": "everything"}, r"tune\.what must be .*lora"),
        ({"network": 5}, "network must be a table.*got 5"),
        ({"optim": 5}, r"optim is a section.*optim\.name"),
        ({"selection": 0.2}, "val_fraction"),
        ({"most_bad": 0.2}, "max_bad_fraction"),
        ({"nonsense": 0.2}, "--help-all"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(vitral.ConfigError, match=fragment):
        with_settings(None, {"data": "x", **settings}, "test")


def test_data_is_needed() -> None:
    with pytest.raises(vitral.ConfigError, match="data is missing"):
        with_settings(None, {"epochs": 3}, "test")


def test_paths_and_the_word_none(tmp_path: Path) -> None:
    settings = {"data": "x", "val": Path("a"), "network.pool": "none"}
    settings |= {"network.position": "NONE", "network.stem": "none"}
    config = with_settings(None, settings, "test")
    assert config.val == "a"
    assert config.network == {"pool": "none", "position": "none", "stem": None}
    for name in ("from_weights", "from_", "from"):
        assert with_settings(None, {"data": "x", name: Path("b")}, "test").from_weights == "b"
    (tmp_path / "x.toml").write_text(as_toml(config))
    assert with_settings(None, read_toml(tmp_path / "x.toml"), "x") == config


def test_any_character_of_a_path_comes_back(tmp_path: Path) -> None:
    data = "".join(map(chr, range(1, 128))) + "\x85\u2028é"
    (tmp_path / "x.toml").write_text(as_toml(TrainConfig(data=data)), encoding="utf-8")
    assert read_toml(tmp_path / "x.toml")["data"] == data


def test_files_that_are_not_toml(tmp_path: Path) -> None:
    for text in ("a = = 3", f"seed = {'9' * 5000}", f"a = {'[' * 5000}"):
        (tmp_path / "x.toml").write_text(text)
        with pytest.raises(vitral.ConfigError, match=r"x\.toml is not valid TOML"):
            read_toml(tmp_path / "x.toml")
    with pytest.raises(vitral.ConfigError, match=r"y\.toml: No such file"):
        read_toml(tmp_path / "y.toml")


def test_a_stem_is_one_setting() -> None:
    stem = {"kind": "convolutions", "widths": [32, 64]}
    assert flatten({"network": {"stem": stem}}) == flatten({"network.stem": stem}) == {"network.stem": stem}
    assert flatten({"optim": {"lr": 1, "name": "sgd"}, "epochs": 2}) == {
        "optim.lr": 1,
        "optim.name": "sgd",
        "epochs": 2,
    }


# ---- recipes ----


@pytest.mark.parametrize("name", recipe_names())
def test_recipes(name: str) -> None:
    assert as_toml(read_recipe(name))
    assert recipe_path(name).read_text().startswith("# ")


def test_recipes_of_the_paper() -> None:
    assert {"paper-finetune", "paper-jft", "paper-i21k", "paper-imagenet", "plain-s16", "augreg"} <= set(recipe_names())
    finetune = read_recipe("paper-finetune")
    assert (finetune.optim.name, finetune.optim.momentum, finetune.optim.clip) == ("sgd", 0.9, 1.0)
    assert (finetune.batch_size, finetune.image_size, finetune.optim.weight_decay) == (512, 384, 0.0)
    assert (finetune.augment.crop, finetune.augment.crop_area) == ("inception", (0.05, 1.0))
    jft = read_recipe("paper-jft")
    assert (jft.batch_size, jft.optim.weight_decay, jft.optim.schedule) == (4096, 0.1, "linear")
    assert jft.optim.betas == (0.9, 0.999)


@pytest.mark.parametrize(
    ("name", "steps", "drops", "warmup", "mixup"),
    [
        ("bit-small", 500, [200, 300, 400], 100, 0.0),
        ("bit-medium", 10_000, [3000, 6000, 9000], 500, 0.1),
        ("bit-large", 20_000, [6000, 12_000, 18_000], 500, 0.1),
    ],
)
def test_the_hyperrule_of_bit(name: str, steps: int, drops: list[int], warmup: int, mixup: float) -> None:
    config = read_recipe(name)
    assert (config.steps, config.batch_size, config.optim.warmup_steps) == (steps, 512, warmup)
    assert [round(fraction * steps) for fraction in config.optim.stairs] == drops
    assert (config.optim.name, config.optim.lr, config.optim.momentum) == ("sgd", 0.003, 0.9)
    assert config.mix.mixup == mixup
    assert config.image_size == 480
    assert round((480**2 / config.augment.crop_area[0]) ** 0.5) == 512


def test_masked_patches_as_in_the_paper() -> None:
    config = read_recipe("paper-masked")
    assert (config.steps, config.batch_size, config.model) == (1_000_000, 4096, "vit-b16")
    assert (config.optim.name, config.optim.lr, config.optim.warmup_steps) == ("adamw", 2e-4, 10_000)
    assert config.optim.schedule == "cosine"
    assert config.masking == Masking(target="mean-color", ratio=0.5, masked=0.8, swapped=0.1)


def test_an_unknown_recipe() -> None:
    with pytest.raises(vitral.ConfigError, match="'paper-jtf'.*Did you mean 'paper-jft'"):
        recipe_path("paper-jtf")
