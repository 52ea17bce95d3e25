"""The doctor's page."""

from typing import Any

from vitral.console.output import human_console


def show_findings(findings: dict[str, Any], *, problems_only: bool) -> None:
    from rich.table import Table

    console = human_console()
    if not problems_only:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, found in findings.items():
            if name not in ("packages", "problems", "extras"):
                table.add_row(name, _sentence(found))
        for name, found in findings["packages"].items():
            table.add_row(name, found or "[red]missing[/red]")
        for name, found in findings["extras"].items():
            get = f"not installed ({found['what']}): pip install 'vitral\\[{name}]'"
            table.add_row(name, get if found["missing"] else f"installed ({found['what']})")
        console.print(table)
    for problem in findings["problems"]:
        console.print(f"[red]problem:[/red] {problem}", soft_wrap=True)
    if not findings["problems"] and not problems_only:
        console.print("Everything that vitral needs is here.", style="green")


def _sentence(found: Any) -> str:
    return f"{found['value']}: {found['reason']}" if isinstance(found, dict) else str(found)
