"""Print the results of `models`, `runs`, `evaluate --suite`, `doctor` and `train --help-all` as tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean
from textwrap import indent, wrap
from typing import TYPE_CHECKING, Any

from vitral.console.output import MIN_WIDTH, human_console, print_line, print_table
from vitral.files import printable
from vitral.report.text import format_bytes, format_count, format_percent, format_units

if TYPE_CHECKING:
    from pathlib import Path

    from vitral.runs import RunSummary

TRAINING_BATCH = 32
MAX_TEXT_WIDTH = 100
DISK_UNITS = ("B", "kB", "MB", "GB", "TB")


def show_models(rows: Sequence[Mapping[str, Any]], shipped: Mapping[str, str], omitted: int = 0) -> None:
    """Print one row per model. `shipped` maps names with trained weights to a description of those weights."""
    cells = (
        [
            row["name"],
            _size(row["image_size"]),
            f"{row['tokens']:,}",
            *(format_units(row[name]) for name in ("parameters", "forward_flops")),
            *(format_bytes(row[name]) for name in ("inference_bytes", "training_bytes")),
        ]
        for row in rows
    )
    print_table(("model", "image", "tokens", "parameters", "FLOPs", "predict", "train"), cells)
    notes = [
        "",
        "FLOPs: one forward pass of one image; a multiply-add counts as 2 (many papers count 1).",
        f"predict: memory for one image. train: memory for a batch of {TRAINING_BATCH} with Adam. Both in float32.",
        f"With trained weights: {', '.join(f'{name} ({text})' for name, text in shipped.items())}.",
    ]
    print_line("\n".join([*notes, *_omitted(omitted)]), "dim")


def show_pretrained(rows: Sequence[Mapping[str, Any]], omitted: int = 0) -> None:
    """Print one row per published checkpoint, then its name on the hub and the sources of the accuracies."""
    titles = ("name", "parameters", "image/\npatch", "FLOPs", "dialect", "license", "top-1")
    cells = (
        [
            row["name"],
            format_units(row["parameters"]),
            f"{row['image_size'][0]}/{row['patch_size'][0]}",
            format_units(row["forward_flops"]),
            row["dialect"],
            row["license"],
            "" if row["top1"] is None else f"{100 * row['top1']:.1f}",
        ]
        for row in rows
    )
    print_table(titles, cells)
    print_line("\nTop-1 accuracy on ImageNet-1k in percent, as published; vitral did not measure it:", "dim")
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        names.setdefault((row["protocol"], row["source"]), []).append(row["name"])
    for (protocol, source), listed in names.items():
        print_line("\n".join(wrap(f"{', '.join(listed)}: {protocol}.", MIN_WIDTH)) + f"\n  {source}", "dim")
    print_line("\nDownloaded from:", "dim")
    width = max(len(row["name"]) for row in rows)
    print_line("\n".join([*(f"{row['name']:<{width}}  {row['hub']}" for row in rows), *_omitted(omitted)]), "dim")


def _omitted(count: int) -> list[str]:
    """Return a note about models that do not fit the requested image size, if there are any."""
    return [f"{format_count(count, 'model')} omitted: the patch size does not divide this image size."] * bool(count)


def show_suite(result: Mapping[str, Any]) -> None:
    """Print one row per task, grouped, with the paper's scores beside ours."""
    rows: list[list[str]] = []
    bold: list[int] = []
    for group in (*result["groups"], None):
        tasks = [task for task in result["tasks"] if group in (None, task["group"])]
        if group is not None:
            rows += map(_task_cells, tasks)
        if tasks:
            bold.append(len(rows))
            title = "mean" if group is None else f"{group}, mean"
            rows.append([f"{title} of {len(tasks)}", *_means(tasks)])
    models = (name.replace(" ", "\n") for name in result["paper_models"])
    print_table(("task", "top-1", "95% CI", "test\nimages", *models), rows, bold=bold)
    print_line("The paper's columns are from table 9; their means are over the same tasks.", "dim")
    for warning in _suite_warnings(result):
        print_line(warning, "yellow")


def _task_cells(task: Mapping[str, Any]) -> list[str]:
    name = f"{task['stand_in']} for {task['task']}" if task["stand_in"] else task["task"]
    papers = ("-" if task["stand_in"] else f"{score:.1f}" for score in task["paper"])
    interval = f"{100 * task['low']:.1f}-{100 * task['high']:.1f}"
    return [name, f"{100 * task['top1']:.1f}", interval, f"{task['images']:,}", *papers]


def _means(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cells of a row of means. Stand-ins cannot be compared with the paper."""
    has_stand_in = any(task["stand_in"] for task in tasks)
    papers = zip(*(task["paper"] for task in tasks), strict=True)
    means = ("-" if has_stand_in else f"{mean(scores):.1f}" for scores in papers)
    return [f"{100 * mean(task['top1'] for task in tasks):.1f}", "", "", *means]


def _suite_warnings(result: Mapping[str, Any]) -> Iterator[str]:
    for task in result["tasks"]:
        name = task["task"]
        if task["stand_in"]:
            yield f"{name}: replaced by {task['stand_in']}"
        if task["train_images"] < result["train_images"]:
            yield f"{name}: trained on {task['train_images']:,} images instead of {result['train_images']:,}"
        if not task["stand_in"] and task["classes_seen"] < task["classes"]:
            yield f"{name}: the test images cover {task['classes_seen']} of {task['classes']} classes"
        if task["unreadable"]:
            yield f"{name}: {format_count(task['unreadable'], 'unreadable test image')}"
        yield from (f"{name}: {note}" for note in task["notes"])
    yield from (f"{name}: failed: {reason}" for name, reason in result["failed"].items())
    if result["interrupted"]:
        yield f"Interrupted. Not finished: {', '.join(result['unfinished'])}"
    if result["missing"]:
        yield f"Not found: {', '.join(result['missing'])}"
    if result["unrecognized"]:
        yield f"Not a task of the suite: {', '.join(result['unrecognized'])}"
    if result["changed"]:
        changes = ", ".join(f"{name}={value}" for name, value in result["changed"].items())
        yield f"Differs from the paper's protocol: {changes}"


def show_runs(runs: Sequence["RunSummary"], folder: "Path") -> None:
    """Print one row per run; below it, the command that resumes it or the reason why it is damaged."""
    if not runs:
        print_line(f"No runs in {folder}. Start one: vitral train DATA")
        return
    rows = [("run", "state", "data", "model", "accuracy", "images", "minutes", "date"), *map(_run_cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layout = "  ".join(f"{{:{'>' if 4 <= column <= 6 else '<'}{width}}}" for column, width in enumerate(widths))
    for run, cells in zip((None, *runs), rows, strict=True):
        print_line(layout.format(*cells).rstrip(), "bold" if run is None else None)
        if run is not None and (note := run.resume or run.problem):
            print_line(f"    {note}", "yellow")


def _run_cells(run: "RunSummary") -> tuple[str, ...]:
    return (
        printable(run.folder),
        run.state,
        printable(run.data or "-"),
        printable(run.model or "-"),
        format_percent(run.top1),
        "-" if run.images is None else f"{run.images:,}",
        "-" if run.minutes is None else f"{run.minutes:,.1f}",
        f"{run.date:%Y-%m-%d %H:%M}",
    )


def show_findings(findings: Mapping[str, Any], *, problems_only: bool) -> None:
    """Print what `vitral doctor` found: versions, device, extras, cache and problems."""
    if not problems_only:
        nested = ("packages", "problems", "extras", "cache", "checks")
        rows = [(name, _finding(value)) for name, value in findings.items() if name not in nested]
        rows += [(name, version or "missing") for name, version in findings["packages"].items()]
        rows += [(name, _extra(name, extra)) for name, extra in findings["extras"].items()]
        rows += _cache_rows(findings["cache"])
        width = max(len(name) for name, _ in rows) + 2
        for name, text in rows:
            print_line(f"{name:<{width}}{text}")
        _show_checks(findings.get("checks", ()))
    for problem in findings["problems"]:
        print_line(f"Problem: {problem}", "red")
    if not findings["problems"] and not problems_only:
        print_line("No problems found.", "green")


def _show_checks(checks: Sequence[Mapping[str, Any]]) -> None:
    """Print what holds on this machine."""
    if not checks:
        return
    width = max(len(check["name"]) for check in checks) + 2
    print_line("\nSelf-test", "bold")
    for check in checks:
        style = {"holds": "green", "fails": "red"}.get(check["result"])
        print_line(f"{check['name']:<{width}}{check['result']:<9}{check['seconds']:6.1f} s  {check['detail']}", style)


def _finding(value: object) -> str:
    return f"{value['value']} ({value['reason']})" if isinstance(value, Mapping) else str(value)


def _cache_rows(cache: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is in the cache, what was removed from it, and where downloads are, which vitral never deletes."""
    kinds, removed = _sizes(cache["kinds"]), cache.get("removed")
    total, limit = (format_units(cache[name], DISK_UNITS) for name in ("bytes", "limit"))
    yield "cache", f"{cache['folder'] or 'none (no home folder)'}: {total} of at most {limit} ({kinds})"
    if removed is not None:
        yield "removed", _sizes(removed)
    if cache["downloads"]:
        yield "downloads", f"{cache['downloads']} (shared with other programs; to delete some, run: hf cache rm)"


def _sizes(kinds: Mapping[str, Mapping[str, int]]) -> str:
    sizes = ((kind, format_units(size["bytes"], DISK_UNITS), size["files"]) for kind, size in kinds.items())
    return ", ".join(f"{kind} {size} in {format_count(files, 'file')}" for kind, size, files in sizes)


def _extra(name: str, extra: Mapping[str, Any]) -> str:
    fix = f"not installed ({extra['what']}). Run: pip install 'vitral[{name}]'"
    return fix if extra["missing"] else f"installed ({extra['what']})"


def show_settings(rows: Iterable[tuple[str, object, str]], recipes: Iterable[str]) -> None:
    """Print every setting with its default and its explanation, by section: the part of its name before the dot."""
    width = min(human_console().width, MAX_TEXT_WIDTH)
    sections: dict[str, list[tuple[str, object, str]]] = {"": []}
    for row in rows:
        sections.setdefault(row[0].rpartition(".")[0], []).append(row)
    for section, settings in sections.items():
        print_line(section or "general", "bold")
        for name, default, text in settings:
            print_line(f"  --{name.replace('_', '-')}{_default(default)}")
            print_line(indent("\n".join(wrap(text, width - 6)), " " * 6), "dim")
        print_line("")
    print_line("\n".join(wrap(f"Recipes: {', '.join(recipes)}", width)))


def _default(value: object) -> str:
    """Return a default as you would type it on the command line, or "" if there is none."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    items = value if isinstance(value, tuple | list) else [value]
    return f" [default: {','.join(f'{item:g}' if isinstance(item, float) else str(item) for item in items)}]"


def _size(image_size: Sequence[int]) -> str:
    return " x ".join(map(str, image_size))


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
