"""ViTConfig: every choice of the paper and its appendix as one frozen, checked description of a network.

It needs no torch, so names, costs and command lines can be worked out before anything heavy is imported. The text
under a field is its documentation wherever the field appears.
"""

from ast import literal_eval
from dataclasses import dataclass, fields
from math import lcm
from re import fullmatch
from typing import Any, Literal, get_args, get_type_hints

from vitral.errors import ConfigError, DataError, did_you_mean

Size = int | tuple[int, int]
Position = Literal["none", "learned", "learned-2d", "relative", "sincos-2d"]
PositionAt = Literal["stem", "every-layer", "every-layer-shared"]
Resample = Literal["bilinear-corners", "bicubic", "bicubic-antialias", "bicubic-corners"]
Pool = Literal["token", "mean", "map", "none"]
Activation = Literal["gelu-tanh", "gelu", "relu"]
RepresentationActivation = Literal["tanh", "gelu", "relu"]
StemNorm = Literal["group", "batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetStem:
    """The hybrid of the paper's section 3.1: a ResNet whose feature map is cut into patches instead of the image."""

    stages: tuple[int, ...] = (3, 4, 9)
    """Residual units in each stage; () is the root alone. The root halves the size twice, every stage after the
    first once more."""
    width_factor: int = 1
    """Multiplies all widths of the ResNet."""

    def __post_init__(self) -> None:
        if not isinstance(self.stages, tuple | list) or any(not is_whole(units, 1) for units in self.stages):
            raise ConfigError(f"stem: stages={self.stages!r} must be a tuple of whole numbers of at least 1.")
        object.__setattr__(self, "stages", tuple(self.stages))
        if not is_whole(self.width_factor, 1):
            raise ConfigError(f"stem: width_factor={self.width_factor!r} must be a whole number of at least 1.")

    @property
    def halvings(self) -> int:
        return 2 + max(0, len(self.stages) - 1)

    @property
    def out_channels(self) -> int:
        return 64 * self.width_factor * (4 * 2 ** (len(self.stages) - 1) if self.stages else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvStem:
    """Stacked 3x3 stride-2 convolutions ("Early Convolutions Help Transformers See Better", Xiao et al. 2021)."""

    widths: tuple[int, ...] = (48, 96, 192, 384)
    """Output channels of each convolution; each halves the size, so four of them stand for 16-pixel patches."""
    norm: StemNorm = "group"
    """group: every image by itself (8 channels a group); batch: BatchNorm, as in torchvision's conv stem, where
    training statistics depend on the batch."""

    def __post_init__(self) -> None:
        _check_choice("stem: norm", self.norm, StemNorm)
        listed = isinstance(self.widths, tuple | list) and self.widths
        if not listed or any(not is_whole(width, 1) for width in self.widths):
            raise ConfigError(f"stem: widths={self.widths!r} must be a tuple of whole numbers of at least 1.")
        object.__setattr__(self, "widths", tuple(self.widths))
        if self.norm == "group" and any(width % 8 for width in self.widths):
            raise ConfigError(
                f"stem: widths={self.widths} must be multiples of 8 with norm='group' (8 channels a group).",
                hint="Change the widths, or set norm='batch'.",
            )

    @property
    def halvings(self) -> int:
        return len(self.widths)

    @property
    def out_channels(self) -> int:
        return self.widths[-1]


Stem = ResNetStem | ConvStem


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """One Vision Transformer. A name (``vitral.create("vit-b16")``) sets the first five fields; that of a hybrid also
    the stem, that of a small model also the image size."""

    width: int
    """D, the length of every token."""
    depth: int
    """Number of encoder layers."""
    heads: int
    """Attention heads in each layer; must divide width."""
    mlp_width: int
    """Hidden width of the MLP in each layer."""
    patch_size: Size
    """Side of a patch in pixels, or (height, width); with a stem, on its feature map."""

    image_size: Size = 224
    """Side of the images in pixels, or (height, width). Other sizes work too: positions are resampled."""
    channels: int = 3
    """Channels of the images."""
    num_classes: int = 1000
    """Number of logits; 0 leaves the head off."""
    position: Position = "learned"
    """none; learned: one vector a position; learned-2d: a row and a column table of half the width each; relative:
    offsets as extra keys (D.4); sincos-2d: fixed waves."""
    position_at: PositionAt = "stem"
    """Where positions are added: once at the stem, at every layer from a table of its own, or at every layer from
    one shared table (table 8 of the paper)."""
    position_grid: Size | None = None
    """(rows, columns), or the side, of the grid that the positions were learnt on; None: the grid of image_size."""
    position_resample: Resample = "bilinear-corners"
    """How positions are carried to another grid. bilinear-corners: Google's; bicubic: transformers';
    bicubic-antialias: timm's; bicubic-corners: torchvision's."""
    pool: Pool = "token"
    """What the head sees: the class token, the mean of the patches, attention pooling of the patches, or (none)
    every token."""
    class_token: bool | None = None
    """Whether there is a class token; None: only when pool is token."""
    norm_after_pool: bool = False
    """Put the final norm behind the pooling instead of before it (the heads of MAE and BEiT)."""
    registers: int = 0
    """Extra learnt tokens without a position ("Vision Transformers Need Registers", Darcet et al. 2023)."""
    representation: int | None = None
    """Width of the hidden layer before the head (the paper's pre-training head); None: no such layer."""
    representation_activation: RepresentationActivation = "tanh"
    """Activation of the representation layer."""
    stem: Stem | None = None
    """None: patches of the image itself; ResNetStem: the paper's hybrid; ConvStem: stacked convolutions."""
    attention: Literal["full", "axial"] = "full"
    """full: every token sees every token; axial: each layer is a row block and then a column block (D.6), and
    class token and registers see, and are seen by, all."""
    activation: Activation = "gelu-tanh"
    """Activation of the MLP. gelu-tanh: Google's; gelu: the exact one of timm, transformers and torchvision."""
    norm_eps: float = 1e-6
    """Added to the variance in every LayerNorm."""
    dropout: float = 0.0
    """After adding positions, after the attention's output layer and after both MLP layers (B.1)."""
    attention_dropout: float = 0.0
    """On the attention weights; 0 in all published models."""
    drop_path: float = 0.0
    """Stochastic depth: chance that an image skips the last block's branches; grows linearly from 0 at the first."""
    layer_scale: float | None = None
    """Initial value of a learnt factor on each branch; None: no factor."""
    head_bias: float = 0.0
    """Initial bias of the head (-10 for sigmoid losses over many classes)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        self._check_choices()
        self._check_numbers()
        self._check_combinations()
        if misfit := self._misfit(*self.image_hw):
            raise ConfigError(f"image_size={self.image_size}, patch_size={self.patch_size}: {misfit}")

    # ---- derived values ----

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
        return self.pool == "token" if self.class_token is None else self.class_token

    @property
    def extra_tokens(self) -> int:
        """Tokens ahead of the patches: class token, then registers."""
        return int(self.has_class_token) + self.registers

    @property
    def blocks(self) -> int:
        """Blocks of one attention and one MLP: an axial layer has two."""
        return self.depth * (2 if self.attention == "axial" else 1)

    @property
    def position_tables(self) -> int:
        """How many tables of positions are added to the tokens somewhere."""
        if self.position in ("none", "relative"):
            return 0
        return self.blocks if self.position_at == "every-layer" else 1

    @property
    def table_grid(self) -> tuple[int, int]:
        """The grid that the positions were learnt on."""
        return self.grid(*self.image_hw) if self.position_grid is None else pair(self.position_grid)

    @property
    def patch_channels(self) -> int:
        return self.channels if self.stem is None else self.stem.out_channels

    @property
    def shrink(self) -> int:
        """How many times smaller than the image the stem's output is."""
        return 1 if self.stem is None else 2**self.stem.halvings

    @property
    def step_hw(self) -> tuple[int, int]:
        """Images whose sides are multiples of it can be cut into patches; behind a stem, single cells always can."""
        height, width = (side if side == 1 else side * self.shrink for side in self.patch_hw)
        return height, width

    def feature_map(self, height: int, width: int) -> tuple[int, int]:
        """What is cut into patches: the image itself, or the stem's output."""
        return -(-height // self.shrink), -(-width // self.shrink)  # every halving rounds up

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of patches in an image of this size; DataError when it does not divide."""
        if misfit := self._misfit(height, width):
            raise DataError(misfit)
        (rows, columns), (patch_h, patch_w) = self.feature_map(height, width), self.patch_hw
        return rows // patch_h, columns // patch_w

    def _misfit(self, height: int, width: int) -> str | None:
        (map_h, map_w), (patch_h, patch_w) = self.feature_map(height, width), self.patch_hw
        if map_h % patch_h == 0 and map_w % patch_w == 0 and map_h and map_w:
            return None
        seen = f"An image of {height} x {width} pixels (height x width)"
        if self.stem is not None:
            seen += f" gives a feature map of {map_h} x {map_w}, which"
        if self.stem is not None and patch_h * patch_w > map_h * map_w // 4:  # a patch of the image was meant
            return f"{seen} cannot be cut into patches of {patch_h} x {patch_w}. With a stem, use patch_size=1."
        fit = f"{_nearest_multiple(height, patch_h * self.shrink)} x {_nearest_multiple(width, patch_w * self.shrink)}"
        patch = _nearest_divisor(map_h, patch_h), _nearest_divisor(map_w, patch_w)
        such = f", such as {patch[0] if patch[0] == patch[1] else patch}" if None not in patch else ""
        return (
            f"{seen} cannot be cut into patches of {patch_h} x {patch_w}. Resize, crop or pad the image to {fit}, or "
            f"use a patch_size that divides it{such}."
        )

    # ---- checks ----

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in ("class_token", "norm_after_pool"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "class_token" and value is None):
                raise ConfigError(f"{name}={value!r} must be True or False.")
        if self.stem is not None and not isinstance(self.stem, ResNetStem | ConvStem):
            raise ConfigError(f"stem={self.stem!r} must be None, a ResNetStem or a ConvStem.")

    def _check_numbers(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not is_whole(value, least) and not (name == "representation" and value is None):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least} (and below {_MOST}).")
        if self.channels > MOST_CHANNELS:
            raise ConfigError(f"channels={self.channels} must be at most {MOST_CHANNELS}.")
        for name in ("patch_size", "image_size", "position_grid"):
            value = getattr(self, name)
            if name == "position_grid" and value is None:
                continue
            pair = value if isinstance(value, tuple) else (value, value)
            allowed = "a whole number or " + ("(rows, columns)" if name == "position_grid" else "(height, width)")
            if len(pair) != 2 or any(not is_whole(side, 1) for side in pair):
                raise ConfigError(f"{name}={value!r} must be {allowed}, each at least 1.")
        for name in ("dropout", "attention_dropout", "drop_path", "norm_eps", "head_bias", "layer_scale"):
            value = getattr(self, name)
            if not is_number(value) and not (name == "layer_scale" and value is None):
                raise ConfigError(f"{name}={value!r} must be a number.")
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 0 and below 1.")
        if self.norm_eps < 1e-30:
            raise ConfigError(f"norm_eps={self.norm_eps!r} must be above 0 in float32: at least 1e-30.")

    def _check_combinations(self) -> None:
        """Each refusal names the two fields that do not go together and a way out."""
        if self.width % self.heads:
            near = _nearest_divisor(self.width, self.heads)
            hint = f"Use heads={near}." if near else f"Use a number of heads that divides {self.width}."
            raise ConfigError(f"heads={self.heads} does not divide width={self.width}.", hint=hint)
        if self.pool == "token" and self.class_token is False:
            raise ConfigError(
                "pool='token' needs the class token that class_token=False leaves out.",
                hint="Use pool='mean' or 'map', or leave class_token out.",
            )
        if self.pool == "none" and self.norm_after_pool:
            raise ConfigError(
                "norm_after_pool=True has nothing to follow with pool='none'.", hint="Set norm_after_pool=False."
            )
        if self.position in ("none", "relative") and self.position_at != "stem":
            reason = "adds nothing" if self.position == "none" else "lives inside the attention of every layer"
            raise ConfigError(
                f"position={self.position!r} {reason}, so position_at={self.position_at!r} has no meaning.",
                hint="Leave position_at out, or use position='learned', 'learned-2d' or 'sincos-2d'.",
            )
        if self.position == "none" and self.position_grid is not None:
            raise ConfigError(
                f"position='none' has no table, so position_grid={self.position_grid} has no meaning.",
                hint="Leave position_grid out.",
            )
        divisor = {"learned-2d": 2, "sincos-2d": 4}.get(self.position, 1)
        if self.width % divisor:
            raise ConfigError(
                f"position={self.position!r} needs a width that {divisor} divides, and width={self.width}.",
                hint=f"Use width={_nearest_multiple(self.width, lcm(divisor, self.heads))} or position='learned'.",
            )
        if self.num_classes == 0 and self.head_bias:
            raise ConfigError(f"num_classes=0 leaves the head off, so head_bias={self.head_bias} has no meaning.")


_MOST = 2**31
MOST_CHANNELS = 10_000
_CHOICES: dict[str, object] = {
    "position": Position,
    "position_at": PositionAt,
    "position_resample": Resample,
    "pool": Pool,
    "attention": Literal["full", "axial"],
    "activation": Activation,
    "representation_activation": RepresentationActivation,
}
_LEAST = {
    **dict.fromkeys(("width", "depth", "heads", "mlp_width", "channels", "representation"), 1),
    **dict.fromkeys(("num_classes", "registers"), 0),
}


_ALSO_CALLED = {"gap": "mean", "avg": "mean", "average": "mean", "cls": "token", "class": "token", "sin": "sincos-2d"}


def check_field_names(names: dict[str, object], of: type = ViTConfig) -> None:
    """Refuses keywords that are no field of a config, with the nearest one."""
    known = [field.name for field in fields(of)]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"There are: {', '.join(known)}."
            raise ConfigError(f"{of.__name__} has no field {name!r}.", hint=hint)


def field_from_word(name: str, word: str) -> object:
    """The value of a field as a person types it: 384, (2, 3), true, none, mean."""
    takes_none = "none" in get_args(get_type_hints(ViTConfig).get(name))  # it is itself one of the words
    special = {"true": True, "false": False, "none": "none" if takes_none else None}
    if word.lower() in special:
        return special[word.lower()]
    if sides := fullmatch(r"(\d+)x(\d+)", word):
        return int(sides[1]), int(sides[2])
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last three by odd words only
        return word


def _check_choice(name: str, value: object, choices: object) -> None:
    allowed = get_args(choices)
    if not isinstance(value, str) or value not in allowed:
        hint = did_you_mean(_ALSO_CALLED.get(str(value), str(value)), allowed)
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(allowed)}.", hint=hint)


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -3.4e38 < value < 3.4e38


def plain(value: Any) -> Any:
    """A tuple for a list, as files have it; Python's number for NumPy's."""
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value.item() if getattr(value, "shape", None) == () else value


def pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _nearest_multiple(size: int, of: int) -> int:
    return max(1, (2 * size + of) // (2 * of)) * of


def _nearest_divisor(size: int, near: int) -> int | None:
    """Among the numbers from half to twice as large; None when there is none, or too many to try."""
    if near > 10_000:
        return None
    divisors = [d for d in range(max(1, -(-near // 2)), min(size, 2 * near) + 1) if size % d == 0]
    return min(divisors, key=lambda d: (abs(d - near), -d), default=None)
