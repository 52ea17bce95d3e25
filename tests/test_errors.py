"""Checks return plain numbers, and their errors name the field, the value and the rule."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from vitral import ViTConfig
from vitral.errors import (
    ConfigError,
    check_choice,
    check_field_names,
    check_int,
    check_number,
    check_type,
    did_you_mean,
    first_line,
    short_repr,
)


def test_check_int_returns_python_integers() -> None:
    assert check_int("steps", 3, minimum=3, maximum=3) == 3
    assert type(check_int("steps", np.int64(3))) is int


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (0, dict(minimum=1), "steps must be an integer of at least 1 .got 0"),
        (9, dict(maximum=8), "of at most 8 .got 9"),
        (9, dict(minimum=1, maximum=8), "from 1 to 8 .got 9"),
        (9223372036854775808, dict(maximum=8), "got 9223372036854775808"),
        (2.0, {}, r"must be an integer .got 2\.0"),
        (True, {}, "got True"),
        ("2", {}, "got '2'"),
        (None, {}, "got None"),
        (float("nan"), {}, "got nan"),
    ],
)
def test_check_int_refuses(value: object, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_int("steps", value, **limits)


def test_integers_too_long_to_print() -> None:
    with pytest.raises(ConfigError, match="got an integer of 16610 bits"):
        check_int("steps", 10**5000, maximum=8)
    with pytest.raises(ConfigError, match="got an integer of 16610 bits"):
        check_number("rate", 10**5000)


def test_check_number_returns_floats() -> None:
    assert check_number("rate", 1, minimum=1, maximum=1) == 1
    assert type(check_number("rate", np.float32(0.5), above=0, below=1)) is float


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (-0.1, dict(minimum=0, below=1), r"rate .* of at least 0 and below 1 .got -0\.1"),
        (1, dict(minimum=0, below=1), "below 1 .got 1"),
        (0, dict(above=0, maximum=1), "above 0 and at most 1 .got 0"),
        (1.5, dict(above=0, maximum=1), r"got 1\.5"),
        (float("inf"), {}, "finite number .got inf"),
        (float("nan"), dict(minimum=0), "got nan"),
        (1e39, {}, "got 1e\\+39"),
        (10**400, {}, "finite number .got 1000"),
        (False, {}, "got False"),
        ("0.1", {}, r"got '0\.1'"),
        (1j, {}, "got 1j"),
    ],
)
def test_check_number_refuses(value: object, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_number("rate", value, **limits)


def test_check_choice_suggests_the_closest() -> None:
    check_choice("pool", "mean", ["token", "mean"])
    with pytest.raises(ConfigError, match="pool must be one of token, mean .got 'men'.*Did you mean 'mean'"):
        check_choice("pool", "men", ["token", "mean"])
    with pytest.raises(ConfigError, match="Did you mean 'mean'"):
        check_choice("pool", "gap", ["token", "mean"], synonyms={"gap": "mean"})
    with pytest.raises(ConfigError, match=r"got \['mean'\]"):
        check_choice("pool", ["mean"], ["token", "mean"])


def test_check_type_names_the_expected_types() -> None:
    check_type("config", 3, str, int)
    with pytest.raises(ConfigError, match="config must be a ViTConfig .got 'vit-b16'.*vitral.create"):
        check_type("config", "vit-b16", ViTConfig, hint="Pass names to vitral.create.")


def test_check_field_names_suggests_the_closest() -> None:
    check_field_names(["width", "depth"], of=ViTConfig)
    with pytest.raises(ConfigError, match="ViTConfig has no field 'num_class'. Did you mean 'num_classes'"):
        check_field_names(["num_class"], of=ViTConfig)
    with pytest.raises(ConfigError, match="no field.*Use one of: width, depth"):
        check_field_names(["???"], of=ViTConfig)


@pytest.mark.parametrize("value", ["x" * 10_000, list(range(10_000)), {n: n for n in range(10_000)}, torch.zeros(9999)])
def test_long_values_are_shortened(value: object) -> None:
    assert len(short_repr(value)) < 200


@pytest.mark.parametrize(
    "value",
    [torch.ones(3, 4), [torch.ones(3, 4)], np.ones((3, 4)), {"a": torch.ones(3, 4)}, OrderedDict(a=torch.ones(3, 4))],
)
def test_errors_never_print_tensors(value: object) -> None:
    assert "1." not in short_repr(value)
    assert "\n" not in short_repr(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_helpers() -> None:
    assert did_you_mean("ViT-B17", ["vit-b16"]) == "Did you mean 'vit-b16'?"
    assert did_you_mean("???", ["vit-b16"]) is None
    assert first_line(ValueError("One.\nTwo.")) == "One"
    assert first_line(ValueError()) == "ValueError"
