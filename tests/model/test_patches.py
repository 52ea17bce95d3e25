"""The patch embedding equals a strided convolution; the stems equal their references."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitral
from benchmarks.peers import repair_torchvision
from tests.conftest import small_config, small_model
from vitral import ConvStem, ResNetStem
from vitral.model.patches import StandardizedConv, cut, pad_same


@pytest.mark.parametrize("patch", [4, (2, 8), (8, 2)])
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_patch_embedding_equals_a_convolution(patch: int | tuple[int, int], channels: int) -> None:
    patches = small_model(patch_size=patch, channels=channels).patches
    images = torch.randn(2, channels, 16, 32)
    kernel = patches.project.weight.unflatten(1, (channels, *patches.patch_hw))
    convolved = F.conv2d(images, kernel, patches.project.bias, stride=patches.patch_hw)
    torch.testing.assert_close(patches(images), convolved.flatten(2).transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_patches_are_cut_row_by_row() -> None:
    image = torch.arange(3.0 * 4 * 6).reshape(1, 3, 4, 6)
    patches = cut(image, (2, 3))
    assert patches.shape == (1, 4, 3, 2, 3)
    for patch in range(4):
        row, column = divmod(patch, 2)
        expected = image[0, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        assert torch.equal(patches[0, patch], expected)


@pytest.mark.parametrize("size", range(1, 24))
@pytest.mark.parametrize(("kernel", "stride"), [(7, 2), (3, 2), (3, 1), (1, 2), (1, 1)])
def test_same_padding_follows_the_size(size: int, kernel: int, stride: int) -> None:
    """TensorFlow's rule: ceil(size / stride) outputs, as little padding as possible, the odd pixel at the end."""
    padded = pad_same(torch.ones(1, 1, size, size), kernel, stride)
    outputs = -(-size // stride)
    needed = max((outputs - 1) * stride + kernel, size) - size
    assert padded.shape[2] == size + needed
    ones = padded[0, 0, size // 2 + needed // 2].nonzero().flatten()
    assert ones[0] == needed // 2  # the smaller half comes first
    assert F.conv2d(padded, torch.ones(1, 1, kernel, kernel), stride=stride).shape[2] == outputs


def test_even_sizes_pad_asymmetrically() -> None:
    assert pad_same(torch.ones(1, 1, 224, 224), 7, 2)[0, 0, 100].tolist()[:3] == [0, 0, 1]
    assert pad_same(torch.ones(1, 1, 224, 224), 7, 2)[0, 0, 100].tolist()[-4:] == [1, 0, 0, 0]
    assert pad_same(torch.ones(1, 1, 112, 112), 3, 2)[0, 0, 50].tolist()[0] == 1


def test_convolution_standardizes_its_weights() -> None:
    conv = StandardizedConv(4, 6, 3)
    nn.init.normal_(conv.weight, mean=2, std=3)
    images = torch.randn(2, 4, 8, 8)
    weight = conv.weight.flatten(1)
    mean, deviation = weight.mean(1, keepdim=True), weight.var(1, unbiased=False, keepdim=True).sqrt()
    standard = ((weight - mean) / (deviation + 1e-5)).view_as(conv.weight)
    torch.testing.assert_close(conv(images), F.conv2d(images, standard, padding=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stages", [(), (1,), (1, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("width_factor", [0.5, 1, 2])
@pytest.mark.parametrize("size", [(64, 64), (57, 70)])
def test_stem_gives_the_feature_map_of_its_config(
    stages: tuple[int, ...], width_factor: float, size: tuple[int, int]
) -> None:
    stem = ResNetStem(stages=stages, width_factor=width_factor)
    with torch.device("meta"):  # only shapes matter
        model, image = vitral.ViT(small_config(stem=stem, patch_size=1, image_size=size)), torch.empty(1, 3, *size)
    assert model.patches.stem is not None
    maps = model.patches.stem(image)
    assert maps.shape[1:] == (stem.out_channels, *model.config.feature_map(*size))
    assert model(image).shape == (1, 7)


def test_conv_stem_equals_torchvision() -> None:
    repair_torchvision()
    from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

    widths = (8, 16)
    model = small_model(stem=ConvStem(widths=widths, norm="batch"), patch_size=1, image_size=16)
    configs = [ConvStemConfig(out_channels=width, kernel_size=3, stride=2) for width in widths]
    peer = VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=80, conv_stem_configs=configs
    ).eval()
    theirs: dict[str, Tensor] = {}
    for index in range(len(widths)):
        ours = model.patches.stem[index]
        for number, module in enumerate((ours[0], ours[1])):
            for name, tensor in module.state_dict().items():
                if "running_var" in name:
                    tensor.uniform_(0.5, 2)
                theirs[f"conv_bn_relu_{index}.{number}.{name}"] = tensor
    theirs["conv_last.weight"] = model.patches.project.weight[:, :, None, None]
    theirs["conv_last.bias"] = model.patches.project.bias
    peer.conv_proj.load_state_dict(theirs, strict=True)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(
        model.patches(images), peer.conv_proj(images).flatten(2).transpose(1, 2), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("widths", [(8,), (8, 16, 24)])
def test_conv_stem_on_odd_sizes(widths: tuple[int, ...]) -> None:
    model = small_model(stem=ConvStem(widths=widths), patch_size=1, image_size=(19, 27))
    assert model(torch.randn(2, 3, 19, 27)).shape == (2, 7)


def test_narrow_resnet_stem_survives_googles_layout(tmp_path: Path) -> None:
    """A root of 32 channels has one channel per group, as in Google's code."""
    model = small_model(
        stem=ResNetStem(stages=(1, 1), width_factor=0.5), patch_size=1, image_size=32, activation="gelu-tanh"
    )
    assert model.patches.stem.root_norm.num_groups == model.patches.stem.root.out_channels == 32
    vitral.save(model, tmp_path / "narrow.npz", dialect="google")
    loaded = vitral.load(tmp_path / "narrow.npz").model
    assert loaded.config.stem == model.config.stem
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(images), model(images))
