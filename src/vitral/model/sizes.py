"""Model names: the config behind `ViT-B/16`, in any spelling that the paper and its code use."""

import re
from ast import literal_eval
from typing import Any, get_args, get_type_hints

from vitral.errors import ConfigError, check_field_names, check_type, did_you_mean
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ResNetStem, ViTConfig

# size: width, depth, heads, mlp_width. Ti to H as in the paper and AugReg; g and G as in "Scaling Vision Transformers".
SIZES = {
    "ti": (192, 12, 3, 768),
    "s": (384, 12, 6, 1536),
    "b": (768, 12, 12, 3072),
    "l": (1024, 24, 16, 4096),
    "h": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
    # vitral's own, for images of 28 to 64 pixels.
    "pico": (96, 4, 3, 384),
    "nano": (128, 6, 4, 512),
    "micro": (192, 9, 3, 768),
}
_PATCHES = {"ti": (16,), "s": (8, 14, 16, 32), "b": (8, 14, 16, 32), "l": (14, 16, 32)} | dict.fromkeys("hgG", (14,))
_SMALL_IMAGES = {4: 32, 7: 28, 8: 64}  # patch size: image size of a pico, nano or micro

# hybrid: transformer size, stages of the ResNet, patch on its feature map
_HYBRIDS = {
    "r-vit-ti16": ("ti", (), 8),  # named 16, but the published network has 32: root / 4, then 8
    "r26-vit-s32": ("s", (2, 2, 2, 2), 1),
    "r26-vit-b32": ("b", (2, 2, 2, 2), 1),
    "r50-vit-b16": ("b", (3, 4, 9), 1),
    "r50-vit-b32": ("b", (3, 4, 6, 3), 1),
    "r50-vit-l16": ("l", (3, 4, 9), 1),
    "r50-vit-l32": ("l", (3, 4, 6, 3), 1),
}

# The paper's baseline: units in each stage by the number of layers, and the widths that have a name.
RESNETS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
_FACTORS = {26: (1,), 50: (1, 2, 3), 101: (1, 3), 152: (1, 2, 4), 200: (3,)}


def _build_table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for size, patches in _PATCHES.items():
        for patch in patches:
            table[f"vit-{size}{patch}"] = _size_fields(size, patch)
    for size in ("pico", "nano", "micro"):
        for patch, image_size in _SMALL_IMAGES.items():
            table[f"vit-{size}{patch}"] = _size_fields(size, patch) | {"image_size": image_size}
    for name, (size, stages, patch) in _HYBRIDS.items():
        table[name] = _size_fields(size, patch) | {"stem": ResNetStem(stages=stages)}
    for layers, factors in _FACTORS.items():
        for factor in factors:
            table[f"bit-r{layers}x{factor}"] = {"stages": RESNETS[layers], "width_factor": factor}
    return table


def _size_fields(size: str, patch: int) -> dict[str, Any]:
    width, depth, heads, mlp_width = SIZES[size]
    return dict(width=width, depth=depth, heads=heads, mlp_width=mlp_width, patch_size=patch)


NAMES = _build_table()

_SIZE_NAMES = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g", "gigantic": "G"}
_SPELLING = re.compile(
    r"(?:(?P<resnet>r\d*)[\s+_-]+)?(?:vit[\s_-]*)?(?P<size>[a-z]+?)[\s/_-]*(?:patch)?(?P<patch>\d+)", re.IGNORECASE
)

_BIT_SPELLING = re.compile(
    r"(?:bit[\s_-]*)?(?:[sml]-)?(?:r|resnet|resnetv2_)(?P<layers>\d{1,3})x(?P<factor>\d{1,3})(?:_bit)?", re.IGNORECASE
)


def canonical_name(name: str) -> str:
    """Return `vit-b16` for `ViT-B/16`, `ViT-B_16`, `vit_base_patch16` or `B/16`; raise ConfigError if unknown."""
    check_type("The model name", name, str, hint="Build a model from a config with ViT(config).")
    text = name.strip()
    problem = f"There is no model named {name!r}."
    if baseline := _BIT_SPELLING.fullmatch(text):
        layers, factor = int(baseline["layers"]), int(baseline["factor"])
        if layers in RESNETS and 1 <= factor <= 16:
            return f"bit-r{layers}x{factor}"
        depths = ", ".join(map(str, RESNETS))
        raise ConfigError(problem, hint=f"Use a BiT of {depths} layers and a factor from 1 to 16.")
    match = _SPELLING.fullmatch(text)
    if match and _spell(match) in NAMES:
        return _spell(match)
    start = _SPELLING.match(text)  # a misspelled name may start with a known spelling
    hints = (match and _other_patches(match), start and did_you_mean(_spell(start), NAMES), did_you_mean(text, NAMES))
    hint = next((f"{hint} " for hint in hints if hint), "")
    raise ConfigError(problem, hint=f"{hint}`vitral models` lists all names; `vitral train --from` takes weights.")


def _spell(match: re.Match[str]) -> str:
    size = match["size"]
    size = _SIZE_NAMES.get(size.lower(), size if size in ("g", "G") else size.lower())  # g and G are two models
    resnet = f"{match['resnet'].lower()}-" if match["resnet"] else ""
    return f"{resnet}vit-{size}{match['patch']}"


def _other_patches(match: re.Match[str]) -> str | None:
    """Return a hint for a known size with an unnamed patch size: the named ones, and how to create this one."""
    size = _spell(match).removesuffix(match["patch"])
    named = [name for name in NAMES if name.rstrip("0123456789") == size]
    patch = int(match["patch"][:6])
    if not named or match["resnet"] or not patch or NAMES[named[-1]].get("image_size", 224) % patch:
        return None
    return f"Use {', '.join(named)}, or create({named[-1]!r}, patch_size={match['patch']})."


def named_config(name: str, **overrides: Any) -> ViTConfig | BiTConfig:
    """Return the config of a named model, with the given fields changed."""
    canonical = canonical_name(name)
    if baseline := _BIT_SPELLING.fullmatch(canonical):
        check_field_names(overrides, of=BiTConfig)
        sizes: dict[str, Any] = dict(stages=RESNETS[int(baseline["layers"])], width_factor=int(baseline["factor"]))
        return BiTConfig(**sizes | overrides)
    check_field_names(overrides, of=ViTConfig)
    return ViTConfig(**NAMES[canonical] | overrides)


def parse_field(name: str, text: str) -> object:
    """Return the value of a field as typed on a command line: 384, 384x256, (2, 3), true, none, mean."""
    none_is_a_choice = "none" in get_args(get_type_hints(ViTConfig).get(name))
    special = {"true": True, "false": False, "none": "none" if none_is_a_choice else None}
    if text.lower() in special:
        return special[text.lower()]
    if sides := re.fullmatch(r"(\d+)x(\d+)", text):
        return int(sides[1]), int(sides[2])
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last three for hostile text only
        return text
