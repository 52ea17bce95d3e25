"""Read and write timm's config.json: ``architecture``, ``model_args`` and ``pretrained_cfg``."""

import re
from dataclasses import dataclass
from typing import Any

from vitral.errors import ConfigError, WeightsError, short_repr
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.plan import Config, Pair, as_pair, imagenet_preprocess, unsupported
from vitral.weights.formats.tensor_file import TensorFile

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "relu": "relu"}
_POOLS = {"avg": "mean", "token": "token", "": "none", "map": "map"}
_TANH_MODELS = r"base_patch32_siglip|large_patch16_siglip(_gap)?_512|(so400m|giantopt)_patch16_siglip"
# fields that timm's names imply and its files do not state
_ARCHITECTURES = {_TANH_MODELS: {"activation": "gelu-tanh"}, r"vit_base_patch16_gap_224": {"heads": 16}}
_SUPPORTED_ARGUMENTS = (  # used, visible in the tensors, or irrelevant to inference
    {"img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio"}
    | {"class_token", "no_embed_class", "reg_tokens", "pos_embed", "init_values", "global_pool", "fc_norm", "act_layer"}
    | {"qkv_bias", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "output_fmt", "embed_norm_layer"}
    | {"drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"}
    | {"weight_init", "fix_init"}
)


@dataclass(frozen=True, kw_only=True)
class ConfigJson:
    """The content of config.json; empty without the file."""

    architecture: str
    arguments: dict[str, Any]
    pretrained: dict[str, Any]
    global_pool: Any

    @property
    def size(self) -> Pair | None:
        """Return (height, width) of the images, if stated."""
        size = self.pretrained.get("input_size")
        used = as_pair(size[1:]) if isinstance(size, list) and len(size) == 3 else None
        return as_pair(self.arguments.get("img_size")) or used

    @property
    def activation(self) -> str | None:
        """Return the activation, if stated or implied by the architecture."""
        return _ACTIVATIONS.get(str(self.arguments.get("act_layer")), self._implied("activation"))

    @property
    def heads(self) -> object:
        """Return the number of heads, if stated or implied by the architecture."""
        return self.arguments.get("num_heads", self._implied("heads"))

    @property
    def pool(self) -> str:
        """Return the pooling, by default that of the class token."""
        return "token" if self.global_pool is None else _POOLS[str(self.global_pool)]

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Return the class names, if stated."""
        names = self.pretrained.get("label_names")
        return tuple(map(str, names)) if isinstance(names, list) else None

    def _implied(self, field: str) -> Any:  # noqa: ANN401 (fields of several types)
        implied = (fields for pattern, fields in _ARCHITECTURES.items() if re.search(pattern, self.architecture))
        return next(implied, {}).get(field)


def read_config_json(file: TensorFile) -> ConfigJson:
    """Return timm's config.json beside a file; raise WeightsError for an unsupported architecture."""
    content = file.sidecars.get("config.json", {})
    content = content if "architecture" in content else {}
    arguments, pretrained = content.get("model_args") or {}, content.get("pretrained_cfg") or content
    if not isinstance(arguments, dict) or not isinstance(pretrained, dict):
        raise WeightsError(f"{file.name}: model_args and pretrained_cfg in its config.json must be objects.")
    stated = ConfigJson(
        architecture=str(content.get("architecture", "")),
        arguments=arguments,
        pretrained=pretrained,
        global_pool=arguments.get("global_pool", content.get("global_pool")),
    )
    _check(stated)
    return stated


def _check(stated: ConfigJson) -> None:
    name, arguments = stated.architecture[:100], stated.arguments
    if "_rpn_" in name or "post" in str(arguments.get("block_fn", "")).lower():
        raise unsupported("timm", f"architecture {name} is post-norm, and a ViT of the paper is pre-norm")
    if re.search(r"rope|^eva|dinov3", name):
        raise unsupported("timm", f"architecture {name} rotates queries and keys by their position")
    activation = arguments.get("act_layer")
    for key, value, choices in (("global_pool", stated.global_pool, _POOLS), ("act_layer", activation, _ACTIVATIONS)):
        if value is not None and str(value) not in choices:
            raise unsupported("timm", f"{key} is {short_repr(value)} (expected {', '.join(map(repr, choices))})")
    for key, value in arguments.items():
        if key not in _SUPPORTED_ARGUMENTS and value not in (None, False, 0, ""):
            raise unsupported("timm", f"it was built with {key}={short_repr(value)}")


def infer_preprocess(config: ViTConfig, family: str, stated: ConfigJson, assumed: dict[str, str]) -> Preprocess:
    """Return the stated preprocessing, or else that of the family, noted as assumed."""
    if (preprocess := stated_preprocess(config, stated)) is not None:
        return preprocess
    is_newer = not config.has_class_token or config.registers > 0  # timm's own recipes use 0.5
    if family == "timm" and not is_newer and (config.layer_scale is not None or config.norm_after_pool):
        family = "DeiT III or a fine-tuned MAE"
    if family != "timm":
        assumed["preprocess"] = f"preprocessing: ImageNet's mean and std, bicubic, center crop, as in {family}"
        return imagenet_preprocess(config.image_hw, "bicubic").with_channels(config.channels)
    assumed["preprocess"] = (
        "preprocessing: mean and std 0.5, as in timm's AugReg models; DeiT's files look the same but use ImageNet's "
        "(override with preprocess=dict(mean=..., std=...))"
    )
    half = Preprocess(size=config.image_hw, resize="crop", crop_fraction=0.9, interpolation="bicubic")
    return half.with_channels(config.channels)


def stated_preprocess(config: Config, stated: ConfigJson) -> Preprocess | None:
    """Return the preprocessing in config.json, if it has mean and std."""
    described = stated.pretrained
    if not isinstance(described.get("mean"), list) or not isinstance(described.get("std"), list):
        return None
    crop, interpolation = described.get("crop_pct"), described.get("interpolation")
    try:
        preprocess = Preprocess(
            size=config.image_hw,
            resize="squash" if described.get("crop_mode") == "squash" else "crop",
            crop_fraction=crop if isinstance(crop, int | float) and 0 < crop <= 1 else 1.0,
            interpolation=interpolation if interpolation in ("nearest", "bilinear", "bicubic") else "bicubic",
            mean=tuple(described["mean"]),
            std=tuple(described["std"]),
            channels=len(described["mean"]),
        )
    except ConfigError as error:
        raise WeightsError(f"The preprocessing in config.json is invalid: {error}") from error
    return preprocess.with_channels(config.channels)


def model_args(config: ViTConfig) -> dict[str, Any]:
    """Return the arguments of timm's VisionTransformer for this network."""
    return dict(
        img_size=config.image_hw,
        patch_size=config.patch_size,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_width / config.width,
        class_token=config.has_class_token,
        no_embed_class=bool(config.registers),
        reg_tokens=config.registers,
        pos_embed="none" if config.position == "none" else "learn",
        init_values=config.layer_scale,
        global_pool={ours: theirs for theirs, ours in _POOLS.items()}[config.pool],
        fc_norm=config.norm_after_pool,
        act_layer={ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation],
    )


def config_json(content: Content) -> dict[str, Any]:
    """Return the config.json of a folder that timm opens as ``local-dir:``."""
    config, preprocess = content.config, content.preprocess
    described: dict[str, Any] = dict(
        input_size=[config.channels, *config.image_hw],
        interpolation=preprocess.interpolation,
        crop_pct=preprocess.crop_fraction,
        crop_mode="squash" if preprocess.resize == "squash" else "center",
        mean=list(preprocess.mean),
        std=list(preprocess.std),
        num_classes=config.num_classes,
        first_conv="patch_embed.proj",
        classifier="head",
    )
    if content.labels:
        described["label_names"] = list(content.labels)
    return {
        "architecture": "vit_base_patch16_224",  # stands for the class; model_args has every size
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": model_args(config)["global_pool"],
        "pretrained_cfg": described,
        "model_args": {**model_args(config), "in_chans": config.channels},
    }
