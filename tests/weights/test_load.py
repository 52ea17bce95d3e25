"""Load checkpoints: the report, config overrides, assumptions, memory and precision."""

import json
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
from benchmarks.peers import repair_torchvision
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
    """Assert that every tensor of the file is in exactly one list."""
    listed = [*report.unchanged, *report.renamed, *report.resized, *report.ignored]
    assert sorted(listed) == sorted(names)


def test_every_tensor_is_in_one_list(google: Path) -> None:
    with np.load(google) as arrays:
        names = list(arrays)
    for overrides in ({}, {"num_classes": 3}, {"image_size": 24, "representation": None, "num_classes": 5}):
        same_tensors(report_of(vitral.load(google, **overrides)), names)


def test_a_new_head_is_zero_and_reported(google: Path) -> None:
    loaded = vitral.load(google, num_classes=3)
    assert not loaded.model.head.weight.any()  # type: ignore[operator]
    assert loaded.model.head.weight.shape == (3, 20)  # type: ignore[union-attr]
    report = report_of(loaded)
    assert set(report.initialized) == {"head.weight", "head.bias"}
    assert "num_classes=3" in report.ignored["head/kernel"]
    assert loaded.labels is None


def test_the_pre_logits_can_be_dropped(google: Path) -> None:
    loaded = vitral.load(google, num_classes=3, representation=None)
    assert loaded.model.config.representation is None
    assert "pre_logits/kernel" in report_of(loaded).ignored


def test_a_new_head_starts_with_its_bias(google: Path) -> None:
    loaded = vitral.load(google, num_classes=3, head_bias=-10.0)
    assert torch.equal(loaded.model.head.bias, torch.full((3,), -10.0))  # type: ignore[union-attr]


def test_new_parts_are_initialized(google: Path) -> None:
    loaded = vitral.load(google, registers=4, layer_scale=0.1)
    report = report_of(loaded)
    assert "registers" in report.initialized
    assert "blocks.1.after_mlp.scale" in report.initialized
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
def test_loading_at_another_size_equals_running_at_it(google: Path, size: tuple[int, int]) -> None:
    """Resampling once while loading and at every forward give the same table and the same logits."""
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
    for overrides in ({"image_size": (8, 24)}, {"position_grid": (2, 6)}):
        loaded = vitral.load(tmp_path / "x.npz", **overrides)
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
def test_another_patch_size_gives_the_same_tokens_for_enlarged_patches(google: Path) -> None:
    """FlexiViT: enlarged patches times the enlarged kernel equal the original products."""
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
def test_other_channels_give_the_same_logits_when_all_are_equal(google: Path, channels: int) -> None:
    plain, other = vitral.load(google), vitral.load(google, channels=channels)
    gray = torch.randn(2, 1, 16, 16)
    ours, theirs = other.model(gray.expand(-1, channels, -1, -1)), plain.model(gray.expand(-1, 3, -1, -1))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert other.preprocess.channels == channels
    assert "channels" in report_of(other).resized["embedding/kernel"]


@pytest.mark.parametrize("overrides", [{"width": 96}, {"mlp_width": 10}, {"depth": 1.5}, {"wisdom": 2}, {"heads": 7}])
def test_invalid_overrides(google: Path, overrides: dict[str, Any]) -> None:
    with pytest.raises(vitral.VitralError, match=f"{next(iter(overrides))}|shape"):
        vitral.load(google, **overrides)


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
    ("width", "depth", "mlp", "heads", "reason"),
    [
        (192, 12, 768, 3, "published model"),
        (96, 4, 384, 3, "published model"),
        (128, 2, 256, 2, "64 channels per head"),
        (192, 2, 768, 3, "64 channels per head"),
    ],
)
def test_heads_that_the_file_does_not_state(
    width: int, depth: int, mlp: int, heads: int, reason: str, tmp_path: Path
) -> None:
    loaded = vitral.load(timm_file(tmp_path / "x.safetensors", width, depth, mlp))
    assert loaded.model.config.heads == heads
    (line,) = [line for line in report_of(loaded).assumed if "heads" in line]
    assert ("is a guess" in str(report_of(loaded).warnings)) == ("64 channels per head" in line)
    assert reason in line
    overridden = vitral.load(tmp_path / "x.safetensors", heads=heads * 2)
    assert overridden.model.config.heads == heads * 2
    assert "heads" not in str(report_of(overridden).assumed)
    assert "is a guess" not in str(report_of(overridden).warnings)


def test_heads_that_cannot_be_guessed(tmp_path: Path) -> None:
    with pytest.raises(vitral.WeightsError, match="heads="):
        vitral.load(timm_file(tmp_path / "x.safetensors", 100, 2, 200))


# ---- preprocessing ----


def test_assumptions_are_reported_and_can_be_overridden(tmp_path: Path) -> None:
    path = timm_file(tmp_path / "x.safetensors", 192, 12, 768)
    loaded = vitral.load(path)
    assert loaded.preprocess.mean == (0.5, 0.5, 0.5)
    assert "DeiT" in str(report_of(loaded).assumed)
    changed = vitral.load(path, preprocess=dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))
    assert changed.preprocess.mean == (0.485, 0.456, 0.406)
    assert "DeiT" not in str(report_of(changed).assumed)
    assert "normalization was changed" in str(report_of(changed).warnings)
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
def test_invalid_preprocessing(google: Path, changes: Any, field: str) -> None:
    with pytest.raises(vitral.ConfigError, match=field):
        vitral.load(google, preprocess=changes)


# ---- our own file ----


def test_our_format_keeps_labels_preprocessing_and_config(tmp_path: Path) -> None:
    labels = ("Katze", "狗", "zwei Wörter", "d", "e", "f", "g")
    preprocess = Preprocess(size=(16, 16), resize="crop", crop_fraction=0.9, interpolation="bicubic", background=0)
    checkpoint = Checkpoint(model=small_model(registers=2), preprocess=preprocess, labels=labels)
    vitral.save(checkpoint, tmp_path / "x.safetensors")
    back = vitral.load(tmp_path / "x.safetensors")
    assert (back.labels, back.preprocess, back.model.config) == (labels, preprocess, checkpoint.model.config)
    assert not back.model.training
    report = report_of(back)
    assert len(report.unchanged) == len(checkpoint.model.state_dict())
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
    vitral.save(loaded, path)  # over the file that it is memory-mapped from
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_copy(tmp_path: Path) -> None:
    """Load a model of 90 MB in a separate process: its peak memory grows by about the file, not twice."""
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


def test_hints_store_what_the_dialect_cannot(tmp_path: Path) -> None:
    model = small_model(activation="relu", norm_eps=1e-3)
    with pytest.warns(UserWarning, match="norm_eps"):
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
    vitral.save(small_model(norm_eps=1e-12), tmp_path / "whole", dialect="huggingface")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    folder = tmp_path / "parts"
    folder.mkdir()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    index = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(vitral.load(folder).model(images), vitral.load(tmp_path / "whole").model(images))
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(vitral.WeightsError, match="model-2"):
        vitral.load(folder)


# ---- state dicts in memory ----


@torch.no_grad()
def test_a_state_dict_of_another_library() -> None:
    repair_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    theirs: Any = VisionTransformer(img_size=16, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=7).eval()
    loaded = vitral.load(theirs.state_dict(), heads=3)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(loaded.model(images), theirs(images), atol=1e-5, rtol=0)
    report = report_of(loaded)
    assert (report.source, report.format, report.dialect) == ("state dict", "memory", "timm")
    loaded.model.norm.weight.add_(1)
    assert theirs.norm.weight.eq(1).all(), "the state dict is copied"


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_state_dict_of_our_own_names_needs_its_config(prefix: str, tmp_path: Path) -> None:
    model = small_model(registers=2, activation="relu", norm_eps=1e-3)
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(vitral.WeightsError, match="config="):
        vitral.load(state)
    images = torch.randn(2, 3, 16, 16)
    torch.save(state, tmp_path / "state.pth")
    for source in (state, tmp_path / "state.pth"):
        loaded = vitral.load(source, config=model.config)
        assert torch.equal(loaded.model(images), model(images))
        assert loaded.model.config == model.config
        assert not report_of(loaded).initialized
    assert vitral.load(state, config=model.config, num_classes=3).model.config.num_classes == 3


@torch.no_grad()
def test_config_replaces_what_names_and_shapes_do_not_state(tmp_path: Path) -> None:
    model = small_model(image_size=(8, 24), activation="relu", pool="mean", class_token=True)
    written = vitral.save(model, tmp_path / "x.pth", dialect="timm")
    assert {"heads", "pool", "activation"} <= set(written.load_options)
    loaded = vitral.load(torch.load(tmp_path / "x.pth", weights_only=True), config=model.config)
    images = torch.randn(2, 3, 8, 24)
    assert torch.equal(loaded.model(images), model(images))
    with pytest.raises(vitral.WeightsError, match=r"shape|missing|unexpected"):
        vitral.load(tmp_path / "x.pth", config=replace(model.config, width=96))


@pytest.mark.parametrize(
    "source",
    [
        {"patches": [torch.randn(500, 500)]},
        {3: torch.randn(500)},
        [torch.randn(500, 500)],
        torch.randn(500, 500),
        {"x": "y" * 10_000},
    ],
    ids=["list in a dict", "number as a name", "list", "tensor", "text"],
)
def test_errors_never_print_tensors(source: Any) -> None:
    with pytest.raises(vitral.VitralError) as caught:
        vitral.load(source)
    assert len(str(caught.value)) < 600
    with pytest.raises(vitral.VitralError) as caught:
        vitral.load({"x": torch.zeros(3)}, config=source)
    assert len(str(caught.value)) < 600


def test_a_config_json_that_contradicts_the_tensors_is_reported(tmp_path: Path) -> None:
    vitral.save(small_model(norm_eps=1e-12), tmp_path / "hf", dialect="huggingface", labels=list("abcdefg"))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    assert not report_of(vitral.load(tmp_path / "hf")).warnings
    for key, value, actual in (
        ("hidden_size", 768, "48"),
        ("num_hidden_layers", 12, "2"),
        ("intermediate_size", 3072, "80"),
        ("patch_size", 16, "4"),
        ("model_type", "swin", "vit"),
    ):
        path.write_text(json.dumps({**config, key: value}))
        (warning,) = report_of(vitral.load(tmp_path / "hf")).warnings
        assert key in warning
        assert str(value) in warning
        assert actual in warning
    path.write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    (warning,) = report_of(vitral.load(tmp_path / "hf")).warnings
    assert "2 labels" in warning


def test_a_timm_config_json_that_contradicts_the_tensors_is_reported(tmp_path: Path) -> None:
    vitral.save(small_model(), tmp_path / "timm", dialect="timm")
    path = tmp_path / "timm" / "config.json"
    config = json.loads(path.read_text())
    assert not report_of(vitral.load(tmp_path / "timm")).warnings
    config["model_args"]["embed_dim"] = 768
    path.write_text(json.dumps(config))
    (warning,) = report_of(vitral.load(tmp_path / "timm")).warnings
    assert "embed_dim=768" in warning
    assert "48" in warning


@torch.no_grad()
def test_a_stem_narrower_than_64_channels(tmp_path: Path) -> None:
    """A hybrid in Google's layout with width factor 0.5."""
    stem = vitral.ResNetStem(stages=(1, 2), width_factor=0.5)
    model = small_model(activation="gelu-tanh", stem=stem, patch_size=1, image_size=32)
    vitral.save(model, tmp_path / "x.npz", dialect="google")
    loaded = vitral.load(tmp_path / "x.npz")
    assert loaded.model.config.stem == stem
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded.model(images), model(images))
    bit = vitral.create("bit-r26x1", width_factor=0.5, num_classes=3, image_size=32).eval()
    vitral.save(bit, tmp_path / "bit.npz", dialect="bit")
    again = vitral.load(tmp_path / "bit.npz", image_size=32)
    assert again.model.config.width_factor == 0.5
    assert torch.equal(again.model(images), bit(images))


def test_weights_of_another_network_class_are_refused(tmp_path: Path) -> None:
    model = small_model()
    save_file(model.state_dict(), tmp_path / "x.safetensors", metadata={"vitral.custom": "MyViT"})
    with pytest.raises(vitral.WeightsError, match=r"MyViT.*load_state_dict"):
        vitral.load(tmp_path / "x.safetensors", config=model.config)
