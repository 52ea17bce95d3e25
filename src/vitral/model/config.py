"""ViTConfig: every architecture choice of the paper and its appendix, as one frozen, checked description.

This module does not import torch, so names, costs and command lines resolve quickly. The text under a field is its
documentation everywhere: in docs/reference/network.md, in --help and in TOML comments.
"""

from dataclasses import dataclass, fields
from math import lcm
from re import fullmatch
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from vitral.errors import (
    ConfigError,
    DataError,
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_type,
    short_repr,
)

Size = int | tuple[int, int]
Position = Literal["none", "learned", "learned-2d", "relative", "sincos-2d"]
PositionAt = Literal["stem", "every-layer", "every-layer-shared"]
Resample = Literal["bilinear-corners", "bicubic", "bicubic-antialias", "bicubic-corners"]
Pool = Literal["token", "mean", "token+mean", "map", "none"]
Activation = Literal["gelu-tanh", "gelu", "relu"]
RepresentationActivation = Literal["tanh", "gelu", "relu"]
AttentionKind = Literal["full", "axial"]
StemNorm = Literal["group", "batch"]

MAX_INT = 2**31 - 1
MAX_CHANNELS = 10_000
MAX_SIDE = 16384
"""Largest image side in pixels that `parse_size` accepts."""
NORM_GROUPS = 32
"""Groups of every GroupNorm in the ResNets; their channels are a multiple of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetStem:
    """The hybrid of the paper's section 3.1: a ResNet whose feature map replaces the image."""

    stages: tuple[int, ...] = (3, 4, 9)
    """Residual units per stage; () is the root alone. The root halves the size twice, every stage after the first
    halves it once more."""
    width_factor: float = 1
    """Multiplies all widths of the ResNet. The root has int(64 * width_factor) channels, a multiple of 32."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", check_ints("stem: stages", self.stages))
        object.__setattr__(self, "width_factor", check_width_factor("stem: width_factor", self.width_factor))

    @property
    def halvings(self) -> int:
        return 2 + max(0, len(self.stages) - 1)

    @property
    def root_width(self) -> int:
        return int(64 * self.width_factor)

    @property
    def out_channels(self) -> int:
        return self.root_width * (4 * 2 ** (len(self.stages) - 1) if self.stages else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvStem:
    """Stacked 3x3 stride-2 convolutions ("Early Convolutions Help Transformers See Better", Xiao et al. 2021)."""

    widths: tuple[int, ...] = (48, 96, 192, 384)
    """Output channels per convolution. Each convolution halves the size: four of them equal 16-pixel patches."""
    norm: StemNorm = "group"
    """group: GroupNorm with 8 channels per group, per image; batch: BatchNorm, as in torchvision's conv stem, whose
    statistics depend on the batch in training."""

    def __post_init__(self) -> None:
        check_choice("stem: norm", self.norm, get_args(StemNorm))
        object.__setattr__(self, "widths", check_ints("stem: widths", self.widths))
        if not self.widths:
            raise ConfigError("stem: widths is empty; a ConvStem needs at least one convolution.")
        if self.norm == "group" and any(width % 8 for width in self.widths):
            hint = "Change the widths, or set norm='batch'."
            raise ConfigError(f"stem: widths must be multiples of 8 with norm='group' (got {self.widths}).", hint=hint)

    @property
    def halvings(self) -> int:
        return len(self.widths)

    @property
    def out_channels(self) -> int:
        return self.widths[-1]


Stem = ResNetStem | ConvStem


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """One Vision Transformer.

    A name such as `vitral.create("vit-b16")` sets the first five fields, the name of a hybrid also the stem, the name
    of a small model also the image size."""

    width: int
    """D, the length of every token."""
    depth: int
    """Number of encoder layers."""
    heads: int
    """Attention heads per layer; must divide width."""
    mlp_width: int
    """Hidden width of the MLP in each layer."""
    patch_size: Size
    """Side of a patch in pixels, or (height, width); with a stem, in cells of its feature map."""

    image_size: Size = 224
    """Side of the images in pixels, or (height, width). Other sizes work too: positions are resampled."""
    channels: int = 3
    """Channels of the images."""
    num_classes: int = 1000
    """Number of logits; 0 omits the head."""
    position: Position = "learned"
    """none; learned: one vector per position; learned-2d: a row and a column table of half the width each; relative:
    offsets as extra keys (D.4); sincos-2d: fixed sines and cosines."""
    position_at: PositionAt = "stem"
    """Add positions once after the stem, at every layer from separate tables, or at every layer from one shared
    table (table 8 of the paper)."""
    position_grid: Size | None = None
    """(rows, columns), or the side, of the grid of the position table; None: the grid of image_size."""
    position_resample: Resample = "bilinear-corners"
    """How positions are resampled to another grid. bilinear-corners: Google's; bicubic: transformers';
    bicubic-antialias: timm's; bicubic-corners: torchvision's."""
    pool: Pool = "token"
    """Input of the head. token: the class token; mean: the mean of the patches; token+mean: both, concatenated; map:
    attention pooling of the patches; none: every token."""
    class_token: bool | None = None
    """Add a class token; None: only if pool is token or token+mean."""
    norm_after_pool: bool = False
    """Apply the final norm after the pooling instead of before it (the heads of MAE and BEiT)."""
    registers: int = 0
    """Extra learned tokens without a position ("Vision Transformers Need Registers", Darcet et al. 2023)."""
    representation: int | None = None
    """Width of the hidden layer before the head (the paper's pre-training head); None: no hidden layer."""
    representation_activation: RepresentationActivation = "tanh"
    """Activation of the hidden layer before the head."""
    stem: Stem | None = None
    """None: patches of the image itself; ResNetStem: the paper's hybrid; ConvStem: stacked convolutions."""
    attention: AttentionKind = "full"
    """full: every token attends to every token; axial: each layer is a row block, then a column block (D.6). In both
    blocks, class token and registers attend to all tokens, and all tokens to them."""
    activation: Activation = "gelu-tanh"
    """Activation of the MLP. gelu-tanh: Google's; gelu: the exact one of timm, transformers and torchvision."""
    norm_eps: float = 1e-6
    """Epsilon of every LayerNorm."""
    dropout: float = 0.0
    """Dropout after adding positions, after the attention's output layer and after both MLP layers (B.1)."""
    attention_dropout: float = 0.0
    """Dropout of the attention weights; 0 in all published models."""
    drop_path: float = 0.0
    """Stochastic depth: probability of dropping a branch of the last block, per image; grows linearly from 0 in the
    first block."""
    layer_scale: float | None = None
    """Initial value of a learned factor per branch; None: no factor."""
    head_bias: float = 0.0
    """Initial bias of the head (-10 for sigmoid losses over many classes)."""
    merge: int = 0
    """Token merging (ToMe, Bolya et al. 2023): pairs of similar patch tokens that each block merges, at most half of
    the tokens. Faster, and slightly less accurate; 0 merges none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, to_plain(getattr(self, field.name)))
        self._check_choices()
        self._check_numbers()
        self._check_combinations()
        if problem := self._grid_problem(*self.image_hw):
            raise ConfigError(f"image_size={self.image_size}, patch_size={self.patch_size}: {problem}")

    @property
    def image_hw(self) -> tuple[int, int]:
        return pair(self.image_size)

    @property
    def patch_hw(self) -> tuple[int, int]:
        return pair(self.patch_size)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def has_class_token(self) -> bool:
        return self.pool in ("token", "token+mean") if self.class_token is None else self.class_token

    @property
    def pooled_width(self) -> int:
        """Return the length of the vector that pooling makes of an image."""
        return self.width * (2 if self.pool == "token+mean" else 1)

    @property
    def extra_tokens(self) -> int:
        """Return the number of tokens before the patches: class token, then registers."""
        return int(self.has_class_token) + self.registers

    @property
    def blocks(self) -> int:
        """Return the number of blocks (attention and MLP); an axial layer has two."""
        return self.depth * (2 if self.attention == "axial" else 1)

    @property
    def position_tables(self) -> int:
        """Return the number of position tables that are added to tokens."""
        if self.position in ("none", "relative"):
            return 0
        return self.blocks if self.position_at == "every-layer" else 1

    @property
    def table_grid(self) -> tuple[int, int]:
        """Return the (rows, columns) of the position table."""
        return self.grid(*self.image_hw) if self.position_grid is None else pair(self.position_grid)

    @property
    def patch_channels(self) -> int:
        """Return the channels of what is cut into patches: the image, or the stem's feature map."""
        return self.channels if self.stem is None else self.stem.out_channels

    @property
    def shrink(self) -> int:
        """Return the factor by which the stem shrinks the image."""
        return 1 if self.stem is None else 2**self.stem.halvings

    @property
    def step_hw(self) -> tuple[int, int]:
        """Return the (height, width) whose multiples fit the patches; any size fits single cells of a stem."""
        height, width = (side if side == 1 else side * self.shrink for side in self.patch_hw)
        return height, width

    def feature_map(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of what is cut into patches: the image, or the stem's feature map."""
        return -(-height // self.shrink), -(-width // self.shrink)  # every halving rounds up

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the (rows, columns) of patches for an image size; raise DataError if the patches do not fit."""
        if problem := self._grid_problem(height, width):
            raise DataError(problem)
        (rows, columns), (patch_h, patch_w) = self.feature_map(height, width), self.patch_hw
        return rows // patch_h, columns // patch_w

    def _grid_problem(self, height: int, width: int) -> str | None:
        (map_h, map_w), (patch_h, patch_w) = self.feature_map(height, width), self.patch_hw
        if map_h % patch_h == 0 and map_w % patch_w == 0 and map_h and map_w:
            return None
        problem = f"An image of {height} x {width} pixels (height x width)"
        if self.stem is not None:
            problem += f", with a feature map of {map_h} x {map_w},"
        problem += f" cannot be cut into patches of {patch_h} x {patch_w}."
        if self.stem is not None and patch_h * patch_w > map_h * map_w // 4:  # the patch size was meant for the image
            return f"{problem} With a stem, use patch_size=1."
        fit = f"{_nearest_multiple(height, patch_h * self.shrink)} x {_nearest_multiple(width, patch_w * self.shrink)}"
        patch = _nearest_divisor(map_h, patch_h), _nearest_divisor(map_w, patch_w)
        example = f", such as {patch[0] if patch[0] == patch[1] else patch}" if None not in patch else ""
        return f"{problem} Resize, crop or pad the image to {fit}, or use a patch_size that divides it{example}."

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices, synonyms=_SYNONYMS)
        if self.class_token is not None:
            check_bool("class_token", self.class_token)
        check_bool("norm_after_pool", self.norm_after_pool)
        if self.stem is not None:
            check_type("stem", self.stem, ResNetStem, ConvStem)

    def _check_numbers(self) -> None:
        for name in ("width", "depth", "heads", "mlp_width"):
            check_int(name, getattr(self, name), minimum=1, maximum=MAX_INT)
        for name in ("registers", "merge"):
            check_int(name, getattr(self, name), minimum=0, maximum=MAX_INT)
        if self.representation is not None:
            check_int("representation", self.representation, minimum=1, maximum=MAX_INT)
        check_size("patch_size", self.patch_size)
        if self.position_grid is not None:
            check_size("position_grid", self.position_grid, sides="rows, columns")
        for name in ("dropout", "attention_dropout", "drop_path"):
            check_number(name, getattr(self, name), minimum=0, below=1)
        check_number("norm_eps", self.norm_eps, minimum=1e-30)  # 0 in float32 otherwise
        if self.layer_scale is not None:
            check_number("layer_scale", self.layer_scale)
        check_shared_fields(self.image_size, self.channels, self.num_classes, self.head_bias)

    def _check_combinations(self) -> None:
        """Raise ConfigError naming two fields that exclude each other, and the fix."""
        if self.width % self.heads:
            near = _nearest_divisor(self.width, self.heads)
            hint = f"Use heads={near}." if near else f"Use a number of heads that divides {self.width}."
            raise ConfigError(f"heads={self.heads} does not divide width={self.width}.", hint=hint)
        if self.pool in ("token", "token+mean") and self.class_token is False:
            hint = "Use pool='mean' or pool='map', or omit class_token."
            raise ConfigError(f"pool={self.pool!r} needs a class token, but class_token=False.", hint=hint)
        if self.pool in ("none", "token+mean") and self.norm_after_pool:
            raise ConfigError(f"norm_after_pool=True does not fit pool={self.pool!r}.", hint="Omit norm_after_pool.")
        self._check_positions()

    def _check_positions(self) -> None:
        if self.position in ("none", "relative"):
            unused: dict[str, object] = {"position_at": "stem", "position_resample": "bilinear-corners"}
            if self.position == "none":
                unused["position_grid"] = None
            for name, default in unused.items():
                if getattr(self, name) != default:
                    problem = f"{name}={getattr(self, name)!r} has no effect with position={self.position!r}."
                    raise ConfigError(problem, hint=f"Omit {name}.")
        divisor = {"learned-2d": 2, "sincos-2d": 4}.get(self.position, 1)
        if self.width % divisor:
            problem = f"position={self.position!r} needs a width divisible by {divisor} (got width={self.width})."
            near = _nearest_multiple(self.width, lcm(divisor, self.heads))
            raise ConfigError(problem, hint=f"Use width={near} or position='learned'.")
        by_grid = {"position": "relative", "position_at": self.position_at.replace("stem", ""), "attention": "axial"}
        for name, choice in by_grid.items():
            if self.merge and getattr(self, name) == choice:
                problem = f"merge={self.merge} does not fit {name}={choice!r}, which needs every token at its place."
                raise ConfigError(problem, hint="Use merge=0.")


_CHOICES = {name: get_args(hint) for name, hint in get_type_hints(ViTConfig).items() if get_origin(hint) is Literal}
_SYNONYMS = {"gap": "mean", "avg": "mean", "average": "mean", "cls": "token", "class": "token", "sin": "sincos-2d"}


def parse_size(text: str) -> tuple[int, int]:
    """Return the (height, width) of an image size such as "384" or "384x256"."""
    sides = text.strip().lower().split("x")
    if len(sides) > 2 or not all(fullmatch("[0-9]{1,5}", side) and 0 < int(side) <= MAX_SIDE for side in sides):
        problem = f"{short_repr(text)} is not an image size (expected pixels from 1 to {MAX_SIDE}, or HEIGHTxWIDTH)."
        raise ConfigError(problem, hint="Use 384 or 384x256, for example.")
    return int(sides[0]), int(sides[-1])


def check_size(name: str, value: object, *, sides: str = "height, width") -> None:
    """Raise ConfigError unless the value is an integer or a pair of integers, at least 1."""
    pair = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value, value)
    if len(pair) != 2 or any(type(side) is not int or not 1 <= side <= MAX_INT for side in pair):
        got = short_repr(cast("object", value))
        raise ConfigError(f"{name} must be an integer or ({sides}), each at least 1 (got {got}).")


def check_width_factor(name: str, factor: object) -> float:
    """Return a ResNet's width factor, as an int if it is whole; raise ConfigError if its widths cannot be grouped."""
    number = check_number(name, factor, above=0, maximum=1024)
    channels = int(64 * number)
    if channels == 0 or channels % NORM_GROUPS:
        problem = f"{name}={factor} gives the first convolution {channels} channels"
        rule = f"expected a multiple of {NORM_GROUPS}, the groups of every GroupNorm"
        raise ConfigError(f"{problem} ({rule}).", hint=f"Use {max(1, round(2 * number)) / 2:g}.")
    return int(number) if number.is_integer() else number


def check_shared_fields(image_size: Size, channels: int, num_classes: int, head_bias: float) -> None:
    """Check the fields that every network has."""
    check_size("image_size", image_size)
    check_int("channels", channels, minimum=1, maximum=MAX_CHANNELS)
    check_int("num_classes", num_classes, minimum=0, maximum=MAX_INT)
    check_number("head_bias", head_bias)
    if num_classes == 0 and head_bias:
        raise ConfigError(f"head_bias={head_bias} has no effect with num_classes=0.", hint="Omit head_bias.")


def check_ints(name: str, values: object, *, count: int | None = None) -> tuple[int, ...]:
    """Return the values as a tuple, or raise ConfigError unless they are `count` integers, each at least 1."""
    numbers = cast("list[object]", values) if isinstance(values, tuple | list) else None
    if numbers is None or count not in (None, len(numbers)):
        expected = f"{count or 'a tuple of'} integers, each at least 1"
        raise ConfigError(f"{name} must be {expected} (got {short_repr(cast('object', values))}).")
    return tuple(check_int(f"each of {name}", number, minimum=1, maximum=MAX_INT) for number in numbers)


def to_plain(value: object) -> object:
    """Return tuples for lists, as files have them, and Python numbers for NumPy scalars."""
    if isinstance(value, list | tuple):
        return tuple(map(to_plain, cast("list[object]", value)))
    return cast("Any", value).item() if getattr(value, "shape", None) == () else value


def pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _nearest_multiple(size: int, of: int) -> int:
    return max(1, (2 * size + of) // (2 * of)) * of


def _nearest_divisor(size: int, near: int) -> int | None:
    """Return the divisor of `size` closest to `near`, from half to twice as large; None if there is none to suggest."""
    if near > 10_000:
        return None
    divisors = [d for d in range(max(1, -(-near // 2)), min(size, 2 * near) + 1) if size % d == 0]
    return min(divisors, key=lambda d: (abs(d - near), -d), default=None)
