"""Preprocess checks its fields and changes them."""

from typing import Any

import pytest

from vitral import ConfigError, Preprocess
from vitral.model import config
from vitral.preprocess import MAX_SIDE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(size=(8, 8, 8)), r"size must be \(height, width\).*\(8, 8, 8\)"),
        (dict(size=(8, 0)), "size must be an integer from 1.*got 0"),
        (dict(size=(20_000, 8)), "from 1 to 16384.*got 20000"),
        (dict(size=2.5), r"size must be a list of numbers.*2\.5"),
        (dict(resize="stretch"), "resize must be one of squash, crop, pad, native.*'stretch'"),
        (dict(interpolation="bicubik"), "Did you mean 'bicubic'"),
        (dict(antialias=1), "antialias must be True or False.*got 1"),
        (dict(mean=(0.5,)), r"mean must have one number per channel.*\(0\.5,\).*channels=3"),
        (dict(channels=1), r"for channels=1\)\. Pass mean and std, or use Preprocess\(\.\.\.\)\.with_channels\(1\)"),
        (dict(mean="abc"), "mean must be a list of numbers.*'abc'"),
        (dict(mean=(0.5, 0.5, "x")), "mean must be a finite number.*got 'x'"),
        (dict(std=(1, 1, 0)), "std must be a finite number above 0.*got 0"),
        (dict(std=(1, 1, float("inf"))), "std .*got inf"),
        (dict(crop_fraction=0), "crop_fraction .*above 0 and at most 1.*got 0"),
        (dict(crop_fraction=1.5), r"crop_fraction .*got 1\.5"),
        (dict(channels=0), "channels must be an integer of at least 1.*got 0"),
        (dict(background=256), "background must be an integer from 0 to 255.*got 256"),
    ],
)
def test_invalid_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Preprocess(**{"size": (8, 8), **fields})


def test_size_may_be_one_number_and_lists_become_tuples() -> None:
    preprocess = Preprocess(size=8, mean=[0.1, 0.2, 0.3])  # type: ignore[arg-type]
    assert preprocess.size == (8, 8)
    assert preprocess.mean == (0.1, 0.2, 0.3)
    assert Preprocess(**preprocess.as_dict()) == preprocess


def test_other_channels_get_the_average() -> None:
    gray = Preprocess(size=(8, 8), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)).with_channels(1)
    assert (gray.channels, gray.mean, gray.std) == (1, (pytest.approx(0.2),), (pytest.approx(0.5),))
    assert gray.with_channels(1) is gray


def test_changes_are_a_preprocess_or_some_fields() -> None:
    preprocess, other = Preprocess(size=(8, 8)), Preprocess(size=(9, 9))
    assert preprocess.with_changes(other) is other
    assert preprocess.with_changes({"size": (9, 9)}) == other
    with pytest.raises(ConfigError, match="no field 'siz'. Did you mean 'size'"):
        preprocess.with_changes({"siz": 9})
    with pytest.raises(ConfigError, match="got 3"):
        preprocess.with_changes(3)  # type: ignore[arg-type]


def test_size_limit_is_that_of_the_config() -> None:
    assert MAX_SIDE == config.MAX_SIDE
