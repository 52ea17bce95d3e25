"""Read and write transformers' config.json and preprocessor_config.json."""

from collections.abc import Iterator
from typing import Any

from vitral.errors import ConfigError, WeightsError, short_repr
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.plan import Pair, as_pair, as_size, imagenet_preprocess, unsupported
from vitral.weights.formats.tensor_file import TensorFile

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "relu": "relu",
}
_RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def stated_activation(stated: dict[str, Any]) -> str:
    """Return the activation in config.json, by default gelu."""
    name = str(stated.get("hidden_act", "gelu"))
    if name not in _ACTIVATIONS:
        expected = ", ".join(_ACTIVATIONS)
        raise unsupported("huggingface", f"its activation is {short_repr(name)} (expected {expected})")
    return _ACTIVATIONS[name]


def infer_preprocess(config: ViTConfig, file: TensorFile, assumed: dict[str, str]) -> Preprocess:
    """Return the preprocessing in preprocessor_config.json, or else the default, noted as assumed."""
    stated = file.sidecars.get("preprocessor_config.json")
    if stated is None and config.layer_scale is not None:
        assumed["preprocess"] = "preprocessing: ImageNet's, as in DINOv2; there is no preprocessor_config.json"
        return imagenet_preprocess(config.image_hw, "bicubic").with_channels(config.channels)
    if stated is None:
        assumed["preprocess"] = "preprocessing: mean and std 0.5, squash; there is no preprocessor_config.json"
        return Preprocess(size=config.image_hw).with_channels(config.channels)
    size, crop = _as_pair_of_sides(stated.get("size")), _as_pair_of_sides(stated.get("crop_size"))
    differences = list(_differences(stated, config, size, crop if stated.get("do_center_crop") else None))
    if differences:
        assumed["preprocess"] = f"preprocessing: {'; '.join(differences)}"
    try:
        return _parse_preprocess(stated, config, size, crop).with_channels(config.channels)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, ConfigError) as error:
        raise WeightsError(f"{file.name}: its preprocessor_config.json is invalid: {error}.") from error


def _parse_preprocess(stated: dict[str, Any], config: ViTConfig, size: Pair | None, crop: Pair | None) -> Preprocess:
    mean, std = stated.get("image_mean", [0.5] * 3), stated.get("image_std", [0.5] * 3)
    normalizes = stated.get("do_normalize", True)
    resample = stated.get("resample", 2)
    interpolation = _RESAMPLING.get(resample, "bicubic") if isinstance(resample, int) else "bilinear"
    shortest = stated["size"].get("shortest_edge") if isinstance(stated.get("size"), dict) else None
    crops = bool(stated.get("do_center_crop")) or shortest is not None
    kept, whole = min(crop or config.image_hw), shortest or (size and min(size))
    return Preprocess(
        size=config.image_hw,
        resize="crop" if crops else "squash",
        crop_fraction=min(1.0, kept / whole) if crops and whole else 1.0,
        interpolation=interpolation,  # type: ignore[arg-type]
        mean=tuple(mean) if normalizes else (0.0,) * len(mean),
        std=tuple(std) if normalizes else (1.0,) * len(std),
        channels=len(mean),
    )


def _as_pair_of_sides(size: object) -> Pair | None:
    """Return (height, width) of 224 or {"height": 224, "width": 224}."""
    return as_pair([size.get("height"), size.get("width")] if isinstance(size, dict) else size)


def _differences(stated: dict[str, Any], config: ViTConfig, size: Pair | None, crop: Pair | None) -> Iterator[str]:
    """Yield where our preprocessing differs from the one in the file."""
    resample, factor = stated.get("resample", 2), stated.get("rescale_factor", 1 / 255)
    if resample not in (*_RESAMPLING, None):
        yield f"bicubic; Pillow's resampling {short_repr(resample)} is not supported"
    if crop is not None and crop != config.image_hw:
        yield f"{config.image_hw[0]} x {config.image_hw[1]} as in the network, not {crop[0]} x {crop[1]}"
    if crop is not None and size is not None and size != crop:
        yield f"vitral resizes the short side and crops the center, but the file squashes to {size[0]} x {size[1]}"
    if stated.get("do_resize") is False:
        yield "vitral resizes images, but the file leaves their size unchanged"
    if stated.get("do_rescale") is False or not isinstance(factor, int | float) or abs(factor * 255 - 1) > 0.01:
        yield "vitral scales pixels to 0..1 before it subtracts the mean, but the file uses another scale"


def stated_labels(stated: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the class names in config.json, unless they are placeholders or have gaps."""
    names = stated.get("id2label")
    if not isinstance(names, dict) or {str(key) for key in names} != {str(index) for index in range(len(names))}:
        return None
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    is_placeholder = all(label == f"LABEL_{index}" for index, label in enumerate(labels))
    return None if is_placeholder else labels


def config_json(content: Content) -> dict[str, Any]:
    """Return the config.json of transformers."""
    config = content.config
    labels = content.labels or tuple(f"LABEL_{index}" for index in range(config.num_classes))
    return {
        "architectures": ["ViTForImageClassification" if config.num_classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": {"gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh", "relu": "relu"}[config.activation],
        "layer_norm_eps": config.norm_eps,
        "image_size": as_size(config.image_hw),
        "patch_size": as_size(config.patch_hw),
        "num_channels": config.channels,
        "qkv_bias": True,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        **({"problem_type": "multi_label_classification"} if content.multi_label else {}),
        "dtype": str(next(iter(content.state.values())).dtype).removeprefix("torch."),
    }


def preprocessor_json(preprocess: Preprocess) -> dict[str, Any]:
    """Return the preprocessor_config.json of transformers."""
    height, width = preprocess.size
    crops = preprocess.resize == "crop"
    short = round(min(preprocess.size) / preprocess.crop_fraction)
    settings: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": short} if crops else {"height": height, "width": width},
        "resample": {name: number for number, name in _RESAMPLING.items()}[preprocess.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    return settings | ({"do_center_crop": True, "crop_size": {"height": height, "width": width}} if crops else {})
