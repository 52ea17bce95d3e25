"""What stands in timm's config.json, read and written: ``architecture`` (a name), ``model_args`` (of VisionTransformer)
and ``pretrained_cfg`` (preprocessing and labels)."""

import re
from dataclasses import dataclass
from typing import Any

from vitral.errors import ConfigError, WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import imagenet_preprocess
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.draft import refuse
from vitral.weights.dialects.shapes import Pair, pair_of
from vitral.weights.formats.tensor_file import TensorFile

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "relu": "relu"}
_POOLS = {"avg": "mean", "token": "token", "": "none", "map": "map"}
_ARCHITECTURES: tuple[tuple[str, dict[str, Any]], ...] = (  # what timm's names imply and its files do not say
    (
        r"base_patch32_siglip|large_patch16_siglip(_gap)?_512|(so400m|giantopt)_patch16_siglip",
        {"activation": "gelu-tanh"},
    ),
    (r"vit_base_patch16_gap_224", {"heads": 16}),
)
_ARGUMENTS = (  # which we take, see in the tensors, or can do without
    {"img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio"}
    | {"class_token", "no_embed_class", "reg_tokens", "pos_embed", "init_values", "global_pool", "fc_norm", "act_layer"}
    | {"qkv_bias", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "output_fmt", "embed_norm_layer"}
    | {"drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"}
    | {"weight_init", "fix_init"}
)


@dataclass(frozen=True, kw_only=True)
class ConfigJson:
    """Nothing in it where there is no file."""

    architecture: str
    arguments: dict[str, Any]
    pretrained: dict[str, Any]
    global_pool: Any

    @property
    def size(self) -> Pair | None:
        """(height, width) of the images."""
        size = self.pretrained.get("input_size")
        used = pair_of(size[1:]) if isinstance(size, list) and len(size) == 3 else None
        return pair_of(self.arguments.get("img_size")) or used

    @property
    def activation(self) -> str | None:
        return _ACTIVATIONS.get(str(self.arguments.get("act_layer")), self._implied("activation"))

    @property
    def heads(self) -> int | None:
        return self.arguments.get("num_heads", self._implied("heads"))

    @property
    def pool(self) -> str:
        return "token" if self.global_pool is None else _POOLS[str(self.global_pool)]

    @property
    def labels(self) -> tuple[str, ...] | None:
        names = self.pretrained.get("label_names")
        return tuple(map(str, names)) if isinstance(names, list) else None

    def _implied(self, field: str) -> Any:
        found = (fields for pattern, fields in _ARCHITECTURES if re.search(pattern, self.architecture))
        return next(found, {}).get(field)


# ---- reading ----


def read_config_json(file: TensorFile) -> ConfigJson:
    """What is beside the file; refuses what we have no place for."""
    told = file.beside.get("config.json", {})
    told = told if "architecture" in told else {}
    arguments, pretrained = told.get("model_args") or {}, told.get("pretrained_cfg") or told
    if not isinstance(arguments, dict) or not isinstance(pretrained, dict):
        raise WeightsError("config.json: model_args and pretrained_cfg must be objects.")
    found = ConfigJson(
        architecture=str(told.get("architecture", "")),
        arguments=arguments,
        pretrained=pretrained,
        global_pool=arguments.get("global_pool", told.get("global_pool")),
    )
    _check(found)
    return found


def _check(told: ConfigJson) -> None:
    name, arguments = told.architecture, told.arguments
    if "_rpn_" in name or "post" in str(arguments.get("block_fn", "")).lower():
        raise refuse("timm", f"architecture {name} is post-norm, and a ViT of the paper is pre-norm")
    if re.search(r"rope|^eva|dinov3", name):
        raise refuse("timm", f"architecture {name} turns queries and keys by their position")
    activation = arguments.get("act_layer")
    for key, value, known in (("global_pool", told.global_pool, _POOLS), ("act_layer", activation, _ACTIVATIONS)):
        if value is not None and str(value) not in known:
            raise refuse("timm", f"{key} is {value!r}, and there are {', '.join(map(repr, known))}")
    unknown = [key for key, value in arguments.items() if key not in _ARGUMENTS and value not in (None, False, 0, "")]
    if unknown:
        raise refuse("timm", f"it was built with {unknown[0]}={arguments[unknown[0]]!r}, which is not known here")


def find_preprocess(config: ViTConfig, relative: str, told: ConfigJson, assumed: dict[str, str]) -> Preprocess:
    if (described := told_preprocess(config, told)) is not None:
        return described
    is_newer = not config.has_class_token or config.registers > 0  # timm's own recipes, which use 0.5
    if relative == "timm" and not is_newer and (config.layer_scale is not None or config.norm_after_pool):
        relative = "DeiT III or a fine-tuned MAE"
    if relative != "timm":
        assumed["preprocess"] = f"preprocessing: ImageNet's mean and std, bicubic, centre crop, as {relative} has it"
        return imagenet_preprocess(config.image_hw, "bicubic").with_channels(config.channels)
    assumed["preprocess"] = (
        "preprocessing: mean and std 0.5, as timm's AugReg models; DeiT's files look the same and use ImageNet's "
        "(preprocess=dict(mean=..., std=...) overrides)"
    )
    half = Preprocess(size=config.image_hw, resize="crop", crop_fraction=0.9, interpolation="bicubic")
    return half.with_channels(config.channels)


def told_preprocess(config: ViTConfig | BiTConfig, told: ConfigJson) -> Preprocess | None:
    """What the file says of it, if it does."""
    described = told.pretrained
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
        raise WeightsError(f"config.json: its preprocessing cannot be used: {error}") from error
    return preprocess.with_channels(config.channels)


# ---- writing ----


def arguments(config: ViTConfig) -> dict[str, Any]:
    """Those of timm's VisionTransformer for this network."""
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


def describe(content: Content) -> dict[str, Any]:
    """The config.json of a folder that timm opens as ``local-dir:``."""
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
        "architecture": "vit_base_patch16_224",  # the class; every size is in model_args
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": arguments(config)["global_pool"],
        "pretrained_cfg": described,
        "model_args": {**arguments(config), "in_chans": config.channels},
    }
