"""Invalid configs raise errors that name the field, the value, the rule and the fix."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from tests.conftest import small_config
from vitral import BiTConfig, ConfigError, ConvStem, DataError, ResNetStem
from vitral.model.config import MAX_SIDE, parse_size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(heads=5), "heads=5 does not divide width=48. Use heads=6."),
        (dict(width=53, heads=7), "Use a number of heads that divides 53"),
        (dict(pool="token", class_token=False), "pool='token' needs a class token.*class_token=False"),
        (dict(position="relative", position_at="every-layer"), "position_at='every-layer'.*position='relative'"),
        (dict(position="none", position_at="every-layer-shared"), "position_at='every-layer-shared'.*position='none'"),
        (dict(position="none", position_grid=(4, 4)), r"position_grid=\(4, 4\).*position='none'"),
        (dict(position="none", position_resample="bicubic"), "position_resample='bicubic'.*position='none'.*Omit"),
        (dict(position="relative", position_resample="bicubic"), "position_resample='bicubic'.*position='relative'"),
        (dict(position="sincos-2d", width=54), "position='sincos-2d' needs a width divisible by 4.*width=54"),
        (dict(position="learned-2d", width=45, heads=3), "position='learned-2d'.*width=45"),
        (dict(pool="none", norm_after_pool=True), "norm_after_pool=True.*pool='none'"),
        (dict(num_classes=0, head_bias=-10.0), "head_bias=-10.*num_classes=0"),
        (dict(image_size=18), "image_size=18, patch_size=4.*Resize, crop or pad the image to 20 x 20"),
        (dict(image_size=(16, 0)), r"image_size .*\(height, width\).*got \(16, 0\)"),
        (dict(image_size="big"), "image_size must be an integer.*got 'big'"),
        (dict(patch_size=(4, 4, 4)), r"patch_size .*got \(4, 4, 4\)"),
        (dict(position_grid=(4,)), r"position_grid .*rows, columns.*got \(4,\)"),
        (dict(pool="token", class_token=0), "class_token must be True or False.*got 0"),
        (dict(norm_after_pool="no"), "norm_after_pool must be True or False.*got 'no'"),
        (dict(norm_eps="1e-6"), "norm_eps must be a finite number.*got '1e-6'"),
        (dict(dropout=None), "dropout must be a finite number.*got None"),
        (dict(layer_scale="x"), "layer_scale must be a finite number.*got 'x'"),
        (dict(head_bias=float("nan")), "head_bias must be a finite number.*got nan"),
        (dict(depth=0), "depth must be an integer from 1 to .*got 0"),
        (dict(depth=True), "depth must be an integer.*got True"),
        (dict(width=48.0), r"width must be an integer.*got 48\.0"),
        (dict(registers=-1), "registers must be an integer from 0.*got -1"),
        (dict(representation=0), "representation must be an integer from 1.*got 0"),
        (dict(channels=10_001), "channels must be an integer from 1 to 10000.*got 10001"),
        (dict(dropout=1.0), r"dropout .*at least 0 and below 1.*got 1\.0"),
        (dict(drop_path=-0.1), r"drop_path .*got -0\.1"),
        (dict(norm_eps=0.0), r"norm_eps .*at least 1e-30.*got 0\.0"),
        (dict(pool="men"), "pool must be one of token, mean, token.mean, map, none.*'men'.*Did you mean 'mean'"),
        (dict(pool="gap"), "Did you mean 'mean'"),
        (dict(position="sincos"), "Did you mean 'sincos-2d'"),
        (dict(activation="swish"), "activation must be one of gelu-tanh, gelu, relu.*got 'swish'"),
        (dict(attention="axal"), "Did you mean 'axial'"),
        (dict(class_token="yes"), "class_token .*got 'yes'"),
        (dict(stem="resnet"), "stem must be a ResNetStem or a ConvStem.*got 'resnet'"),
    ],
)
def test_invalid_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**fields)


@pytest.mark.parametrize(
    ("stem", "fields", "message"),
    [
        (ResNetStem, dict(stages=(0, 1)), "stages must be an integer from 1.*got 0"),
        (ResNetStem, dict(stages=3), "stages must be a tuple.*got 3"),
        (ResNetStem, dict(width_factor=0), "width_factor .*above 0.*got 0"),
        (ResNetStem, dict(width_factor="1"), "width_factor .*got '1'"),
        (ResNetStem, dict(width_factor=0.3), r"width_factor=0\.3 .*19 channels.*multiple of 32.*Use 0\.5"),
        (ResNetStem, dict(width_factor=0.01), r"0 channels.*Use 0\.5"),
        (ConvStem, dict(widths=64), "widths must be a tuple.*got 64"),
        (ConvStem, dict(widths=()), "widths is empty"),
        (ConvStem, dict(widths=(12,)), r"multiples of 8 with norm='group'.*\(12,\)"),
        (ConvStem, dict(norm="layer"), "norm must be one of group, batch.*got 'layer'"),
        (BiTConfig, dict(stages=(1, 1, 1, 1), width_factor=0.75), r"48 channels.*multiple of 32"),
        (BiTConfig, dict(stages=(1, 1, 1)), r"stages must be 4 integers.*got \(1, 1, 1\)"),
    ],
)
def test_invalid_stems_and_baselines(stem: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stem(**fields)


def test_whole_width_factors_become_integers() -> None:
    assert ResNetStem(width_factor=2.0) == ResNetStem(width_factor=2)
    assert type(ResNetStem(width_factor=2.0).width_factor) is int
    assert ResNetStem(stages=(1,), width_factor=0.5).out_channels == 128
    assert BiTConfig(stages=(1, 1, 1, 1), width_factor=0.5).width == 1024


def test_image_size_that_does_not_fit_suggests_a_size_and_a_patch_size() -> None:
    config = small_config(patch_size=16, image_size=224)
    with pytest.raises(DataError, match="225 x 220 pixels.*Resize, crop or pad the image to 224 x 224.*patch_size.*15"):
        config.grid(225, 220)


def test_much_smaller_patch_sizes_are_not_suggested() -> None:
    with pytest.raises(DataError, match=r"or use a patch_size that divides it\.$"):
        small_config(patch_size=16, image_size=224).grid(227, 227)


def test_square_position_grid_may_be_a_number() -> None:
    assert small_config(position_grid=3).table_grid == (3, 3)


def test_stem_decides_the_grid() -> None:
    config = small_config(stem=ResNetStem(stages=(1, 1)), patch_size=2, image_size=64)
    assert config.feature_map(57, 64) == (8, 8)  # halved three times, rounding up
    assert config.grid(57, 64) == (4, 4)
    with pytest.raises(DataError, match="feature map of 9 x 8"):
        config.grid(65, 64)


def test_derived_values_follow_a_changed_field() -> None:
    config = small_config()
    wider = replace(config, width=96, image_size=(16, 32), pool="mean", registers=2)
    assert (wider.head_dim, wider.table_grid, wider.has_class_token, wider.extra_tokens) == (32, (4, 8), False, 2)


def test_lists_from_files_become_tuples() -> None:
    config = small_config(image_size=[16, 32], position_grid=[2, 2], stem=None)
    assert config.image_size == (16, 32)
    assert config.table_grid == (2, 2)


def test_numpy_numbers_become_python_numbers() -> None:
    config = small_config(width=np.int64(96), dropout=np.float32(0.5), image_size=(np.int32(16), 32))
    assert (config.width, config.dropout, config.image_size) == (96, 0.5, (16, 32))
    assert type(config.width) is int
    assert type(config.image_size[0]) is int


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        small_config().width = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [("384", (384, 384)), ("384x256", (384, 256)), (" 64X32 ", (64, 32)), (str(MAX_SIDE), (MAX_SIDE, MAX_SIDE))],
)
def test_parse_size(text: str, size: tuple[int, int]) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "0", "0x4", "-4", "1.5", "4x", "1x2x3", "16385", "9" * 30, "³", "big"])
def test_parse_size_names_what_it_got(text: str) -> None:
    with pytest.raises(ConfigError, match="384x256") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
