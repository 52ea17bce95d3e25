"""Settings from TOML, the command line and Python: the same names, checked alike."""

from pathlib import Path
from typing import Any

import pytest

import vitral
from vitral.train.config import (
    TrainConfig,
    as_settings,
    as_toml,
    field_texts,
    read_toml,
    recipe_names,
    recipe_path,
    with_settings,
)
from vitral.train.layers import gather_layers


def test_there_and_back(tmp_path: Path) -> None:
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
    texts = field_texts()
    for name in as_settings(TrainConfig(data="x")):
        if name not in ("dropout", "seed", "device", "precision"):
            assert texts.get(name), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optim.lr": "fast"}, "optim.lr='fast' must be a number"),
        ({"optim.lrr": 1}, "Did you mean 'optim.lr'"),
        ({"optim.name": "adma"}, "'adamw'"),
        ({"optim.lr": -1}, "above 0"),
        ({"epochs": -1}, "epochs"),
        ({"batch_size": 10, "accumulate": 3}, "multiple of accumulate"),
        ({"batch_size": 2.5}, "whole number"),
        ({"ema": 1.5}, "ema"),
        ({"model": "vit-s16", "from": "x.npz"}, "both say which network"),
        ({"tune.what": "everything"}, "'lora'"),
        ({"augment.flip": 3}, "flip"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(vitral.ConfigError, match=words):
        with_settings(None, {"data": "x", **settings}, "test")


def test_files_that_are_no_toml(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("a = = 3")
    with pytest.raises(vitral.ConfigError, match="no valid TOML"):
        read_toml(tmp_path / "x.toml")
    with pytest.raises(vitral.ConfigError, match="cannot be read"):
        read_toml(tmp_path / "y.toml")


@pytest.mark.parametrize("name", recipe_names())
def test_recipes(name: str) -> None:
    config = with_settings(None, {"data": "x", **read_toml(recipe_path(name))}, name)
    assert as_toml(config)
    assert recipe_path(name).read_text().startswith("# ")


def test_the_papers_recipes_say_what_the_paper_says() -> None:
    assert {"paper-finetune", "paper-jft", "paper-i21k", "paper-imagenet", "plain-s16", "augreg"} <= set(recipe_names())
    finetune = with_settings(None, {"data": "x", **read_toml(recipe_path("paper-finetune"))}, "x")
    assert (finetune.optim.name, finetune.optim.momentum, finetune.optim.clip) == ("sgd", 0.9, 1.0)
    assert (finetune.batch_size, finetune.image_size, finetune.optim.weight_decay) == (512, 384, 0.0)
    assert (finetune.augment.crop, finetune.augment.crop_area) == ("inception", (0.05, 1.0))
    jft = with_settings(None, {"data": "x", **read_toml(recipe_path("paper-jft"))}, "x")
    assert (jft.batch_size, jft.optim.weight_decay, jft.optim.schedule) == (4096, 0.1, "linear")
    assert jft.optim.betas == (0.9, 0.999)


def test_an_unknown_recipe() -> None:
    with pytest.raises(vitral.ConfigError, match="Did you mean 'paper-jft'"):
        recipe_path("paper-jtf")


def test_how_long_to_train_is_said_in_one_way_and_the_latest_counts() -> None:
    def length(**given: object) -> tuple[object, object, object]:
        settled = gather_layers("builtin:digits", given, recipe="digits").config
        return settled.steps, settled.epochs, settled.minutes

    assert length() == (read_toml(recipe_path("digits"))["steps"], "auto", None)
    assert length(epochs=3) == (None, 3.0, None)
    assert length(minutes=5) == (None, "auto", 5.0)
    assert length(steps=7) == (7, "auto", None)
    with pytest.raises(vitral.ConfigError, match="epochs and minutes both say"):
        length(epochs=3, minutes=5)
