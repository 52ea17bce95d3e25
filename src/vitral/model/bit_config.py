"""BiTConfig: the paper's CNN baseline as one frozen, checked description. This module does not import torch."""

from dataclasses import dataclass, fields
from typing import ClassVar

from vitral.model.config import Size, check_ints, check_shared_fields, check_width_factor, pair, to_plain


@dataclass(frozen=True, kw_only=True, slots=True)
class BiTConfig:
    """A ResNet of "Big Transfer" (Kolesnikov et al. 2020). A name such as `bit-r50x1` sets the first two fields."""

    stages: tuple[int, int, int, int]
    """Residual units in each of the four stages."""
    width_factor: float = 1
    """Multiplies all widths. The root has int(64 * width_factor) channels, a multiple of 32."""
    image_size: Size = 224
    """Side of the images in pixels, or (height, width). Other sizes work too."""
    channels: int = 3
    """Channels of the images."""
    num_classes: int = 1000
    """Number of logits; 0 omits the head."""
    head_bias: float = 0.0
    """Initial bias of the head."""

    # The names of ViTConfig for the same facts: images of any size fit, and the head receives the mean.
    step_hw: ClassVar[tuple[int, int]] = (1, 1)
    pool: ClassVar[str] = "mean"
    representation: ClassVar[None] = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, to_plain(getattr(self, field.name)))
        check_ints("stages", self.stages, count=4)
        object.__setattr__(self, "width_factor", check_width_factor("width_factor", self.width_factor))
        check_shared_fields(self.image_size, self.channels, self.num_classes, self.head_bias)

    @property
    def image_hw(self) -> tuple[int, int]:
        return pair(self.image_size)

    @property
    def root_width(self) -> int:
        """Return the channels of the first convolution."""
        return int(64 * self.width_factor)

    @property
    def width(self) -> int:
        """Return the length of the feature vector that the head receives."""
        return 32 * self.root_width

    @property
    def pooled_width(self) -> int:
        return self.width

    @property
    def blocks(self) -> int:
        """Return the number of residual units."""
        return sum(self.stages)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the (rows, columns) of the last feature map."""
        return -(-height // 32), -(-width // 32)  # five halvings, each of which rounds up
