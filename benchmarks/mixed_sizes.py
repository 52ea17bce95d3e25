"""Time images of different sizes in one call: packed without padding, or padded to the largest with a mask.

    python -m benchmarks.mixed_sizes [--model vit-s16] [--images 16] [--runs 5] [--save]

The sizes are those of a photo collection at its native shapes: common aspect ratios, portrait and landscape, the long
side between 128 and 384 pixels, each side rounded to whole patches. All methods use the same weights, and their outputs
must agree before anything is timed:

- packed: ``model([image, ...])``
- padded: tokens padded to the longest image of the call, with a mask over keys in the fused attention
- one by one: one call per image
- NaFlex: timm's NaFlexViT, which also pads, with its key-only mask and patches prepared beforehand
"""

import argparse
import random
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitral
from benchmarks.peers import in_naflex, naflex_input, randomize
from benchmarks.timing import describe_machine, fastest_turns, save

ASPECTS = (1, 4 / 3, 3 / 2, 16 / 9, 3 / 4, 2 / 3, 9 / 16)
FREQUENCIES = (2, 4, 4, 1, 2, 2, 1)


def draw_sizes(count: int, patch: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return (height, width) of a collection of photos."""
    generator = random.Random(seed)
    sizes = []
    for _ in range(count):
        long, (aspect,) = generator.randint(128, 384), generator.choices(ASPECTS, FREQUENCIES)
        height, width = (long / aspect, long) if aspect >= 1 else (long, long * aspect)
        sizes.append((max(1, round(height / patch)) * patch, max(1, round(width / patch)) * patch))
    return sizes


class Padded(nn.Module):
    """The usual method on the same modules: pad every image to the longest, and mask the keys of the padding."""

    def __init__(self, model: vitral.ViT):
        super().__init__()
        self.model = model

    def forward(self, images: list[Tensor]) -> Tensor:
        tokens = [self.model.embed(image[None])[0][0] for image in images]
        x = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        lengths = torch.tensor([len(sequence) for sequence in tokens])
        mask = (torch.arange(x.shape[1]) < lengths[:, None])[:, None, None]  # (B, 1, 1, N): over keys
        for block in self.model.blocks:
            x = x + self.attend(block.get_submodule("attention"), block.get_submodule("norm1")(x), mask)
            x = x + block.get_submodule("mlp")(block.get_submodule("norm2")(x))
        return self.model.head(self.model.norm(x)[:, 0])

    def attend(self, attention: Any, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = attention.split_heads(attention.to_qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attention.to_out(mixed.transpose(1, 2).flatten(2))


def one_by_one(model: nn.Module, images: list[Tensor]) -> Tensor:
    return torch.cat([model(image[None]) for image in images])


def measure(model: vitral.ViT, images: list[Tensor], direction: str, runs: int) -> dict[str, Any]:
    naflex, prepared = in_naflex(model), naflex_input(images, model)
    methods: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
        "packed": (model, lambda: model(images)),
        "padded": (model, lambda: padded(images)),
        "one by one": (model, lambda: one_by_one(model, images)),
        "NaFlex": (naflex, lambda: naflex(prepared)),
    }
    padded = Padded(model)
    with torch.no_grad():
        for module, way in methods.values():
            module.eval()
            torch.testing.assert_close(way(), model(images), atol=1e-4, rtol=1e-4)

    def turn(module: nn.Module, way: Callable[[], Tensor]) -> None:
        if direction == "forward":
            with torch.no_grad():
                way()
        else:
            way().square().mean().backward()
            module.zero_grad(set_to_none=True)

    turns: dict[str, Callable[[], Any]] = {
        name: (lambda module=module, way=way: turn(module, way)) for name, (module, way) in methods.items()
    }
    fastest_turns(turns, rounds=1)  # warms up
    times = [fastest_turns(turns, rounds=3, seed=run) for run in range(runs)]
    row: dict[str, Any] = {"pass": direction, "images": len(images)}
    row["images_per_second"] = {name: len(images) / min(run[name] for run in times) for name in methods}
    row["speed_up"] = {name: median(run[name] / run["packed"] for run in times) for name in methods if name != "packed"}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-s16")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    model = randomize(vitral.create(options.model, activation="gelu", position_resample="bicubic-antialias"))
    assert isinstance(model, vitral.ViT)
    sizes = draw_sizes(options.images, model.config.patch_hw[0])
    tokens = [model.config.grid(*size)[0] * model.config.grid(*size)[1] + 1 for size in sizes]
    machine = describe_machine("timm")
    print(machine)
    print(f"{options.model}, {len(sizes)} images of {len(set(sizes))} sizes, {min(tokens)} to {max(tokens)} tokens;")
    print(f"padding to the largest would compute on {len(tokens) * max(tokens) / sum(tokens):.2f} x as many tokens")
    images = [torch.randn(3, *size) for size in sizes]
    rows = []
    for direction in ("forward", "both"):
        rows.append(row := measure(model, images, direction, options.runs))
        rates = ", ".join(f"{name} {rate:.2f}" for name, rate in row["images_per_second"].items())
        print(f"{direction}: images per second: {rates}")
        print(
            f"{direction}: packed is " + ", ".join(f"{r:.2f} x {name}" for name, r in row["speed_up"].items()),
            flush=True,
        )
    if options.save:
        save("mixed_sizes", machine, [{"model": options.model, "sizes": sizes}, *rows])


if __name__ == "__main__":
    main()
