"""What loading does besides finding names: the report, the asked changes, the guesses, memory and precision."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vitral
from tests.conftest import small_model
from vitral import Checkpoint, LoadReport, Preprocess
from vitral.model.patches import cut
from vitral.weights.resizing import resample_kernel

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"


def report_of(checkpoint: Checkpoint) -> LoadReport:
    assert checkpoint.report is not None
    return checkpoint.report


@pytest.fixture
def google(tmp_path: Path) -> Path:
    path = tmp_path / "google.npz"
    vitral.save(small_model(activation="gelu-tanh", representation=20), path, dialect="google")
    return path


def same_tensors(report: LoadReport, names: Any) -> None:
    """Every tensor of the file is in exactly one list."""
    listed = [*report.taken, *report.renamed, *report.resized, *report.ignored]
    assert sorted(listed) == sorted(names)


def test_every_tensor_is_in_one_list(google: Path) -> None:
    with np.load(google) as arrays:
        names = list(arrays)
    for asked in ({}, {"num_classes": 3}, {"image_size": 24, "representation": None, "num_classes": 5}):
        same_tensors(report_of(vitral.load(google, **asked)), names)


def test_a_fresh_head_is_zero_and_says_so(google: Path) -> None:
    loaded = vitral.load(google, num_classes=3)
    assert not loaded.model.head.weight.any()  # type: ignore[operator]
    assert loaded.model.head.weight.shape == (3, 20)  # type: ignore[union-attr]
    report = report_of(loaded)
    assert set(report.fresh) == {"head.weight", "head.bias"}
    assert report.ignored["head/kernel"] == "num_classes asks for a fresh head"
    assert loaded.labels is None


def test_the_pre_logits_can_be_dropped(google: Path) -> None:
    loaded = vitral.load(google, num_classes=3, representation=None)
    assert loaded.model.config.representation is None
    assert "pre_logits/kernel" in report_of(loaded).ignored


def test_a_fresh_head_starts_with_its_bias(google: Path) -> None:
    loaded = vitral.load(google, num_classes=3, head_bias=-10.0)
    assert torch.equal(loaded.model.head.bias, torch.full((3,), -10.0))  # type: ignore[union-attr]


def test_parts_that_are_asked_for_are_fresh(google: Path) -> None:
    loaded = vitral.load(google, registers=4, layer_scale=0.1)
    report = report_of(loaded)
    assert "registers" in report.fresh
    assert "blocks.1.after_mlp.scale" in report.fresh
    assert torch.equal(loaded.model.blocks[0].after_mlp.scale, torch.full((48,), 0.1))  # type: ignore[union-attr]
    assert loaded.model.class_token is not None
    assert torch.equal(loaded.model.class_token, vitral.load(google).model.class_token)  # type: ignore[arg-type]


def test_an_all_zero_head_is_flagged(tmp_path: Path) -> None:
    model = small_model(activation="gelu-tanh")
    with torch.no_grad():
        model.head.weight.zero_()  # type: ignore[operator]
        model.head.bias.zero_()  # type: ignore[operator]
    vitral.save(model, tmp_path / "x.npz", dialect="google")
    assert "all zeros" in str(report_of(vitral.load(tmp_path / "x.npz")).warnings)


@torch.no_grad()
@pytest.mark.parametrize("size", [(24, 24), (8, 28), (16, 32)])
def test_another_size_is_what_the_network_does_by_itself(google: Path, size: tuple[int, int]) -> None:
    """Resampled once while loading, or at every forward: the same table, the same answers."""
    images = torch.randn(2, 3, *size)
    plain, moved = vitral.load(google), vitral.load(google, image_size=size)
    assert moved.model.config.table_grid == (size[0] // 4, size[1] // 4)
    assert moved.preprocess.size == size
    torch.testing.assert_close(moved.model(images), plain.model(images), atol=1e-6, rtol=0)
    assert "Transformer/posembed_input/pos_embedding" in report_of(moved).resized
    back = vitral.load(google, image_size=size, position_grid=(4, 4))  # the table stays, the network moves it
    assert torch.equal(back.model(images), plain.model(images))


@torch.no_grad()
def test_from_a_table_that_is_not_square(tmp_path: Path) -> None:
    model = small_model(activation="gelu-tanh", image_size=(8, 24))
    vitral.save(model, tmp_path / "x.npz", dialect="google")
    with pytest.raises(vitral.WeightsError, match="position_grid"):
        vitral.load(tmp_path / "x.npz")
    images = torch.randn(2, 3, 8, 24)
    for asked in ({"image_size": (8, 24)}, {"position_grid": (2, 6)}):
        loaded = vitral.load(tmp_path / "x.npz", **asked)
        torch.testing.assert_close(loaded.model(images), model(images), atol=1e-6, rtol=0)
    moved = vitral.load(tmp_path / "x.npz", position_grid=(2, 6), image_size=(16, 16))
    torch.testing.assert_close(
        moved.model(torch.ones(1, 3, 16, 16)), model(torch.ones(1, 3, 16, 16)), atol=1e-5, rtol=0
    )


@torch.no_grad()
@pytest.mark.parametrize("position", ["learned-2d", "relative", "sincos-2d"])
def test_other_positions_at_another_size(position: Any, tmp_path: Path) -> None:
    model = small_model(position=position)
    vitral.save(model, tmp_path / "x.safetensors")
    moved = vitral.load(tmp_path / "x.safetensors", image_size=(24, 8))
    images = torch.randn(2, 3, 24, 8)
    if position != "sincos-2d":  # whose waves belong to the grid they are made for
        torch.testing.assert_close(moved.model(images), model(images), atol=1e-5, rtol=0)
    assert moved.model(images).shape == (2, 7)


@torch.no_grad()
def test_another_patch_size_answers_alike_on_enlarged_images(google: Path) -> None:
    """FlexiViT's promise: enlarged patches times the enlarged kernel are what they were."""
    plain, larger = vitral.load(google), vitral.load(google, patch_size=8, image_size=32)
    images = torch.randn(2, 3, 16, 16)
    small = cut(images, plain.model.patches.patch_hw).flatten(0, 1)
    patches = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear")
    kernel = larger.model.patches.project.weight
    expected = small.flatten(1) @ plain.model.patches.project.weight.T
    torch.testing.assert_close(patches.flatten(1) @ kernel.T, expected, atol=1e-5, rtol=0)
    assert "8 x 8" in report_of(larger).resized["embedding/kernel"]
    smaller = resample_kernel(torch.randn(5, 3, 8, 8), (4, 4))
    assert smaller.shape == (5, 3, 4, 4)


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels_answer_alike_when_all_are_equal(google: Path, channels: int) -> None:
    plain, other = vitral.load(google), vitral.load(google, channels=channels)
    grey = torch.randn(2, 1, 16, 16)
    ours, theirs = other.model(grey.expand(-1, channels, -1, -1)), plain.model(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert other.preprocess.channels == channels
    assert "channels" in report_of(other).resized["embedding/kernel"]


@pytest.mark.parametrize("asked", [{"width": 96}, {"mlp_width": 10}, {"depth": 1.5}, {"wisdom": 2}, {"heads": 7}])
def test_changes_that_cannot_be(google: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(vitral.VitralError, match=f"{next(iter(asked))}|shape"):
        vitral.load(google, **asked)


# ---- heads ----


def timm_file(path: Path, width: int, depth: int, mlp: int) -> Path:
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 5, width),
        "patch_embed.proj.weight": (width, 3, 4, 4),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for block in (f"blocks.{i}" for i in range(depth)):
        for name, (outputs, inputs) in {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.fc1": (mlp, width),
            "mlp.fc2": (width, mlp),
        }.items():
            shapes |= {f"{block}.{name}.weight": (outputs, inputs), f"{block}.{name}.bias": (outputs,)}
        shapes |= {f"{block}.{norm}.{kind}": (width,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    return path


@pytest.mark.parametrize(
    ("width", "depth", "mlp", "heads", "why"),
    [
        (192, 12, 768, 3, "published size"),
        (96, 4, 384, 3, "published size"),
        (128, 2, 256, 2, "64 numbers a head"),
        (192, 2, 768, 3, "64 numbers a head"),
    ],
)
def test_heads_that_the_file_does_not_tell(
    width: int, depth: int, mlp: int, heads: int, why: str, tmp_path: Path
) -> None:
    loaded = vitral.load(timm_file(tmp_path / "x.safetensors", width, depth, mlp))
    assert loaded.model.config.heads == heads
    (line,) = [line for line in report_of(loaded).assumed if "heads" in line]
    assert why in line
    told = vitral.load(tmp_path / "x.safetensors", heads=heads * 2)
    assert told.model.config.heads == heads * 2
    assert "heads" not in str(report_of(told).assumed)


def test_heads_that_cannot_be_guessed(tmp_path: Path) -> None:
    with pytest.raises(vitral.WeightsError, match="heads="):
        vitral.load(timm_file(tmp_path / "x.safetensors", 100, 2, 200))


# ---- preprocessing ----


def test_what_is_assumed_is_said_and_can_be_overridden(tmp_path: Path) -> None:
    path = timm_file(tmp_path / "x.safetensors", 192, 12, 768)
    loaded = vitral.load(path)
    assert loaded.preprocess.mean == (0.5, 0.5, 0.5)
    assert "DeiT" in str(report_of(loaded).assumed)
    changed = vitral.load(path, preprocess=dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))
    assert changed.preprocess.mean == (0.485, 0.456, 0.406)
    assert "DeiT" not in str(report_of(changed).assumed)
    assert "normalisation was changed" in str(report_of(changed).warnings)
    whole = vitral.load(path, preprocess=Preprocess(size=(8, 8), resize="pad"))
    assert whole.preprocess.resize == "pad"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(means=(1, 1, 1)), "means"),
        (dict(std=(0, 1, 1)), "std"),
        (dict(mean=(1,)), "mean"),
        (dict(resize="stretch"), "resize"),
        (dict(size=(0, 3)), "size"),
        (dict(mean=float("nan")), "mean"),
        (3, "preprocess"),
    ],
)
def test_preprocessing_that_cannot_be(google: Path, changes: Any, field: str) -> None:
    with pytest.raises(vitral.ConfigError, match=field):
        vitral.load(google, preprocess=changes)


# ---- our own file ----


def test_all_that_must_not_get_lost(tmp_path: Path) -> None:
    labels = ("Katze", "狗", "zwei Wörter", "d", "e", "f", "g")
    preprocess = Preprocess(size=(16, 16), resize="crop", crop_fraction=0.9, interpolation="bicubic", background=0)
    checkpoint = Checkpoint(model=small_model(registers=2), preprocess=preprocess, labels=labels)
    vitral.save(checkpoint, tmp_path / "x.safetensors")
    back = vitral.load(tmp_path / "x.safetensors")
    assert (back.labels, back.preprocess, back.model.config) == (labels, preprocess, checkpoint.model.config)
    assert not back.model.training
    report = report_of(back)
    assert len(report.taken) == len(checkpoint.model.state_dict())
    assert not report.renamed
    assert not report.assumed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_precision_is_kept_in_our_file_and_widened_from_others(dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model().to(dtype)
    vitral.save(model, tmp_path / "x.safetensors")
    assert vitral.load(tmp_path / "x.safetensors").model.norm.weight.dtype == dtype
    vitral.save(model, tmp_path / "timm.safetensors", dialect="timm")
    loaded = vitral.load(tmp_path / "timm.safetensors")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert str(dtype).removeprefix("torch.") in str(report_of(loaded).warnings)


def test_a_loaded_model_trains_and_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    vitral.save(small_model(), path)
    before = path.read_bytes()
    loaded = vitral.load(path)
    optimizer = torch.optim.SGD(loaded.model.parameters(), lr=0.1)
    loaded.model.train()(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    assert path.read_bytes() == before
    vitral.save(loaded, path)  # over the file that it is mapped from
    again = vitral.load(path)
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    vitral.save(small_model(), path)
    before = path.read_bytes()
    with pytest.raises(vitral.VitralError):
        vitral.save(small_model(), path, labels=["too", "few"])
    with torch.device("meta"):
        empty = vitral.create("vit-pico4")
    with pytest.raises(vitral.WeightsError, match="meta"):
        vitral.save(empty, path)
    assert path.read_bytes() == before
    with pytest.raises(vitral.WeightsError, match=r"must end in \.safetensors"):
        vitral.save(small_model(), tmp_path / "x.npz")
    with pytest.raises(vitral.WeightsError, match="Cannot write"):
        vitral.save(small_model(), path / "below" / "x.safetensors")
    with pytest.raises(vitral.ConfigError, match="Did you mean 'torchvision'"):
        vitral.save(small_model(), path, dialect="torch-vision")


def test_metadata_hold_the_checksum_of_the_numbers(tmp_path: Path) -> None:
    from vitral.weights.dialects.native import verify
    from vitral.weights.formats.detect import open_tensors

    path = tmp_path / "x.safetensors"
    vitral.save(small_model(), path)
    assert verify(open_tensors(path))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert not verify(open_tensors(path))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_copy(tmp_path: Path) -> None:
    """A model of 90 MB in a process of its own: the peak grows by about once the file, not twice."""
    model = vitral.create("vit-s16", num_classes=10)
    vitral.save(model, tmp_path / "ours.safetensors")
    vitral.save(model, tmp_path / "google.npz", dialect="google")
    size = (tmp_path / "ours.safetensors").stat().st_size / 1024
    program = (
        "import sys, torch, vitral, vitral.weights.load\n"
        "peak = lambda: int([l for l in open('/proc/self/status') if l.startswith('VmHWM')][0].split()[1])\n"
        "vitral.load(sys.argv[2])\n"
        "before = peak()\n"
        "model = vitral.load(sys.argv[1]).model\n"
        "print(peak() - before)\n"
    )
    vitral.save(small_model(), tmp_path / "tiny.safetensors")
    for name in ("ours.safetensors", "google.npz"):
        words = [sys.executable, "-c", program, str(tmp_path / name), str(tmp_path / "tiny.safetensors")]
        grown = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        assert 0.5 * size < grown < 1.3 * size, name


def test_hints_survive_where_the_layout_has_no_place(tmp_path: Path) -> None:
    model = small_model(activation="relu", norm_eps=1e-3)
    vitral.save(model, tmp_path / "x.safetensors", dialect="timm", labels=[str(i) for i in range(7)])
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert "vitral.hints" in file.metadata()
    loaded = vitral.load(tmp_path / "x.safetensors")
    assert replace(loaded.model.config, class_token=None) == model.config
    assert loaded.labels == tuple("0123456")
    save_file(load_file(tmp_path / "x.safetensors"), tmp_path / "x.safetensors", metadata={"vitral.hints": "{"})
    with pytest.raises(vitral.WeightsError, match="hints"):
        vitral.load(tmp_path / "x.safetensors")


def test_checkpoints_in_several_files(tmp_path: Path) -> None:
    import json

    vitral.save(small_model(norm_eps=1e-12), tmp_path / "whole", dialect="huggingface")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    folder = tmp_path / "parts"
    folder.mkdir()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for part, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / part)
    index = {name: part for part, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(vitral.load(folder).model(images), vitral.load(tmp_path / "whole").model(images))
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(vitral.WeightsError, match="model-2"):
        vitral.load(folder)
