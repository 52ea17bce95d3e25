"""`vitral bench`: measure how fast a model runs on this machine, with every engine and in other libraries."""

from typing import Annotated

from vitral.cli.parameters import Format, Switch, Text, option
from vitral.console.output import print_line, print_table, show_as
from vitral.console.progress import with_progress
from vitral.errors import ConfigError
from vitral.report.text import format_bytes


def bench(
    *,
    model: Annotated[str, option("An architecture such as vit-b16, or any MODEL.", "MODEL")] = "vit-s16",
    against: Annotated[Text, option("Other libraries, such as timm,transformers,torchvision.", "NAMES")] = None,
    batch_sizes: Annotated[str, option("Batch sizes, such as 1,8,32.", "LIST")] = "1,8",
    seconds: Annotated[float, option("Time per candidate and batch size.", "N")] = 2.0,
    compiled: Annotated[Switch, option("Also measure torch.compile, which takes minutes to start.")] = False,
    format: Annotated[Format, option("human, json or quiet (the fastest candidate only).")] = "human",
) -> None:
    """Measure how fast a model runs on this machine.

    Compares the outputs of all installed engines with eager torch in float32, and then times them in turns. Also starts
    a process per engine, to measure the cold start and the memory.

    Examples
    --------
    vitral bench
    vitral bench --model runs/photos-1 --batch-sizes 1,32
    vitral bench --model vit-b16 --against timm,transformers --format json
    """
    from vitral.benchmarking import BenchResult, bench_events

    if not all(number.strip().isdigit() for number in batch_sizes.split(",")):
        raise ConfigError(f"--batch-sizes must be a list of integers such as 1,8 (got {batch_sizes}).")
    sizes = [int(number) for number in batch_sizes.split(",")]
    peers = [name.strip() for name in against.split(",")] if against else []
    events = bench_events(model, against=peers, batch_sizes=sizes, seconds=seconds, compiled=compiled)
    result = with_progress(events, "Measuring", quiet=format != "human")
    assert isinstance(result, BenchResult)
    rows = sorted(result.rows, key=lambda row: (row.batch, -row.images_per_second))

    def show() -> None:
        machine = result.machine
        instructions = ", ".join(machine["instructions"]) or "no special instructions"
        print_line(f"{result.model} on {machine['cpu']} ({machine['threads']} threads; {instructions})", "bold")
        head = ("batch", "engine", "images/s", "p50 ms", "p99 ms", "ratio", "differs", "top-1")
        print_table(
            head,
            (
                [
                    str(row.batch),
                    row.name,
                    f"{row.images_per_second:.1f}",
                    f"{row.p50_milliseconds:.1f}",
                    f"{row.p99_milliseconds:.1f}",
                    f"{row.ratio:.2f}",
                    f"{row.difference:.1e}",
                    f"{row.top1:.0%}",
                ]
                for row in rows
            ),
        )
        print_line("ratio: to eager torch in float32. differs: largest difference of a probability.")
        print_line("top-1: images with the same label, or a near tie.")
        print_line("A new process that loads the model and predicts one image:", "bold")
        print_table(
            ("engine", "cold start, s", "peak memory"),
            (
                [start.name, f"{start.seconds:.2f}", format_bytes(start.memory_bytes) if start.memory_bytes else "?"]
                for start in result.cold_starts
            ),
        )
        for name, reason in result.skipped.items():
            print_line(f"skipped {name}: {reason}", "yellow")

    show_as(format, json=result.as_dict(), quiet=[max(rows, key=lambda row: row.ratio).name], human=show)
