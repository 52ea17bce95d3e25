"""The table of models."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vitral.console.output import human_console, in_bytes, in_units

TRAINING_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One model and its cost; memory for float32, training with Adam on a batch of 32."""

    name: str
    width: int
    depth: int
    heads: int | None
    """None for a BiT, as are the next two."""
    mlp_width: int | None
    patch_size: tuple[int, int] | None
    image_size: tuple[int, int]
    tokens: int
    parameters: int
    forward_flops: int
    inference_bytes: int
    training_batch: int
    training_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def models_table(rows: list[ModelRow], shipped: Mapping[str, str], left_out: int = 0) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    for title in ("image", "tokens", "parameters", "FLOPs", "predict", "train"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            " x ".join(map(str, row.image_size)),
            f"{row.tokens:,}",
            in_units(row.parameters, ("", "K", "M", "G")),
            in_units(row.forward_flops, ("", "K", "M", "G", "T")),
            in_bytes(row.inference_bytes),
            in_bytes(row.training_bytes),
        )
    console = human_console()
    console.print(table)
    console.print()
    console.print(
        "FLOPs: one forward pass of one image, 2 for each multiply-add (papers often count 1). predict: memory for one "
        f"image. train: memory for a batch of {TRAINING_BATCH} with Adam. Both in float32.",
        style="dim",
    )
    console.print(
        f"With trained weights: {', '.join(f'{name} ({what})' for name, what in shipped.items())}.", style="dim"
    )
    if left_out:
        console.print(f"{left_out} models are left out: their patch does not divide this size.", style="dim")
