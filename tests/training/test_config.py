"""TrainConfig: bounds of numbers, settings that contradict each other, and the resolved config."""

from dataclasses import fields
from typing import Any, get_args

import pytest

import vitral
from vitral.training.config import (
    BOUNDS,
    Masking,
    Optim,
    ResolvedLoss,
    ResolvedOptim,
    ResolvedTune,
    TrainConfig,
    as_resolved,
)
from vitral.training.settings import as_settings, setting_names, with_settings


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
        ("max_bad_fraction", "nan -1 1.1"),
        ("save_seconds", "nan -1 inf"),
        ("ema", "nan 1"),
        ("dropout", "-0.1 1 nan"),
        ("workers", "-1"),
        ("batch_size", "0 9223372036854775808"),
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
def test_numbers_out_of_bounds(name: str, values: str) -> None:
    for value in values.split():
        with pytest.raises(vitral.ConfigError, match=rf"{name} must be .*\(got "):
            with_settings(None, {"data": "x", "optim.name": "sgd", name: value}, "test")


def test_an_integer_is_quoted_as_typed() -> None:
    for value in (9223372036854775808, "9223372036854775808"):
        with pytest.raises(vitral.ConfigError, match=r"batch_size .*got 9223372036854775808\)"):
            with_settings(None, {"data": "x", "batch_size": value}, "test")


def test_every_number_has_bounds_and_they_allow_useful_extremes() -> None:
    numbers = {name for name, kind in setting_names().items() if kind is not bool and _is_numeric(kind)}
    assert {name for name in numbers if not name.startswith(("augment.", "masking."))} == set(BOUNDS)
    extremes = {"optim.clip": 0, "optim.warmup_steps": 0, "seed": 2**31, "max_bad_fraction": 1, "mix.mixup": 0}
    for name, value in extremes.items():
        with_settings(None, {"data": "x", name: value}, "test")


def _is_numeric(kind: Any) -> bool:
    return kind in (int, float) or any(map(_is_numeric, get_args(kind)))


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"batch_size": 10, "accumulate": 3}, "batch_size=10 .*accumulate=3"),
        ({"ema": 1.5}, "ema must be"),
        ({"model": "vit-s16", "from": "x.npz"}, r"model='vit-s16' and from='x\.npz'"),
        ({"augment.flip": 3}, "flip"),
        ({"network.num_classes": 5}, "network.num_classes=5 .*dataset"),
        ({"network.image_size": 56}, "Use image_size"),
        ({"network.channels": 1}, "Use channels"),
        ({"network.dropout": 0.1}, "Use dropout"),
        ({"device": "cpu:abc"}, r"device .*'cpu:abc'"),
        ({"device": "auto:1"}, r"device .*'auto:1'"),
        ({"from": ""}, "from='' is empty"),
        ({"val": " "}, "val=' ' is empty"),
        ({"val": "a\0b"}, "val=.*UTF-8"),
        ({"data": "caf\udce9"}, "data=.*UTF-8"),
        ({"keep": "last", "patience": 3}, "patience.*keep='last'"),
        ({"optim.momentum": 0.8}, r"optim\.momentum=0\.8 .*adamw.*optim\.betas"),
        ({"masking.ratio": 0.0}, r"masking\.ratio must be"),
        ({"masking.ratio": 1.5}, r"masking\.ratio must be"),
        ({"masking.masked": 0.8, "masking.swapped": 0.3}, r"masking.*0\.8 and 0\.3"),
        ({"masking.target": "x"}, r"masking\.target must be mean-color, small-patch, pixels"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(vitral.ConfigError, match=fragment):
        with_settings(None, {"data": "x", **settings}, "test")


WRONG_MASKING = [dict(ratio=0.0), dict(ratio=1.5), dict(masked=0.8, swapped=0.3), dict(masked=-0.1), dict(target="x")]


@pytest.mark.parametrize("wrong", WRONG_MASKING)
def test_masking_that_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(vitral.ConfigError, match="masking"):
        Masking(**wrong)


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_momentum_belongs_to_sgd_and_muon(name: str) -> None:
    config = with_settings(None, {"data": "x", "optim.name": name, "optim.momentum": "0.8"}, "test")
    assert config.optim == Optim(name=name, momentum=0.8)  # pyright: ignore[reportArgumentType]
    assert with_settings(config, {"optim.momentum": "none"}, "test").optim.momentum is None


def test_the_same_number_of_patches_is_corrupted_in_every_image() -> None:
    assert [Masking(ratio=ratio).corrupted_patches(16) for ratio in (0.001, 0.15, 0.5, 1.0)] == [1, 2, 8, 16]


@pytest.mark.parametrize(
    "settings",
    [
        {"augment.flip": 0.5},
        {"augment.crop": "resized"},
        {"augment.erase": 0.1},
        {"augment.randaugment": 1},
        {"mix.mixup": 0.1},
        {"mix.cutmix": 0.1},
        {"loss.smoothing": 0.1},
    ],
)
def test_an_augmented_run(settings: dict[str, Any]) -> None:
    assert not TrainConfig(data="x").is_augmented
    assert with_settings(None, {"data": "x", **settings}, "test").is_augmented


def test_a_resolved_config_has_the_same_settings_in_narrower_types() -> None:
    chosen = {"image_size": 28, "channels": 1, "resize": "squash", "batch_size": 16, "workers": 0, "epochs": 2}
    chosen |= {"precision": "float32", "device": "cpu", "model": "vit-pico7", "loss.kind": "softmax"}
    chosen |= {"optim.lr": 0.1, "optim.layer_decay": 0.5, "optim.warmup_steps": 3, "optim.clip": 2.0}
    chosen |= {"loss.class_weights": "none", "tune.what": "all", "tune.rank": 3, "network.depth": 2}
    config = with_settings(None, {"data": "x", **chosen}, "test")
    resolved = as_resolved(config)
    assert as_settings(resolved) == as_settings(config)
    assert [type(part) for part in (resolved.optim, resolved.loss, resolved.tune)] == [
        ResolvedOptim,
        ResolvedLoss,
        ResolvedTune,
    ]
    assert {item.name for item in fields(resolved)} == {item.name for item in fields(config)}


@pytest.mark.parametrize("name", ["seed", "workers", "batch_size", "steps", "patience"])
@pytest.mark.parametrize("value", [2**63 - 1, str(2**63 - 1), 10**30])
def test_large_integers_are_reported_as_passed(name: str, value: int | str) -> None:
    with pytest.raises(vitral.ConfigError, match=rf"{name} must be an integer from . to .*\(got {value}\)"):
        with_settings(None, {"data": "x", name: value}, "test")
