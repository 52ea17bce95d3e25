"""Settings from TOML, the command line and Python: the same names, checked alike."""

from pathlib import Path
from typing import Any, get_args

import pytest

import vitral
from tests.conftest import small_model
from vitral.training.bounds import BOUNDS
from vitral.training.build import build_model
from vitral.training.config import (
    TrainConfig,
    Tune,
    as_settings,
    as_toml,
    field_texts,
    read_toml,
    recipe_names,
    recipe_path,
    setting_names,
    with_settings,
)
from vitral.training.masking import Masking
from vitral.training.settings import collect_settings, flatten
from vitral.training.tuning import choose_parameters


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
        ({"network.num_classes": 5}, "num_classes=5: the number of classes is that of the data"),
        ({"network.image_size": 56}, "Use image_size"),
        ({"network.channels": 1}, "Use channels"),
        ({"network": 5}, "network=5 must be a table"),
        ({"optim": 5}, "optim is a section, such as optim.name"),
        ({"device": "cpu:abc"}, "device='cpu:abc' must be one of"),
        ({"device": "auto:1"}, "must be one of"),
        ({"from": ""}, "from='' names nothing"),
        ({"val": " "}, "val=' ' names nothing"),
        ({"val": "a\0b"}, "UTF-8"),
        ({"data": "caf\udce9"}, "UTF-8"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(vitral.ConfigError, match=words):
        with_settings(None, {"data": "x", **settings}, "test")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("epochs", "0 nan inf -inf"),
        ("minutes", "nan inf 0"),
        ("steps", "0 -1 1e12"),
        ("seed", "-1 2147483649 99999999999999999999"),
        ("image_size", "0 16385 70000 1e9 28x70000"),
        ("val_fraction", "0 0.5 0.99 nan"),
        ("patience", "-1"),
        ("most_bad", "nan -1 1.1"),
        ("save_seconds", "nan -1 inf"),
        ("ema", "nan 1"),
        ("dropout", "-0.1 1 nan"),
        ("workers", "-1"),
        ("optim.lr", "0 nan inf"),
        ("optim.betas", "2,3 0.9,1 -1,0.9 nan,0.9"),
        ("optim.eps", "-1 0 nan"),
        ("optim.weight_decay", "-1 nan"),
        ("optim.momentum", "-5 1"),
        ("optim.clip", "-1 nan inf"),
        ("optim.end_lr", "-3"),
        ("optim.warmup_steps", "-5"),
        ("optim.layer_decay", "0 1.1 nan"),
        ("loss.smoothing", "5 -1 nan 1"),
        ("mix.mixup", "-1 nan inf"),
        ("mix.cutmix", "-2"),
        ("tune.rank", "0"),
        ("tune.blocks", "0"),
    ],
)
def test_numbers_out_of_their_bounds(name: str, values: str) -> None:
    for value in values.split():
        with pytest.raises(vitral.ConfigError, match=rf"{name}=.* must be "):
            with_settings(None, {"data": "x", name: value}, "test")


def test_every_number_has_bounds_and_they_allow_the_ends_that_make_sense() -> None:
    numbers = {name for name, kind in setting_names().items() if kind is not bool and _is_numeric(kind)}
    assert {name for name in numbers if not name.startswith(("augment.", "masking."))} == set(BOUNDS)
    for name, value in {"optim.clip": 0, "optim.warmup_steps": 0, "seed": 2**31, "most_bad": 1, "mix.mixup": 0}.items():
        with_settings(None, {"data": "x", name: value}, "test")


def _is_numeric(kind: Any) -> bool:
    return kind in (int, float) or any(map(_is_numeric, get_args(kind)))


def test_paths_and_the_word_none_arrive(tmp_path: Path) -> None:
    said = {"data": "x", "val": Path("a"), "network.pool": "none", "network.position": "NONE", "network.stem": "none"}
    config = with_settings(None, said, "test")
    assert config.val == "a"
    assert config.network == {"pool": "none", "position": "none", "stem": None}
    assert with_settings(None, {"data": "x", "from_weights": Path("b")}, "test").from_weights == "b"
    (tmp_path / "x.toml").write_text(as_toml(config))
    assert with_settings(None, read_toml(tmp_path / "x.toml"), "x") == config


def test_any_character_of_a_path_comes_back(tmp_path: Path) -> None:
    data = "".join(map(chr, range(1, 128))) + "\x85\u2028é"
    (tmp_path / "x.toml").write_text(as_toml(TrainConfig(data=data)), encoding="utf-8")
    assert read_toml(tmp_path / "x.toml")["data"] == data


@pytest.mark.parametrize("what", [{"x": 1}, {"kind": "resnet", "x": 1}, {"kind": "conv"}])
def test_stems_that_cannot_be(what: dict[str, Any]) -> None:
    said = {"data": "x", "model": "vit-pico7", "image_size": 28, "channels": 1, "network.stem": what}
    with pytest.raises(vitral.ConfigError, match="must have kind='resnet'"):
        build_model(with_settings(None, said, "test"), classes=3)


def test_training_needs_one_answer_a_picture() -> None:
    said = {"data": "x", "model": "vit-pico7", "image_size": 28, "channels": 1, "network.pool": "none"}
    with pytest.raises(vitral.ConfigError, match="answers for every token"):
        build_model(with_settings(None, said, "test"), classes=3)


def test_more_blocks_than_the_network_has() -> None:
    with pytest.raises(vitral.ConfigError, match="tune.blocks=3 must be from 1 to the network's 2 blocks"):
        choose_parameters(small_model(), Tune(what="last-blocks", blocks=3))


def test_files_that_are_no_toml(tmp_path: Path) -> None:
    for text in ("a = = 3", f"seed = {'9' * 5000}", f"a = {'[' * 5000}"):
        (tmp_path / "x.toml").write_text(text)
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


@pytest.mark.parametrize(
    ("name", "steps", "drops", "warmup", "mixup"),
    [
        ("bit-small", 500, [200, 300, 400], 100, 0.0),
        ("bit-medium", 10_000, [3000, 6000, 9000], 500, 0.1),
        ("bit-large", 20_000, [6000, 12_000, 18_000], 500, 0.1),
    ],
)
def test_the_hyperrule(name: str, steps: int, drops: list[int], warmup: int, mixup: float) -> None:
    config = with_settings(None, {"data": "x", **read_toml(recipe_path(name))}, name)
    assert (config.steps, config.batch_size, config.optim.warmup_steps) == (steps, 512, warmup)
    assert [round(part * steps) for part in config.optim.stairs] == drops
    assert (config.optim.name, config.optim.lr, config.optim.momentum) == ("sgd", 0.003, 0.9)
    assert config.mix.mixup == mixup
    assert config.image_size == 480
    assert round((480**2 / config.augment.crop_area[0]) ** 0.5) == 512


def test_masked_patches_as_in_the_paper() -> None:
    config = with_settings(None, {"data": "x", **read_toml(recipe_path("paper-masked"))}, "x")
    assert (config.steps, config.batch_size, config.model) == (1_000_000, 4096, "vit-b16")
    assert (config.optim.name, config.optim.lr, config.optim.warmup_steps) == ("adam", 2e-4, 10_000)
    assert config.optim.schedule == "cosine"
    assert config.masking == Masking(target="mean-colour", ratio=0.5, masked=0.8, swapped=0.1)


def test_an_unknown_recipe() -> None:
    with pytest.raises(vitral.ConfigError, match="Did you mean 'paper-jft'"):
        recipe_path("paper-jtf")


def test_how_long_to_train_is_said_in_one_way_and_the_latest_counts() -> None:
    def length(**given: object) -> tuple[object, object, object]:
        settled = collect_settings("builtin:digits", given, recipe="digits").config
        return settled.steps, settled.epochs, settled.minutes

    assert length() == (read_toml(recipe_path("digits"))["steps"], "auto", None)
    assert length(epochs=3) == (None, 3.0, None)
    assert length(minutes=5) == (None, "auto", 5.0)
    assert length(steps=7) == (7, "auto", None)
    with pytest.raises(vitral.ConfigError, match="epochs and minutes both say"):
        length(epochs=3, minutes=5)


def test_a_stem_is_one_setting_however_it_is_said() -> None:
    stem = {"kind": "convolutions", "widths": [32, 64]}
    assert flatten({"network": {"stem": stem}}) == flatten({"network.stem": stem}) == {"network.stem": stem}


@pytest.mark.parametrize("name", ["bit-r50x1", "R50x1", "BiT-M-R101x3"])
def test_a_recipe_made_for_vits_leaves_a_bit_its_own_fields(name: str) -> None:
    settled = collect_settings("builtin:digits", {"model": name}, recipe="small")
    assert settled.config.network == {}
    assert collect_settings("builtin:digits", {"model": "vit-pico7"}, recipe="small").config.network == {"pool": "mean"}
