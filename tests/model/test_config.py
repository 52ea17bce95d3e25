"""Settings that cannot be are refused with the field, the value, the rule and the way out."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from tests.conftest import small_config
from vitral import ConfigError, ConvStem, DataError, ResNetStem


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(heads=5), "heads=5 does not divide width=48. Use heads=6."),
        (dict(width=53, heads=7), "Use a number of heads that divides 53"),
        (dict(pool="token", class_token=False), "pool='token' needs the class token that class_token=False"),
        (dict(position="relative", position_at="every-layer"), "position='relative'.*position_at='every-layer'"),
        (dict(position="none", position_at="every-layer-shared"), "position='none'.*position_at='every-layer-shared'"),
        (dict(position="none", position_grid=(4, 4)), "position='none'.*position_grid"),
        (dict(position="sincos-2d", width=54), "position='sincos-2d' needs a width that 4 divides.*width=54"),
        (dict(position="learned-2d", width=45, heads=3), "position='learned-2d'.*width=45"),
        (dict(pool="none", norm_after_pool=True), "norm_after_pool=True.*pool='none'"),
        (dict(num_classes=0, head_bias=-10.0), "num_classes=0.*head_bias=-10"),
        (dict(image_size=18), "image_size=18, patch_size=4.*Resize, crop or pad the image to 20 x 20"),
        (dict(image_size=(16, 0)), "image_size="),
        (dict(image_size="big"), "image_size='big' must be a whole number"),
        (dict(patch_size=(4, 4, 4)), "patch_size="),
        (dict(position_grid=(4,)), "position_grid=.*rows, columns"),
        (dict(pool="token", class_token=0), "class_token=0 must be True or False"),
        (dict(norm_after_pool="no"), "norm_after_pool='no' must be True or False"),
        (dict(norm_eps="1e-6"), "norm_eps='1e-6' must be a number"),
        (dict(dropout=None), "dropout=None must be a number"),
        (dict(layer_scale="x"), "layer_scale='x' must be a number"),
        (dict(head_bias=float("nan")), "head_bias=nan must be a number"),
        (dict(depth=0), "depth=0 must be a whole number of at least 1"),
        (dict(width=48.0), "width=48.0 must be a whole number"),
        (dict(registers=-1), "registers=-1 must be a whole number of at least 0"),
        (dict(representation=0), "representation=0"),
        (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (dict(drop_path=-0.1), "drop_path=-0.1"),
        (dict(norm_eps=0.0), "norm_eps=0.0 must be above 0"),
        (dict(pool="men"), "pool='men' must be one of token, mean, map, none. Did you mean 'mean'"),
        (dict(position="sincos"), "Did you mean 'sincos-2d'"),
        (dict(activation="swish"), "activation='swish' must be one of gelu-tanh, gelu, relu"),
        (dict(class_token="yes"), "class_token='yes'"),
        (dict(stem="resnet"), "stem='resnet' must be None, a ResNetStem or a ConvStem"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**fields)


@pytest.mark.parametrize(
    ("stem", "fields", "message"),
    [
        (ResNetStem, dict(stages=(0, 1)), "stages=\\(0, 1\\)"),
        (ResNetStem, dict(stages=3), "stages=3 must be a tuple"),
        (ConvStem, dict(widths=64), "widths=64 must be a tuple"),
        (ResNetStem, dict(width_factor=0), "width_factor=0"),
        (ConvStem, dict(widths=()), "widths=\\(\\)"),
        (ConvStem, dict(widths=(12,)), "multiples of 8 with norm='group'"),
        (ConvStem, dict(norm="layer"), "norm='layer' must be one of group, batch"),
    ],
)
def test_refusals_of_stems(stem: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stem(**fields)


def test_a_size_that_the_patch_does_not_divide_names_both_ways_out() -> None:
    config = small_config(patch_size=16, image_size=224)
    with pytest.raises(DataError, match="225 x 220 pixels.*Resize, crop or pad the image to 224 x 224.*patch_size.*15"):
        config.grid(225, 220)


def test_a_patch_size_that_would_be_far_too_small_is_not_suggested() -> None:
    with pytest.raises(DataError, match=r"or use a patch_size that divides it\.$"):
        small_config(patch_size=16, image_size=224).grid(227, 227)


def test_a_square_position_grid_may_be_a_number() -> None:
    assert small_config(position_grid=3).table_grid == (3, 3)


def test_with_a_stem_the_feature_map_counts() -> None:
    config = small_config(stem=ResNetStem(stages=(1, 1)), patch_size=2, image_size=64)
    assert config.feature_map(57, 64) == (8, 8)  # halved three times, rounding up
    assert config.grid(57, 64) == (4, 4)
    with pytest.raises(DataError, match="feature map of 9 x 8"):
        config.grid(65, 64)


def test_derived_values_follow_a_changed_field() -> None:
    config = small_config()
    wider = replace(config, width=96, image_size=(16, 32), pool="mean", registers=2)
    assert (wider.head_dim, wider.table_grid, wider.has_class_token, wider.extra_tokens) == (32, (4, 8), False, 2)


def test_lists_as_they_come_from_files_are_taken() -> None:
    config = small_config(image_size=[16, 32], position_grid=[2, 2], stem=None)
    assert config.image_size == (16, 32)
    assert config.table_grid == (2, 2)


def test_numpys_numbers_become_pythons() -> None:
    config = small_config(width=np.int64(96), dropout=np.float32(0.5), image_size=(np.int32(16), 32))
    assert (config.width, config.dropout, config.image_size) == (96, 0.5, (16, 32))
    assert type(config.width) is int
    assert type(config.image_size[0]) is int


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        small_config().width = 1  # type: ignore[misc]
