"""Load checkpoints that other libraries wrote, and have them load ours."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import vitral
from benchmarks.peers import randomize, repair_torchvision
from tests.conftest import small_model
from vitral import ConvStem, ViT

GOLDEN = Path(__file__).parent / "golden"
IMAGES = (3, 3, 16, 16)
CLOSE: dict[str, Any] = dict(atol=1e-5, rtol=0)
TIMM: list[dict[str, Any]] = [
    dict(),
    dict(global_pool="avg"),
    dict(global_pool="avg", class_token=False),
    dict(global_pool="avg", fc_norm=False, class_token=False),
    dict(global_pool="map", class_token=False),
    dict(global_pool="map"),
    dict(reg_tokens=3),
    dict(reg_tokens=3, no_embed_class=True),
    dict(reg_tokens=2, class_token=False, global_pool="avg"),
    dict(reg_tokens=2, class_token=False, global_pool="avg", no_embed_class=True),
    dict(no_embed_class=True),
    dict(init_values=0.1),
    dict(qkv_bias=False),
    dict(num_classes=0),
    dict(pos_embed="none"),
    dict(patch_size=(4, 2), img_size=(16, 8), in_chans=5),
]


def timm_model(**fields: Any) -> nn.Module:
    repair_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    sizes: dict[str, Any] = dict(
        img_size=16, patch_size=4, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2, num_classes=7
    )
    return randomize(VisionTransformer(**{**sizes, "dynamic_img_size": True, **fields})).eval()


def random_images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("fields", TIMM, ids=str)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_timm_to_ours(fields: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    theirs = timm_model(**fields)
    path = tmp_path / f"model{suffix}"
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(state, path) if suffix == ".safetensors" else torch.save({"model": state, "epoch": 3}, path)
    overrides = {"position_grid": (4, 4)} if fields.get("patch_size") else {}
    checkpoint = vitral.load(path, heads=3, **overrides)
    images = random_images(3, fields.get("in_chans", 3), *((16, 8) if "img_size" in fields else (16, 16)))
    torch.testing.assert_close(checkpoint.model(images), theirs(images), **CLOSE)
    if "img_size" not in fields:
        for size in ((24, 24), (8, 20)):
            images = random_images(2, 3, *size)
            torch.testing.assert_close(checkpoint.model(images), theirs(images), **CLOSE)


OURS: list[dict[str, Any]] = [
    dict(),
    dict(pool="mean"),
    dict(pool="mean", class_token=True),
    dict(pool="mean", class_token=True, norm_after_pool=True),
    dict(pool="map"),
    dict(pool="map", class_token=True),
    dict(pool="none"),
    dict(registers=3),
    dict(layer_scale=0.1),
    dict(activation="gelu-tanh"),
    dict(activation="relu", norm_eps=1e-5),
    dict(position="none"),
    dict(position="learned-2d"),
    dict(position="sincos-2d"),
    dict(num_classes=0),
    dict(channels=1, image_size=(16, 24)),
]


@torch.no_grad()
@pytest.mark.parametrize("variant", OURS, ids=str)
def test_ours_to_timm_and_back(variant: dict[str, Any], tmp_path: Path) -> None:
    repair_torchvision()
    import timm

    model = small_model(**variant)
    changed = pytest.warns(UserWarning, match="norm_eps") if model.config.norm_eps != 1e-6 else nullcontext()
    with changed:
        vitral.save(model, tmp_path / "folder", dialect="timm", labels=None)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    if model.config.norm_eps != 1e-6:
        for module in theirs.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = model.config.norm_eps
    images = random_images(2, model.config.channels, *model.config.image_hw)
    torch.testing.assert_close(theirs(images), model(images), **CLOSE)
    back = vitral.load(tmp_path / "folder")
    for ours, again in zip(model.blocks.parameters(), back.model.blocks.parameters(), strict=True):
        assert torch.equal(ours, again)
    # Where a tensor lies in memory decides the last bits of a product on some processors.
    torch.testing.assert_close(back.model(images), model(images), atol=2e-6, rtol=1e-5)
    assert back.report is not None
    assert back.report.dialect == "timm"


def transformers_model(**fields: Any) -> nn.Module:
    repair_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = dict(
        image_size=16,
        patch_size=4,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=80,
        num_labels=7,
    )
    return randomize(ViTForImageClassification(ViTConfig(**{**sizes, **fields}))).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "fields", [{}, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-6}, {"num_channels": 1}], ids=str
)
@pytest.mark.parametrize("layout", ["folder", "in memory", "saved"])
def test_transformers_to_ours(fields: dict[str, Any], layout: str, tmp_path: Path) -> None:
    theirs: Any = transformers_model(**fields)
    theirs.save_pretrained(tmp_path)
    path, overrides = tmp_path, {}
    if layout != "folder":
        overrides = {"heads": 3}
        if fields.get("hidden_act"):
            overrides |= {"activation": "gelu-tanh", "norm_eps": 1e-6}
        path = tmp_path / "bare" / "vit.safetensors"
        path.parent.mkdir()
        if layout == "saved":
            path.write_bytes((tmp_path / "model.safetensors").read_bytes())
        else:
            save_file({name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}, path)
    checkpoint = vitral.load(path, **overrides)
    for size in ((16, 16), (24, 24), (8, 20)):
        images = random_images(2, fields.get("num_channels", 3), *size)
        logits = theirs(images, interpolate_pos_encoding=True).logits
        torch.testing.assert_close(checkpoint.model(images), logits, **CLOSE)
    assert checkpoint.model.config.position_resample == "bicubic"


@torch.no_grad()
def test_ours_to_transformers_and_back(tmp_path: Path) -> None:
    repair_torchvision()
    from transformers import ViTForImageClassification

    model = small_model(norm_eps=1e-12, activation="gelu-tanh")
    labels = [f"kind {i}" for i in range(7)]
    vitral.save(model, tmp_path / "vit", dialect="huggingface", labels=labels)
    theirs, info = ViTForImageClassification.from_pretrained(tmp_path / "vit", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    images = random_images(*IMAGES)
    torch.testing.assert_close(theirs.eval()(images).logits, model(images), **CLOSE)
    assert theirs.config.id2label[3] == "kind 3"
    back = vitral.load(tmp_path / "vit")
    assert back.labels == tuple(labels)
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.model.state_dict()[name], tensor), name
    processor = json.loads((tmp_path / "vit" / "preprocessor_config.json").read_text())
    assert processor["image_mean"] == [0.5, 0.5, 0.5]


@torch.no_grad()
def test_conversion_reports_the_difference_that_timm_itself_has(tmp_path: Path) -> None:
    """transformers uses epsilon 1e-12 and timm 1e-6, which no file can change."""
    theirs: Any = transformers_model()
    for parameter in theirs.vit.embeddings.parameters():
        parameter.mul_(0.02)  # small activations, where epsilon matters
    theirs.save_pretrained(tmp_path / "hf")
    conversion = vitral.convert(tmp_path / "hf", tmp_path / "timm", to="timm")
    import timm

    model: Any = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tokens = theirs.vit(images).last_hidden_state[:, 0]
    expected = max(
        relative_difference(theirs(images).logits, model(images)),
        relative_difference(tokens, model.forward_head(model.forward_features(images), pre_logits=True)),
    )
    assert expected > 1e-4
    assert conversion.difference == pytest.approx(expected, rel=0.05)
    assert conversion.constants == {"norm_eps": 1e-6}
    assert any("norm_eps=1e-06" in note for note in conversion.notes)
    same = vitral.convert(tmp_path / "hf", tmp_path / "again", to="huggingface")
    assert same.difference < 1e-6
    assert not same.constants


def relative_difference(expected: Tensor, actual: Tensor) -> float:
    return (expected - actual).abs().max().item() / max(1.0, expected.abs().max().item())


@torch.no_grad()
def test_conversion_reports_the_difference_that_torchvision_itself_has(tmp_path: Path) -> None:
    theirs: Any = torchvision_model()
    for parameter in (*theirs.conv_proj.parameters(), theirs.class_token, theirs.encoder.pos_embedding):
        parameter.mul_(0.02)
    torch.save(theirs.state_dict(), tmp_path / "x.pth")
    conversion = vitral.convert(tmp_path / "x.pth", tmp_path / "y.pth", to="torchvision", heads=3, norm_eps=1e-12)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    changed = vitral.load(tmp_path / "x.pth", heads=3, norm_eps=1e-12).model
    again = torchvision_model()
    again.load_state_dict(torch.load(tmp_path / "y.pth", weights_only=True))
    assert conversion.constants == {"norm_eps": 1e-6}
    expected = relative_difference(changed(images), again(images))
    assert expected > 5e-5
    assert 0.9 * expected <= conversion.difference < 10 * expected  # features, which it also compares, may differ more


@torch.no_grad()
@pytest.mark.parametrize(
    ("library", "constants"),
    [("timm", {"activation": "gelu"}), ("huggingface", {"norm_eps": 1e-12, "activation": "gelu"})],
)
def test_conversion_reports_the_difference_that_a_bare_file_has_by_default(
    library: str, constants: dict[str, Any], tmp_path: Path
) -> None:
    """Only a folder has a config.json that states the activation."""
    model = small_model(activation="gelu-tanh")
    vitral.save(model, tmp_path / "ours.safetensors")
    conversion = vitral.convert(tmp_path / "ours.safetensors", tmp_path / "x.pth", to=library)
    state = torch.load(tmp_path / "x.pth", weights_only=True)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    theirs: Any
    if library == "timm":
        theirs = timm_model(mlp_ratio=80 / 48)
        theirs.load_state_dict(state)
        logits = theirs(images)
        pooled = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    else:
        empty: Any = transformers_model()
        theirs = type(empty).from_pretrained(None, config=empty.config, state_dict=state).eval()
        logits, pooled = theirs(images).logits, theirs.vit(images).last_hidden_state[:, 0]
    expected = max(
        relative_difference(model(images), logits), relative_difference(model.features(images).pooled, pooled)
    )
    assert expected > 5e-5
    assert conversion.difference == pytest.approx(expected, rel=0.05)
    assert conversion.constants == constants
    assert any(f"{library} computes with" in note and "activation='gelu'" in note for note in conversion.notes)
    folder = vitral.convert(tmp_path / "ours.safetensors", tmp_path / "folder", to=library)
    assert "activation" not in folder.constants
    assert folder.difference < 1e-5


def torchvision_model(**fields: Any) -> nn.Module:
    repair_torchvision()
    from torchvision.models.vision_transformer import VisionTransformer

    sizes: dict[str, Any] = dict(
        image_size=16, patch_size=4, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=80, num_classes=7
    )
    return randomize(VisionTransformer(**{**sizes, **fields})).eval()


def conv_stem() -> list[Any]:
    repair_torchvision()
    from torchvision.models.vision_transformer import ConvStemConfig

    return [ConvStemConfig(out_channels=width, kernel_size=3, stride=2) for width in (8, 16)]


@torch.no_grad()
@pytest.mark.parametrize("variant", ["plain", "representation", "conv stem", "old names"])
def test_torchvision_to_ours_and_back(variant: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"representation_size": 20} if variant == "representation" else {}
    if variant == "conv stem":
        fields = {"conv_stem_configs": conv_stem()}
    theirs = torchvision_model(**fields)
    state = theirs.state_dict()
    if variant == "old names":
        state = {name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): x for name, x in state.items()}
    torch.save(state, tmp_path / "vit.pth")
    checkpoint = vitral.load(tmp_path / "vit.pth", heads=3)
    images = random_images(*IMAGES)
    torch.testing.assert_close(checkpoint.model(images), theirs(images), **CLOSE)
    vitral.save(checkpoint, tmp_path / "back.pth", dialect="torchvision")
    again = torchvision_model(**fields)
    again.load_state_dict(torch.load(tmp_path / "back.pth", weights_only=True), strict=True)
    assert torch.equal(again.eval()(images), theirs(images))


@torch.no_grad()
def test_torchvision_at_another_size(tmp_path: Path) -> None:
    theirs = torchvision_model()
    from torchvision.models.vision_transformer import interpolate_embeddings

    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    checkpoint = vitral.load(tmp_path / "vit.pth", heads=3, image_size=24)
    larger = torchvision_model(image_size=24)
    larger.load_state_dict(interpolate_embeddings(24, 4, theirs.state_dict()))
    images = random_images(2, 3, 24, 24)
    torch.testing.assert_close(checkpoint.model(images), larger(images), **CLOSE)
    assert checkpoint.report is not None
    assert "4 x 4 to 6 x 6" in checkpoint.report.resized["encoder.pos_embedding"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["token", "gap", "prelogits", "hybrid"])
def test_golden_checkpoints(name: str) -> None:
    expected = np.load(GOLDEN / f"{name}.expected.npz")
    size = json.loads(str(expected["config"]))["size"]
    checkpoint = vitral.load(GOLDEN / f"{name}.npz", **({} if size[0] == size[1] else {"image_size": tuple(size)}))
    images = torch.from_numpy(expected["images"].transpose(0, 3, 1, 2).copy())
    torch.testing.assert_close(checkpoint.model(images), torch.from_numpy(expected["logits"]), atol=2e-5, rtol=0)
    assert checkpoint.preprocess.mean == (0.5, 0.5, 0.5)
    assert checkpoint.report is not None
    assert checkpoint.report.dialect == "google"
    assert not checkpoint.report.initialized
    assert not checkpoint.report.ignored


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["opt/target/", "params/", "params/img/"])
def test_prefixes_of_google(prefix: str, tmp_path: Path) -> None:
    arrays = {prefix + name: array for name, array in np.load(GOLDEN / "token.npz").items()}
    beside = {
        "opt/target/": {"opt/state/step": np.zeros(())},
        "params/": {"opt/0/mu": np.zeros(3)},
        "params/img/": {"params/t": np.zeros(1), "params/txt/head/kernel": np.zeros((3, 4))},
    }[prefix]
    arrays |= beside
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    expected = np.load(GOLDEN / "token.expected.npz")
    checkpoint = vitral.load(f"{tmp_path / 'x.npz'}:img" if "img" in prefix else tmp_path / "x.npz")
    images = torch.from_numpy(expected["images"].transpose(0, 3, 1, 2).copy())
    torch.testing.assert_close(checkpoint.model(images), torch.from_numpy(expected["logits"]), atol=2e-5, rtol=0)
    assert checkpoint.report is not None
    assert set(checkpoint.report.ignored) == set(beside)


@torch.no_grad()
def test_bfloat16_of_google(tmp_path: Path) -> None:
    """NumPy has no bfloat16, so JAX writes arrays of two opaque bytes."""
    arrays = dict(np.load(GOLDEN / "token.npz"))
    halves = {name: torch.from_numpy(array).bfloat16() for name, array in arrays.items()}
    np.savez(tmp_path / "half.npz", **{name: x.view(torch.int16).numpy().view("V2") for name, x in halves.items()})
    np.savez(tmp_path / "rounded.npz", **{name: x.float().numpy() for name, x in halves.items()})
    half, rounded = vitral.load(tmp_path / "half.npz"), vitral.load(tmp_path / "rounded.npz")
    for name, tensor in rounded.model.state_dict().items():
        assert torch.equal(half.model.state_dict()[name], tensor)
    assert half.report is not None
    assert "bfloat16" in str(half.report.warnings)


GOOGLE: list[tuple[str, dict[str, Any]]] = [
    ("google", dict()),
    ("google", dict(pool="mean")),
    ("google", dict(representation=20)),
    ("google", dict(stem=vitral.ResNetStem(stages=(1, 2)), patch_size=1, image_size=32)),
    ("google", dict(stem=vitral.ResNetStem(stages=()), patch_size=2, image_size=32)),
    ("google", dict(position="learned-2d")),
    ("big_vision", dict()),
    ("big_vision", dict(pool="mean")),
    ("big_vision", dict(pool="map")),
    ("big_vision", dict(pool="mean", position="sincos-2d")),
]


@torch.no_grad()
@pytest.mark.parametrize(("dialect", "variant"), GOOGLE, ids=str)
def test_ours_to_google_and_back(dialect: str, variant: dict[str, Any], tmp_path: Path) -> None:
    model = small_model(activation="gelu-tanh", **variant)
    vitral.save(model, tmp_path / "x.npz", dialect=dialect)
    overrides = {"image_size": 16} if variant.get("position") == "sincos-2d" else {}
    back = vitral.load(tmp_path / "x.npz", **overrides)
    images = random_images(2, 3, *model.config.image_hw)
    assert torch.equal(back.model(images), model(images))
    assert back.report is not None
    assert back.report.dialect == dialect
    if variant.get("position") is None and not (dialect == "big_vision" and model.config.has_class_token):
        for name, tensor in model.state_dict().items():
            assert torch.equal(back.model.state_dict()[name], tensor), name


@torch.no_grad()
@pytest.mark.parametrize("dialect", ["google", "big_vision"])
def test_timm_reads_what_we_write_for_google(dialect: str, tmp_path: Path) -> None:
    """timm reads these files itself, but builds the exact GELU, so the test passes it the other one."""
    model = small_model(activation="gelu-tanh", **({"pool": "map"} if dialect == "big_vision" else {}))
    vitral.save(model, tmp_path / "x.npz", dialect=dialect)
    fields = dict(global_pool="map", class_token=False) if dialect == "big_vision" else {}
    theirs: Any = timm_model(act_layer="gelu_tanh", mlp_ratio=80 / 48, **fields)
    theirs.load_pretrained(str(tmp_path / "x.npz"))
    images = random_images(*IMAGES)
    torch.testing.assert_close(theirs(images), model(images), **CLOSE)


@torch.no_grad()
def test_scanned_blocks_and_rows_without_a_class(tmp_path: Path) -> None:
    model = small_model(activation="gelu-tanh")
    vitral.save(model, tmp_path / "plain.npz", dialect="big_vision")
    arrays = dict(np.load(tmp_path / "plain.npz"))
    assert arrays["params/pos_embedding"].shape == (1, 16, 48)
    block = "params/Transformer/encoderblock"
    stacked = {name: array for name, array in arrays.items() if f"{block}_" not in name}
    for name in [name.removeprefix(f"{block}_0") for name in arrays if name.startswith(f"{block}_0/")]:
        stacked[block + name] = np.stack([arrays[f"{block}_{i}{name}"] for i in range(2)])
    np.savez(tmp_path / "scanned.npz", **stacked)
    images = random_images(*IMAGES)
    assert torch.equal(vitral.load(tmp_path / "scanned.npz").model(images), model(images))


@torch.no_grad()
def test_inlined_probe_of_old_big_vision(tmp_path: Path) -> None:
    model = small_model(activation="gelu-tanh", pool="map")
    vitral.save(model, tmp_path / "new.npz", dialect="big_vision")
    arrays = {name.replace("MAPHead_0/", ""): array for name, array in np.load(tmp_path / "new.npz").items()}
    np.savez(tmp_path / "old.npz", **arrays)
    images = random_images(*IMAGES)
    assert torch.equal(vitral.load(tmp_path / "old.npz").model(images), model(images))


@torch.no_grad()
def test_dinov2_with_registers_and_mask_token(tmp_path: Path) -> None:
    """DINOv2's registers have no position and come after the class token."""
    theirs = timm_model(patch_size=4, init_values=0.1, num_classes=0)
    state = theirs.state_dict()
    state["register_tokens"], state["mask_token"] = random_images(1, 4, 48), torch.zeros(1, 48)
    save_file(state, tmp_path / "dinov2.safetensors")
    checkpoint = vitral.load(tmp_path / "dinov2.safetensors", heads=3)
    assert checkpoint.report is not None
    assert checkpoint.report.dialect == "dinov2"
    assert checkpoint.report.ignored == {"mask_token": "only for masked pre-training"}
    assert checkpoint.preprocess.mean == (0.485, 0.456, 0.406)
    images = random_images(*IMAGES)
    embedded: Any = theirs.patch_embed(images).flatten(1, 2) + state["pos_embed"][:, 1:]  # type: ignore[operator]
    first = (state["cls_token"] + state["pos_embed"][:, :1]).expand(3, -1, -1)
    tokens = torch.cat([first, state["register_tokens"].expand(3, -1, -1), embedded], dim=1)
    expected = theirs.norm(theirs.blocks(tokens))[:, 0]  # type: ignore[operator]
    torch.testing.assert_close(checkpoint.model(images), expected, **CLOSE)


@torch.no_grad()
def test_mae_ignores_its_decoder(tmp_path: Path) -> None:
    theirs = timm_model(num_classes=0)
    state = theirs.state_dict() | {"mask_token": torch.zeros(1, 1, 48), "decoder_embed.weight": torch.zeros(8, 48)}
    torch.save({"model": state}, tmp_path / "mae.pth")
    checkpoint = vitral.load(tmp_path / "mae.pth", heads=3)
    assert checkpoint.report is not None
    assert checkpoint.report.dialect == "mae"
    assert set(checkpoint.report.ignored) == {"mask_token", "decoder_embed.weight"}
    images = random_images(*IMAGES)
    torch.testing.assert_close(checkpoint.model(images), theirs(images), **CLOSE)


def random_state(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        for name, shape in shapes.items()
    }


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention on (B, N, heads, head_dim), spelled out."""
    weights = torch.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhe->bqhe", weights.softmax(-1), v)


@torch.no_grad()
def test_tczhangzhi(tmp_path: Path) -> None:
    """Compare with the network spelled out by its names: tensordots over (D, heads, head_dim), epsilon 1e-5."""
    width, heads = 48, 3
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (width, 3, 4, 4),
        "embedding.bias": (width,),
        "cls_token": (1, 1, width),
        "transformer.pos_embedding.pos_embedding": (1, 17, width),
        "transformer.norm.weight": (width,),
        "transformer.norm.bias": (width,),
        "classifier.weight": (7, width),
        "classifier.bias": (7,),
    }
    for layer in (f"transformer.encoder_layers.{i}" for i in range(2)):
        for name in ("norm1", "norm2"):
            shapes |= {f"{layer}.{name}.weight": (width,), f"{layer}.{name}.bias": (width,)}
        for name in ("query", "key", "value"):
            shapes |= {f"{layer}.attn.{name}.weight": (width, heads, 16), f"{layer}.attn.{name}.bias": (heads, 16)}
        shapes |= {f"{layer}.attn.out.weight": (heads, 16, width), f"{layer}.attn.out.bias": (width,)}
        shapes |= {f"{layer}.mlp.fc1.weight": (80, width), f"{layer}.mlp.fc1.bias": (80,)}
        shapes |= {f"{layer}.mlp.fc2.weight": (width, 80), f"{layer}.mlp.fc2.bias": (width,)}
    state = random_state(shapes)
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "x.pth")

    def norm(x: Tensor, name: str) -> Tensor:
        return nn.functional.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-5)

    images = random_images(*IMAGES)
    x = nn.functional.conv2d(images, state["embedding.weight"], state["embedding.bias"], stride=4)
    x = x.permute(0, 2, 3, 1).reshape(3, 16, width)
    x = torch.cat([state["cls_token"].repeat(3, 1, 1), x], dim=1) + state["transformer.pos_embedding.pos_embedding"]
    for layer in (f"transformer.encoder_layers.{i}" for i in range(2)):
        y = norm(x, f"{layer}.norm1")
        q, k, v = (
            torch.tensordot(y, state[f"{layer}.attn.{name}.weight"], dims=([2], [0]))
            + state[f"{layer}.attn.{name}.bias"]
            for name in ("query", "key", "value")
        )
        mixed = torch.tensordot(attend(q, k, v), state[f"{layer}.attn.out.weight"], dims=([2, 3], [0, 1]))
        x = x + mixed + state[f"{layer}.attn.out.bias"]
        y = norm(x, f"{layer}.norm2") @ state[f"{layer}.mlp.fc1.weight"].T + state[f"{layer}.mlp.fc1.bias"]
        x = x + nn.functional.gelu(y) @ state[f"{layer}.mlp.fc2.weight"].T + state[f"{layer}.mlp.fc2.bias"]
    logits = norm(x, "transformer.norm")[:, 0] @ state["classifier.weight"].T + state["classifier.bias"]
    checkpoint = vitral.load(tmp_path / "x.pth")
    torch.testing.assert_close(checkpoint.model(images), logits, **CLOSE)


@torch.no_grad()
def test_labml(tmp_path: Path) -> None:
    """Compare with the network spelled out by its names, sequence first, as labml runs it."""
    width, heads = 48, 3
    shapes: dict[str, tuple[int, ...]] = {
        "patch_emb.conv.weight": (width, 3, 4, 4),
        "patch_emb.conv.bias": (width,),
        "cls_token_emb": (1, 1, width),
        "pos_emb.positional_encodings": (5000, 1, width),
        "ln.weight": (width,),
        "ln.bias": (width,),
        "classification.linear1.weight": (20, width),
        "classification.linear1.bias": (20,),
        "classification.linear2.weight": (7, 20),
        "classification.linear2.bias": (7,),
    }
    for layer in (f"transformer_layers.{i}" for i in range(2)):
        for name in ("norm_self_attn", "norm_ff"):
            shapes |= {f"{layer}.{name}.weight": (width,), f"{layer}.{name}.bias": (width,)}
        for name in ("self_attn.query.linear", "self_attn.key.linear", "self_attn.value.linear", "self_attn.output"):
            shapes |= {f"{layer}.{name}.weight": (width, width), f"{layer}.{name}.bias": (width,)}
        shapes |= {f"{layer}.feed_forward.layer1.weight": (80, width), f"{layer}.feed_forward.layer1.bias": (80,)}
        shapes |= {f"{layer}.feed_forward.layer2.weight": (width, 80), f"{layer}.feed_forward.layer2.bias": (width,)}
    state = random_state(shapes)
    torch.save(state, tmp_path / "x.pth")

    def linear(x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return nn.functional.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-5)

    images = random_images(*IMAGES)
    x = nn.functional.conv2d(images, state["patch_emb.conv.weight"], state["patch_emb.conv.bias"], stride=4)
    x = x.permute(2, 3, 0, 1).reshape(16, 3, width)  # patches, images, width
    x = torch.cat([state["cls_token_emb"].expand(1, 3, width), x]) + state["pos_emb.positional_encodings"][:17]
    for layer in (f"transformer_layers.{i}" for i in range(2)):
        y = norm(x, f"{layer}.norm_self_attn")
        q, k, v = (
            linear(y, f"{layer}.self_attn.{name}.linear").view(17, 3, heads, 16).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        x = x + linear(attend(q, k, v).transpose(0, 1).reshape(17, 3, width), f"{layer}.self_attn.output")
        y = linear(norm(x, f"{layer}.norm_ff"), f"{layer}.feed_forward.layer1")
        x = x + linear(nn.functional.gelu(y), f"{layer}.feed_forward.layer2")
    logits = linear(linear(norm(x[0], "ln"), "classification.linear1").relu(), "classification.linear2")
    with pytest.raises(vitral.WeightsError, match="image_size"):
        vitral.load(tmp_path / "x.pth", heads=3)
    checkpoint = vitral.load(tmp_path / "x.pth", heads=3, image_size=16)
    torch.testing.assert_close(checkpoint.model(images), logits, **CLOSE)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("dist_token", "distillation token"),
        ("blocks.0.mlp.w12.weight", "SwiGLU"),
        ("norm_pre.weight", "norm before the encoder"),
        ("blocks.0.attn.q_norm.weight", "normalizes queries"),
        ("blocks.0.attn.relative_position_bias_table", "biases"),
    ],
)
def test_unsupported_networks_are_refused(extra: str, reason: str, tmp_path: Path) -> None:
    state = timm_model().state_dict() | {extra: torch.zeros(4)}
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(vitral.WeightsError, match=reason):
        vitral.load(tmp_path / "x.safetensors")


def test_post_norm_of_timm_is_refused(tmp_path: Path) -> None:
    save_file(timm_model().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_relpos_base_patch16_rpn_224"}))
    with pytest.raises(vitral.WeightsError, match="post-norm"):
        vitral.load(tmp_path)


def test_vit_pytorch_is_refused(tmp_path: Path) -> None:
    from vit_pytorch import ViT as Theirs

    model = Theirs(image_size=16, patch_size=4, num_classes=7, dim=48, depth=2, heads=3, mlp_dim=80)
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    with pytest.raises(vitral.WeightsError, match="norms around the patch embedding"):
        vitral.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("dialect", "variant", "field"),
    [
        ("google", dict(activation="gelu"), "activation"),
        ("google", dict(activation="gelu-tanh", registers=2), "registers"),
        ("big_vision", dict(activation="gelu-tanh", pool="mean", class_token=True), "class_token"),
        ("timm", dict(representation=8), "representation"),
        ("timm", dict(position="relative"), "position"),
        ("timm", dict(attention="axial"), "attention"),
        ("huggingface", dict(pool="mean"), "pool"),
        ("torchvision", dict(activation="relu"), "activation"),
        ("torchvision", dict(stem=ConvStem(widths=(8, 16)), patch_size=1), "stem"),
        ("torchvision", dict(position_at="every-layer"), "position_at"),
    ],
)
def test_configs_that_a_dialect_cannot_store(dialect: str, variant: dict[str, Any], field: str, tmp_path: Path) -> None:
    suffix = ".npz" if dialect in ("google", "big_vision") else ".safetensors"
    with pytest.raises(vitral.WeightsError, match=field):
        vitral.save(small_model(**variant), tmp_path / f"x{suffix}", dialect=dialect)
    assert not list(tmp_path.iterdir())


def test_a_pth_cannot_store_another_activation(tmp_path: Path) -> None:
    written = vitral.save(small_model(activation="relu"), tmp_path / "x.pth", dialect="timm")
    assert written.load_options == {"heads": 3, "activation": "relu"}
    assert written.constants == {"activation": "gelu"}


def test_our_format_stores_every_config(tmp_path: Path) -> None:
    for index, variant in enumerate([*OURS, *(v for _, v in GOOGLE), dict(position="relative", attention="axial")]):
        model = small_model(**variant)
        vitral.save(model, tmp_path / f"{index}.safetensors")
        back = vitral.load(tmp_path / f"{index}.safetensors")
        assert back.model.config == model.config
        assert isinstance(back.model, ViT)
        for name, tensor in model.state_dict().items():
            assert torch.equal(back.model.state_dict()[name], tensor)
    assert replace(back.preprocess, size=(16, 16)).size == (16, 16)
