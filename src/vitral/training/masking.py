"""The settings of masked patch prediction (appendix B.1.2), with the paper's choices as defaults."""

from dataclasses import dataclass
from typing import Literal

from vitral.errors import ConfigError

Target = Literal["mean-colour", "small-patch", "pixels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Masking:
    """What is hidden of a picture, and what is asked about it; for the objective masked-patches."""

    target: Target = "mean-colour"
    """mean-colour: the mean colour of a patch, 3 bits a channel; small-patch: the same for each of its 4 x 4 parts;
    pixels: all of its pixels, by regression."""
    ratio: float = 0.5
    """The part of the patches whose embedding is corrupted."""
    masked: float = 0.8
    """Of those, the part that becomes the mask embedding."""
    swapped: float = 0.1
    """Of those, the part that becomes the embedding of another patch; the rest is left as it is."""

    def number_of(self, patches: int) -> int:
        """That are corrupted: as many in every picture."""
        return max(1, round(self.ratio * patches))

    def __post_init__(self) -> None:
        if self.target not in ("mean-colour", "small-patch", "pixels"):
            raise ConfigError(f"masking.target={self.target!r} must be mean-colour, small-patch or pixels.")
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"masking.ratio={self.ratio} must be above 0 and at most 1.")
        if not (0 <= self.masked <= 1 and 0 <= self.swapped <= 1 and self.masked + self.swapped <= 1 + 1e-9):
            raise ConfigError(
                f"masking.masked={self.masked} and masking.swapped={self.swapped} must be from 0 to 1, also together."
            )
