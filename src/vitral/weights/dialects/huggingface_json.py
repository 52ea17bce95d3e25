"""What stands in transformers' config.json and preprocessor_config.json, read and written."""

from collections.abc import Iterator
from typing import Any

from vitral.errors import ConfigError, WeightsError
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import imagenet_preprocess
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.draft import refuse
from vitral.weights.dialects.shapes import one_or_two, pair_of
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


def find_activation(told: dict[str, Any]) -> str:
    name = str(told.get("hidden_act", "gelu"))
    if name not in _ACTIVATIONS:
        raise refuse("huggingface", f"its activation is {name}, and there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def find_preprocess(config: ViTConfig, file: TensorFile, assumed: dict[str, str]) -> Preprocess:
    told = file.beside.get("preprocessor_config.json")
    if told is None and config.layer_scale is not None:
        assumed["preprocess"] = "preprocessing: ImageNet's, as DINOv2 has it: there is no preprocessor_config.json"
        return imagenet_preprocess(config.image_hw, "bicubic").with_channels(config.channels)
    if told is None:
        assumed["preprocess"] = "preprocessing: mean and std 0.5, squashed: there is no preprocessor_config.json"
        return Preprocess(size=config.image_hw).with_channels(config.channels)
    normalises = told.get("do_normalize", True)
    mean, std = told.get("image_mean", [0.5] * 3), told.get("image_std", [0.5] * 3)
    size, crop = pair_of_sides(told.get("size")), pair_of_sides(told.get("crop_size"))
    shortest = told["size"].get("shortest_edge") if isinstance(told.get("size"), dict) else None
    crops = bool(told.get("do_center_crop")) or shortest is not None
    cut = min(crop or config.image_hw)  # of which this much is left
    resample = told.get("resample", 2)
    if unlike := list(_unlike(told, config, size, crop if told.get("do_center_crop") else None)):
        assumed["preprocess"] = f"preprocessing: {'; '.join(unlike)}"
    interpolation = _RESAMPLING.get(resample, "bicubic") if isinstance(resample, int) else "bilinear"
    try:
        preprocess = Preprocess(
            size=config.image_hw,
            resize="crop" if crops else "squash",
            crop_fraction=min(1.0, cut / whole) if crops and (whole := shortest or (size and min(size))) else 1.0,
            interpolation=interpolation,  # type: ignore[arg-type]
            mean=tuple(mean) if normalises else (0.0,) * len(mean),
            std=tuple(std) if normalises else (1.0,) * len(std),
            channels=len(mean),
        )
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, ConfigError) as error:
        raise WeightsError(f"{file.path}: its preprocessor_config.json cannot be used: {error}.") from error
    return preprocess.with_channels(config.channels)


def pair_of_sides(size: Any) -> tuple[int, int] | None:
    """224, or {"height": 224, "width": 224}."""
    return pair_of([size.get("height"), size.get("width")] if isinstance(size, dict) else size)


def _unlike(
    told: dict[str, Any], config: ViTConfig, size: tuple[int, int] | None, crop: tuple[int, int] | None
) -> Iterator[str]:
    """What the file says and is done otherwise here."""
    resample, factor = told.get("resample", 2), told.get("rescale_factor", 1 / 255)
    if resample not in (*_RESAMPLING, None):
        yield f"bicubic, as Pillow's resampling {resample!r} is not known here"
    if crop is not None and crop != config.image_hw:
        yield f"{config.image_hw[0]} x {config.image_hw[1]} as the network has it, and not {crop[0]} x {crop[1]}"
    if crop is not None and size is not None and size != crop:
        yield f"the short side is resized and the middle cut out, where the file squashes to {size[0]} x {size[1]}"
    if told.get("do_resize") is False:
        yield "pictures are resized, where the file leaves them as they are"
    if told.get("do_rescale") is False or not isinstance(factor, int | float) or abs(factor * 255 - 1) > 0.01:
        yield "pixels become numbers from 0 to 1 before the mean is taken off, where the file has another scale"


def find_labels(told: dict[str, Any]) -> tuple[str, ...] | None:
    names = told.get("id2label")
    if not isinstance(names, dict) or {str(key) for key in names} != {str(index) for index in range(len(names))}:
        return None
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    is_placeholder = all(label == f"LABEL_{index}" for index, label in enumerate(labels))
    return None if is_placeholder else labels


def describe(content: Content) -> dict[str, Any]:
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
        "image_size": one_or_two(config.image_hw),
        "patch_size": one_or_two(config.patch_hw),
        "num_channels": config.channels,
        "qkv_bias": True,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        **({"problem_type": "multi_label_classification"} if content.multi_label else {}),
        "dtype": str(next(iter(content.state.values())).dtype).removeprefix("torch."),
    }


def describe_preprocess(preprocess: Preprocess) -> dict[str, Any]:
    height, width = preprocess.size
    crops = preprocess.resize == "crop"
    short = round(min(preprocess.size) / preprocess.crop_fraction)
    described: dict[str, Any] = {
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
    return described | ({"do_center_crop": True, "crop_size": {"height": height, "width": width}} if crops else {})
