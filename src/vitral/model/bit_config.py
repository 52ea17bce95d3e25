"""BiTConfig: the paper's CNN baseline as one frozen, checked description. It needs no torch."""

from dataclasses import dataclass, fields

from vitral.errors import ConfigError
from vitral.model.config import MOST_CHANNELS, Size, is_number, is_whole, pair, plain


@dataclass(frozen=True, kw_only=True, slots=True)
class BiTConfig:
    """A ResNet of "Big Transfer" (Kolesnikov et al. 2020). A name (``bit-r50x1``) sets the first two fields."""

    stages: tuple[int, int, int, int]
    """Residual units in each of the four stages."""
    width_factor: int = 1
    """Multiplies all widths."""
    image_size: Size = 224
    """Side of the images in pixels, or (height, width). Other sizes work too."""
    channels: int = 3
    """Channels of the images."""
    num_classes: int = 1000
    """Number of logits; 0 leaves the head off."""
    head_bias: float = 0.0
    """Initial bias of the head."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        if not isinstance(self.stages, tuple) or len(self.stages) != 4 or not all(is_whole(n, 1) for n in self.stages):
            raise ConfigError(f"stages={self.stages!r} must be four whole numbers of at least 1.")
        for name, least in (("width_factor", 1), ("channels", 1), ("num_classes", 0)):
            if not is_whole(getattr(self, name), least):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number of at least {least}.")
        if len(self.image_hw) != 2 or not all(is_whole(side, 1) for side in self.image_hw):
            raise ConfigError(f"image_size={self.image_size!r} must be a whole number or (height, width).")
        if self.channels > MOST_CHANNELS:
            raise ConfigError(f"channels={self.channels} must be at most {MOST_CHANNELS}.")
        if not is_number(self.head_bias):
            raise ConfigError(f"head_bias={self.head_bias!r} must be a number.")
        if self.num_classes == 0 and self.head_bias:
            raise ConfigError(f"num_classes=0 leaves the head off, so head_bias={self.head_bias} has no meaning.")

    @property
    def image_hw(self) -> tuple[int, int]:
        return pair(self.image_size)

    @property
    def step_hw(self) -> tuple[int, int]:
        """Pictures of any size fit."""
        return 1, 1

    @property
    def pool(self) -> str:
        return "mean"

    @property
    def representation(self) -> None:
        return None

    @property
    def width(self) -> int:
        """Of the features that the head sees."""
        return 64 * self.width_factor * 32

    @property
    def blocks(self) -> int:
        """Residual units in all."""
        return sum(self.stages)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of the last feature map."""
        for _ in range(5):
            height, width = -(-height // 2), -(-width // 2)
        return height, width
