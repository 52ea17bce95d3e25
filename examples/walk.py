"""Follow one image through a small Vision Transformer and print the shape after every step.

Run `python examples/walk.py`, or `python examples/walk.py vit-b16` for another model.
"""

import sys
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

import vitral
from vitral.model.patches import cut


def walk(model: vitral.ViT, image: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Yield each step, its formula in the paper, and its output."""
    yield "an image", "x", image
    maps = image
    if model.patches.stem is not None:
        maps = model.patches.stem(image)
        yield "run a ResNet first", "feature map", maps
    patches = cut(maps, model.patches.patch_hw).flatten(2)
    yield "cut into flat patches", "x_p", patches
    tokens = model.patches.project(patches)
    yield "project each to a token", "x_p E", tokens
    tokens = model.prepend_extras(tokens)
    yield "prepend the class token", "[x_class; x_p E]", tokens
    tokens, packing = model.embed(image)
    yield "add positions", "z_0 = [x_class; x_p E] + E_pos", tokens
    norm1, attention, norm2, mlp = (model.blocks[0].get_submodule(n) for n in ("norm1", "attention", "norm2", "mlp"))
    attended = tokens + attention(norm1(tokens), packing)
    yield "attend to all tokens", "z'_1 = MSA(LN(z_0)) + z_0", attended
    tokens = attended + mlp(norm2(attended))
    yield "transform each token", "z_1 = MLP(LN(z'_1)) + z'_1", tokens
    for block in model.blocks[1:]:
        tokens = block(tokens, packing)
    yield f"repeat in blocks 2 to {len(model.blocks)}", "z_L", tokens
    tokens = model.norm(tokens)
    yield "normalize", "LN(z_L)", tokens
    pooled = model.pool(tokens, packing)
    yield "pool to one vector", "y = LN(z_L^0)", pooled
    yield "classify: logits", "head(y)", model.head(model.representation(pooled))


def main(name: str = "vit-pico7") -> None:
    torch.manual_seed(0)
    model = vitral.create(name, num_classes=10).eval()
    image = torch.rand(1, model.config.channels, *model.config.image_hw) * 2 - 1
    table = Table("step", "in the paper", "shape", box=None, pad_edge=False)
    with torch.no_grad():
        steps = list(walk(model, image))
        for step, formula, result in steps:
            table.add_row(step, Text(formula), " x ".join(map(str, result.shape)))
        if not torch.allclose(steps[-2][2], model.features(image).pooled, atol=1e-5):
            sys.exit("The steps and the model give different features.")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console = Console()
    console.print(f"One image through {name}: 10 classes, {parameters:,} parameters\n", style="bold")
    console.print(table)
    console.print()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except vitral.VitralError as error:
        sys.exit(str(error))
