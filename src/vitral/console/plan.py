"""A plan as a person reads it."""

from typing import TYPE_CHECKING

from vitral.console.output import human_console, in_bytes, in_units

if TYPE_CHECKING:
    from vitral.planning import Plan


def show_plan(plan: "Plan") -> None:
    from rich.table import Table

    console = human_console()
    size = " x ".join(map(str, plan.image_size))
    epochs = f"{plan.epochs:g} epoch{'s' if plan.epochs != 1 else ''}"
    console.print(f"[bold]{plan.model}[/] at {size}, {in_units(plan.images, ('', 'K', 'M', 'G'))} images, {epochs}")
    beside = "" if plan.paper_exaflops is None else f"   (table 6 of the paper: {plan.paper_exaflops:,g})"
    days = "" if plan.paper_core_days is None else f"   (table 2 of the paper: {plan.paper_core_days:,g})"
    rows = {
        "parameters": in_units(plan.parameters, ("", "K", "M", "G")),
        "forward": f"{in_units(plan.forward_flops, ('', 'K', 'M', 'G', 'T'))}FLOPs an image",
        "training": f"{_operations(plan.training_exaflops)}{beside}",
        "memory": f"{in_bytes(plan.memory_bytes)} for a batch of {plan.batch_size}, in float32 with Adam",
        "TPUv3": f"{_core_days(plan.tpuv3_core_days)}{days}",
    }
    for name, value in rows.items():
        console.print(f"{name:<12}{value}", highlight=False)
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    costs = ("cost",) if any(one.cost is not None for one in plan.estimates) else ()
    for title in ("device", "number", "images/s", "time", "largest batch each", *costs):
        table.add_column(title, justify="left" if title == "device" else "right", no_wrap=True)
    for one in plan.estimates:
        largest = "" if one.largest_batch is None else f"{one.largest_batch:,}" if one.largest_batch else "none fits"
        cost = () if one.cost is None else (f"{one.cost:,.2f}",)
        speed = f"{one.images_per_second:,.0f}" if one.images_per_second >= 10 else f"{one.images_per_second:.2g}"
        table.add_row(one.device, f"{one.devices:,}", speed, in_time(one.seconds), largest, *cost)
    console.print(table)
    console.print()
    said = "A training step counts as three forward passes."
    if any(one.largest_batch is not None for one in plan.estimates):
        said += (
            f" Time at {100 * plan.utilisation:.0f} % of the data sheet in 16 bits, unless images a second were given; "
            "the paper's own runs reached 32 to 43 %. The largest batch is that of float32 with Adam."
        )
    console.print(said, style="dim")


def in_time(seconds: float) -> str:
    for size, unit in ((365 * 24 * 3600, "years"), (24 * 3600, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"


def _operations(exaflops: float) -> str:
    if exaflops >= 0.01:
        return f"{_rounded(exaflops)} exaFLOPs"
    return f"{in_units(exaflops * 1e18, ('', 'K', 'M', 'G', 'T', 'P'))}FLOPs"


def _core_days(days: float) -> str:
    return f"{_rounded(days)} core-days" if days >= 0.01 else f"{in_time(days * 24 * 3600)} of a core"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
