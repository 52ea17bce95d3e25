"""Print the plan of a training run: cost, memory and traffic of each way to train, and predicted speed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitral.console.output import human_console, print_line, print_table
from vitral.report.text import format_bytes, format_duration, format_units

if TYPE_CHECKING:
    from vitral.planning import Estimate, Plan
    from vitral.scaling.simulation import Prediction
    from vitral.scaling.strategy import Option, Strategy

OPTION_ROWS = ("weights", "gradients", "optimizer", "activations", "buffers", "peak", "largest batch")
OPTION_ROWS += ("sent per step", "images/s of all")


def show_plan(plan: "Plan") -> None:
    """Print the cost of a training run: operations and memory, then time and price per device."""
    images = f"{format_units(plan.images)} images, {plan.epochs:g} epoch{'' if plan.epochs == 1 else 's'}"
    print_line(f"{plan.model} at {_size(plan.image_size)}, {images}", "bold")
    table_6 = "" if plan.paper_exaflops is None else f"   (table 6 of the paper: {plan.paper_exaflops:,g})"
    table_2 = "" if plan.paper_core_days is None else f"   (table 2 of the paper: {plan.paper_core_days:,g})"
    exaflops, days = plan.training_exaflops, plan.tpuv3_core_days
    training = f"{_rounded(exaflops)} exaFLOPs" if exaflops >= 0.01 else f"{format_units(exaflops * 1e18)}FLOPs"
    core_days = f"{_rounded(days)} core-days" if days >= 0.01 else f"{format_duration(days * 24 * 3600)} of one core"
    facts = {
        "parameters": format_units(plan.parameters),
        "forward": f"{format_units(plan.forward_flops)}FLOPs per image",
        "training": f"{training}{table_6}",
        "memory": f"{format_bytes(plan.memory_bytes)} for a batch of {plan.batch_size}, in float32 with Adam",
        "TPUv3": f"{core_days}{table_2}",
    }
    for name, text in facts.items():
        print_line(f"{name:<12}{text}")
    print_line("")
    costs = ("cost",) if any(estimate.cost is not None for estimate in plan.estimates) else ()
    titles = ("device", "count", "images/s", "time", "largest batch each", *costs)
    print_table(titles, map(_estimate_cells, plan.estimates))
    print_line("\nA training step counts as three forward passes.", "dim")
    if any(estimate.largest_batch is not None for estimate in plan.estimates):
        assumed = (
            f"Times assume {100 * plan.utilization:.0f}% of the 16-bit peak of the data sheet, unless you pass images "
            "per second. The paper's own runs reached 32% to 43%. The largest batch is for float32 with Adam."
        )
        human_console().print(assumed, style="dim", highlight=False)
    show_strategy(plan.strategy)
    if plan.predicted_seconds is not None:
        cost = "" if plan.predicted_cost is None else f", at a cost of {plan.predicted_cost:,.2f}"
        print_line(f"\nThe run then takes {format_duration(plan.predicted_seconds)}{cost}.")


def _estimate_cells(estimate: "Estimate") -> list[str]:
    batch, speed = estimate.largest_batch, estimate.images_per_second
    return [
        estimate.device,
        f"{estimate.devices:,}",
        f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}",
        format_duration(estimate.seconds),
        "" if batch is None else f"{batch:,}" if batch else "none fits",
        *([] if estimate.cost is None else [f"{estimate.cost:,.2f}"]),
    ]


def show_strategy(strategy: "Strategy") -> None:
    """Print the ways to train on these devices, the chosen one, and its predicted speed on more devices."""
    devices = f"{strategy.devices:,} x {strategy.device} with {format_bytes(strategy.capacity)}"
    batch = f"{strategy.batch:,} images per device, {strategy.precision}"
    print_line(f"\nHow to train on {devices}, {batch}", "bold")
    names = ("per device", *(_option_name(option.parallel, option.checkpointing, "\n") for option in strategy.options))
    print_table(names, zip(OPTION_ROWS, *map(_option_cells, strategy.options), strict=True))
    name = "nothing fits" if strategy.parallel is None else _option_name(strategy.parallel, strategy.checkpointing)
    human_console().print(f"Choice: {name}, because {strategy.reason}.", highlight=False)
    if strategy.growth and strategy.devices > 1:
        print_line("\nPredicted speed, with the same batch per device", "bold")
        titles = ("devices", "images/s", "efficiency", "step", "communication", "hours between\nfailures", "training")
        print_table(titles, map(_prediction_cells, _sample(strategy.growth, strategy.devices)))
        note = (
            "A prediction, not a measurement: links of the data sheet, stragglers of 2%, a failure per 50,000 device "
            "hours. `communication` may be hidden; `training` is the part of the time that is not lost to failures "
            "and saves."
        )
        human_console().print(note, style="dim", highlight=False)


def _option_name(parallel: str, checkpointing: bool, separator: str = " ") -> str:
    names = {"none": "one device", "ddp": "DDP", "fsdp": "FSDP"}
    return names[parallel] + (f"{separator}+ checkpointing" if checkpointing else "")


def _option_cells(option: "Option") -> list[str]:
    memory = option.memory
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.buffers, memory.peak)
    return [
        *map(format_bytes, parts),
        f"{option.largest_batch:,}" if option.largest_batch else "none fits",
        format_bytes(option.traffic.sent),
        f"{option.prediction.images_per_second:,.0f}",
    ]


def _sample(growth: "Sequence[Prediction]", devices: int) -> "list[Prediction]":
    """Return one device, the requested number, and some numbers up to the largest."""
    return [p for number, p in enumerate(growth) if number % 2 == 0 or p.devices == devices or p is growth[-1]]


def _prediction_cells(prediction: "Prediction") -> list[str]:
    return [
        f"{prediction.devices:,}",
        f"{prediction.images_per_second:,.0f}",
        f"{100 * prediction.efficiency:.0f}%",
        format_seconds(prediction.step_seconds),
        format_seconds(prediction.communication_seconds),
        f"{prediction.hours_between_failures:,.0f}",
        f"{100 * prediction.available:.1f}%",
    ]


def format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _size(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
