"""The table of models."""

from dataclasses import asdict, dataclass
from typing import Any

from vitral.show.console import in_bytes, in_units

TRAINING_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One model and its cost; memory for float32, training with Adam on a batch of 32."""

    name: str
    image_size: tuple[int, int]
    tokens: int
    parameters: int
    forward_flops: int
    inference_bytes: int
    training_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def models_table(rows: list[ModelRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    for title in ("image", "tokens", "parameters", "FLOPs", "memory, predict 1", f"memory, train {TRAINING_BATCH}"):
        table.add_column(title, justify="right")
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
    console = Console()
    console.print(table)
    console.print(
        "FLOPs: one forward pass of one image, 2 for each multiply and add. Memory: float32; training with Adam.",
        style="dim",
    )
