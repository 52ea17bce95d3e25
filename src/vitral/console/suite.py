"""A suite on the console: every task by its group, with the paper's numbers beside ours."""

from typing import Any

from vitral.console.output import human_console
from vitral.files import printable


def show_suite(told: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = human_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    for title in ("top-1", "95 %\ninterval", "test\npictures", *(name.replace(" ", "\n") for name in told["papers"])):
        table.add_column(title, justify="right", no_wrap=True)
    for group in told["groups"]:
        tasks = [task for task in told["tasks"] if task["group"] == group]
        for task in tasks:
            interval = f"{100 * task['low']:.1f}-{100 * task['high']:.1f}"
            papers = ("-" if task["stand_in"] else f"{score:.1f}" for score in task["papers"])
            name = f"{task['stand_in']} for {task['task']}" if task["stand_in"] else task["task"]
            table.add_row(Text(name), f"{100 * task['top1']:.1f}", interval, f"{task['images']:,}", *papers)
        if tasks:
            table.add_row(f"{group}, mean of {len(tasks)}", *_means(tasks, told), style="bold")
    if told["tasks"]:
        table.add_row(f"mean of {len(told['tasks'])}", *_means(told["tasks"], told), style="bold")
    console.print(table)
    console.print("The paper's columns: table 9; their means are over the same tasks.", style="dim")
    for task in told["tasks"]:
        if task["stand_in"]:
            said = f"{task['stand_in']} stands in the place of {task['task']}"
            console.print(said, style="yellow", markup=False, soft_wrap=True)
        if task["train_images"] < told["train_images"]:
            said = (
                f"{task['task']} was trained on {task['train_images']:,} pictures instead of {told['train_images']:,}"
            )
            console.print(said, style="yellow", soft_wrap=True)
        if not task["stand_in"] and task["classes_seen"] < task["classes"]:
            said = f"the test pictures of {task['task']} show {task['classes_seen']} of its {task['classes']} classes"
            console.print(said, style="yellow", soft_wrap=True)
        if task["unreadable"]:
            said = f"test pictures of {task['task']} that could not be read: {task['unreadable']:,}"
            console.print(said, style="yellow", soft_wrap=True)
        for note in task["notes"]:
            console.print(printable(f"{task['task']}: {note}"), style="yellow", markup=False, soft_wrap=True)
    for name, reason in told["failed"].items():
        console.print(f"not measured: {name}: {reason}", style="yellow", markup=False, soft_wrap=True)
    if told["interrupted"]:
        console.print(f"interrupted before the end of: {', '.join(told['left'])}", style="yellow", soft_wrap=True)
    if told["missing"]:
        console.print(f"not there: {', '.join(told['missing'])}", style="yellow", soft_wrap=True)
    if told["unknown"]:
        said = f"no task of the suite: {', '.join(told['unknown'])}"
        console.print(said, style="yellow", markup=False, soft_wrap=True)
    if told["changed"]:
        changed = ", ".join(f"{name}={value}" for name, value in told["changed"].items())
        console.print(f"not the paper's protocol: {changed}", style="yellow", markup=False, soft_wrap=True)


def _means(tasks: list[dict[str, Any]], told: dict[str, Any]) -> list[str]:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    if any(task["stand_in"] for task in tasks):
        papers = ["-"] * len(told["papers"])
    else:
        papers = [f"{mean([task['papers'][column] for task in tasks]):.1f}" for column in range(len(told["papers"]))]
    return [f"{100 * mean([task['top1'] for task in tasks]):.1f}", "", "", *papers]
