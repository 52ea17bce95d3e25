"""Time the patch embedding as a convolution and as a matrix product: ``python -m benchmarks.patch_embedding``."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.timing import describe_machine, fastest_turns


def measure(width: int, patch: int, batch: int) -> dict[str, float]:
    size = 32 if patch == 4 else 224
    side = size // patch
    images, conv = torch.randn(batch, 3, size, size), nn.Conv2d(3, width, patch, patch)
    channels_first = conv.weight.detach().flatten(1).contiguous()
    channels_last = conv.weight.detach().permute(0, 2, 3, 1).flatten(1).contiguous()
    cut = images.view(batch, 3, side, patch, side, patch)  # (B, C, rows, height, columns, width)

    def product(order: tuple[int, ...], weight: torch.Tensor) -> torch.Tensor:
        return F.linear(cut.permute(0, 2, 4, *order).reshape(batch, side * side, -1), weight, conv.bias)

    ways = {
        "convolution": lambda: conv(images).flatten(2).transpose(1, 2),
        "matrix product (C, P, P)": lambda: product((1, 3, 5), channels_first),
        "matrix product (P, P, C)": lambda: product((3, 5, 1), channels_last),
        "unfold": lambda: F.linear(F.unfold(images, patch, stride=patch).transpose(1, 2), channels_first, conv.bias),
    }
    for way in ways.values():
        torch.testing.assert_close(way(), ways["convolution"](), atol=1e-4, rtol=1e-4)
    return fastest_turns(ways, rounds=15)


@torch.no_grad()
def main() -> None:
    print(describe_machine())
    for width, patch in ((384, 16), (768, 16), (96, 4), (384, 14)):
        for batch in (1, 8, 32):
            times = measure(width, patch, batch)
            print(f"{width}, {patch} | {batch} | " + " | ".join(f"{way} {1e3 * t:.2f} ms" for way, t in times.items()))


if __name__ == "__main__":
    main()
