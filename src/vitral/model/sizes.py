"""The table of names: what ``ViT-B/16`` means, in any of the spellings that the paper and its code use."""

import re
from typing import Any

from vitral.errors import ConfigError, did_you_mean
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ResNetStem, ViTConfig, check_field_names

# size: width, depth, heads, mlp_width. Ti to H as in the paper and AugReg; g and G as in "Scaling Vision Transformers".
SIZES = {
    "ti": (192, 12, 3, 768),
    "s": (384, 12, 6, 1536),
    "b": (768, 12, 12, 3072),
    "l": (1024, 24, 16, 4096),
    "h": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
    # Ours, for pictures of 28 to 64 pixels.
    "pico": (96, 4, 3, 384),
    "nano": (128, 6, 4, 512),
    "micro": (192, 9, 3, 768),
}
_PATCHES = {
    "ti": (16,),
    "s": (8, 14, 16, 32),
    "b": (8, 14, 16, 32),
    "l": (14, 16, 32),
    "h": (14,),
    "g": (14,),
    "G": (14,),
}
_SMALL_IMAGES = {4: 32, 7: 28, 8: 64}  # patch: image size that a pico, nano or micro is made for

# hybrid: transformer size, stages of the ResNet, patch on its feature map
_HYBRIDS = {
    "r-vit-ti16": ("ti", (), 8),  # the name says 16, the published network has 32: root / 4, then 8
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
            table[f"vit-{size}{patch}"] = {**_size_fields(size, patch), "image_size": image_size}
    for name, (size, stages, patch) in _HYBRIDS.items():
        table[name] = {**_size_fields(size, patch), "stem": ResNetStem(stages=stages)}
    for layers, factors in _FACTORS.items():
        for factor in factors:
            table[f"bit-r{layers}x{factor}"] = {"stages": RESNETS[layers], "width_factor": factor}
    return table


def _size_fields(size: str, patch: int) -> dict[str, Any]:
    width, depth, heads, mlp_width = SIZES[size]
    return dict(width=width, depth=depth, heads=heads, mlp_width=mlp_width, patch_size=patch)


NAMES = _build_table()

_WORDS = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g", "gigantic": "G"}
_SPELLING = re.compile(
    r"(?:(?P<resnet>r\d*)[\s+_-]+)?(?:vit[\s_-]*)?(?P<size>[a-z]+?)[\s/_-]*(?:patch)?(?P<patch>\d+)", re.IGNORECASE
)

_BIT_SPELLING = re.compile(
    r"(?:bit[\s_-]*)?(?:[sml]-)?(?:r|resnet|resnetv2_)(?P<layers>\d{1,3})x(?P<factor>\d{1,3})(?:_bit)?", re.IGNORECASE
)


def canonical_name(name: str) -> str:
    """``ViT-B/16``, ``ViT-B_16``, ``vit_base_patch16``, ``B/16`` -> ``vit-b16``; ConfigError for what is not known."""
    if not isinstance(name, str):
        seen = type(name).__name__
        raise ConfigError(f"A model is named by a word, and this is of type {seen}.", hint="ViT(config) builds one.")
    words = name.strip()
    if baseline := _BIT_SPELLING.fullmatch(words):
        return _spell_baseline(name, int(baseline["layers"]), int(baseline["factor"]))
    match = _SPELLING.match(words)
    found = _spell(match) if match else words
    if match and match.end() == len(words) and found in NAMES:
        return found
    hints = _other_patches(match) if match and match.end() == len(words) else None
    hints = hints or did_you_mean(found, NAMES) or did_you_mean(words, NAMES)
    raise ConfigError(
        f"There is no model named {name!r}.",
        hint=f"{f'{hints} ' if hints else ''}`vitral models` lists them all; `vitral train` takes weights by --from.",
    )


def _spell_baseline(name: str, layers: int, factor: int) -> str:
    if layers not in RESNETS or not 1 <= factor <= 16:
        known = ", ".join(map(str, RESNETS))
        raise ConfigError(
            f"There is no model named {name!r}.", hint=f"A BiT has {known} layers and a factor of 1 to 16."
        )
    return f"bit-r{layers}x{factor}"


def _spell(match: re.Match[str]) -> str:
    size = match["size"]
    size = _WORDS.get(size.lower(), size if size in ("g", "G") else size.lower())  # g and G are two models
    resnet = f"{match['resnet'].lower()}-" if match["resnet"] else ""
    return f"{resnet}vit-{size}{match['patch']}"


def _other_patches(match: re.Match[str]) -> str | None:
    """For a known size with another patch: those that have a name, and how to get this one."""
    size = _spell(match).removesuffix(match["patch"])
    named = [name for name in NAMES if name.rstrip("0123456789") == size]
    patch = int(match["patch"][:6])
    if not named or match["resnet"] or not patch or NAMES[named[-1]].get("image_size", 224) % patch:
        return None
    return f"Named are {', '.join(named)}; for another patch, create({named[-1]!r}, patch_size={match['patch']})."


def named_config(name: str, **overrides: Any) -> ViTConfig | BiTConfig:
    """The configuration of a named model, with any of its fields changed."""
    canonical = canonical_name(name)
    if baseline := _BIT_SPELLING.fullmatch(canonical):
        check_field_names(overrides, of=BiTConfig)
        known = {"stages": RESNETS[int(baseline["layers"])], "width_factor": int(baseline["factor"])}
        return BiTConfig(**{**known, **overrides})
    known = NAMES[canonical]
    check_field_names(overrides)
    return ViTConfig(**{**known, **overrides})
