"""Names in all spellings, and the parameter counts of the reference implementation.

tests/model/test_cost.py runs every named model.
"""

from typing import get_args

import pytest
import torch

import vitral
from vitral.model.network import Baseline
from vitral.model.sizes import NAMES, canonical_name, named_config

PARAMETERS = {
    "ViT-Ti_16": 5_717_416,
    "ViT-S_16": 22_050_664,
    "ViT-S_32": 22_878_952,
    "ViT-B_8": 86_576_872,
    "ViT-B_16": 86_567_656,
    "ViT-B_32": 88_224_232,
    "ViT-L_16": 304_326_632,
    "ViT-L_32": 306_535_400,
    "ViT-H_14": 632_045_800,
    "R+ViT-Ti_16": 6_337_704,
    "R26+ViT-S_32": 36_431_912,
    "R26+ViT-B_32": 101_383_976,
    "R50+ViT-B_16": 98_659_112,
    "R50+ViT-L_32": 328_994_856,
}
PARAMETERS_WITHOUT_CLASS_TOKEN = {
    "ViT-S_16": 22_049_896,
    "ViT-S_32": 22_878_184,
    "ViT-B_16": 86_566_120,
    "ViT-B_32": 88_222_696,
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def create_on_meta(name: str, **overrides: object) -> vitral.ViT:
    with torch.device("meta"):
        return vitral.create(name, **overrides)


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_parameter_counts_of_the_reference(name: str, parameters: int) -> None:
    assert count(create_on_meta(name)) == parameters


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS_WITHOUT_CLASS_TOKEN.items())
def test_parameter_counts_with_mean_pooling(name: str, parameters: int) -> None:
    assert count(create_on_meta(name, pool="mean")) == parameters


@pytest.mark.parametrize(("pool", "parameters"), [("token", 21_390), ("none", 21_370)])
def test_parameter_counts_of_the_reference_test_model(pool: str, parameters: int) -> None:
    config = vitral.ViTConfig(width=10, depth=1, heads=2, mlp_width=10, patch_size=16, pool=pool, dropout=0.1)
    assert count(vitral.ViT(config)) == parameters


def test_parameter_count_with_the_head_of_imagenet_21k() -> None:
    assert count(create_on_meta("vit-b16", num_classes=21_843, representation=768)) == 103_186_515
    assert count(create_on_meta("vit-b16", num_classes=21_843)) == 102_595_923


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("vit-b16", "vit-b16"),
        ("ViT-B/16", "vit-b16"),
        ("ViT-B_16", "vit-b16"),
        ("VIT B 16", "vit-b16"),
        ("B/16", "vit-b16"),
        ("vit_base_patch16", "vit-b16"),
        ("ViT-Large/32", "vit-l32"),
        ("Ti/16", "vit-ti16"),
        ("ViT-g/14", "vit-g14"),
        ("ViT-G/14", "vit-G14"),
        ("r50-vit-b16", "r50-vit-b16"),
        ("R50+ViT-B/16", "r50-vit-b16"),
        ("R50+ViT-B_16", "r50-vit-b16"),
        ("R50_L_32", "r50-vit-l32"),
        ("R+ViT-Ti/16", "r-vit-ti16"),
        ("R_Ti_16", "r-vit-ti16"),
        ("  vit-s16 ", "vit-s16"),
    ],
)
def test_all_spellings_of_the_paper(spelling: str, name: str) -> None:
    assert canonical_name(spelling) == name


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ("vit_base_patch16_224", "vit-b16"),
        ("vti-b16", "vit-b16"),
        ("resnet50-vit-b16", "r50-vit-b16"),
        ("vit-nan4", "vit-nano4"),
    ],
)
def test_unknown_name_suggests_the_closest(wrong: str, suggestion: str) -> None:
    with pytest.raises(vitral.ConfigError, match=f"Did you mean '{suggestion}'"):
        canonical_name(wrong)


def test_unnamed_patch_size_suggests_how_to_create_it() -> None:
    message = r"vit-l14, vit-l16, vit-l32, or create\('vit-l32', patch_size=7\)"
    with pytest.raises(vitral.ConfigError, match=message):
        canonical_name("ViT-L/7")
    assert vitral.create("vit-nano4", patch_size=2).config.table_grid == (16, 16)


@pytest.mark.parametrize("wrong", ["", "???", "1" * 500, "vit\n"])
def test_nonsense_points_to_the_list(wrong: str) -> None:
    with pytest.raises(vitral.ConfigError, match="vitral models"):
        canonical_name(wrong)


def test_baseline_type_lists_every_bit() -> None:
    assert list(get_args(Baseline)) == [name for name in NAMES if name.startswith("bit-")]


def test_overrides_replace_fields_of_the_name() -> None:
    config = named_config("vit-b16", depth=3, image_size=384, pool="mean")
    assert (config.depth, config.width, config.table_grid) == (3, 768, (24, 24))


def test_unknown_override_suggests_the_closest() -> None:
    with pytest.raises(vitral.ConfigError, match="no field 'num_class'. Did you mean 'num_classes'"):
        vitral.create("vit-b16", num_class=10)


def test_meta_device_allocates_nothing() -> None:
    assert all(parameter.is_meta for parameter in create_on_meta("vit-G14").parameters())
