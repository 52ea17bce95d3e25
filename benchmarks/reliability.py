"""Print the figures of the fault tests as the table in docs/explanation/reliability.md.

make soak                                # runs the tests, which record their figures
python -m benchmarks.reliability         # writes the table into the page
"""

import json
import platform
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "reliability.json"
PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "reliability.md"


def cpu_name() -> str:
    """Return the name of the processor, as Linux reports it or as Python does elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table() -> str:
    """Return a row per fault: the goal, and what its test reached last."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = ["| Fault | Goal | Reached | Measured |", "|---|---|---|---|"]
    for fault, row in rows.items():
        lines.append(f"| {fault} | {row['goal']} | {row['reached']} | {row['date']}, {row['cpu']} |")
    return "\n".join(lines)


def renew_page(text: str) -> str:
    """Return the page with the newest table between its two markers."""
    start, end = "<!-- results -->", "<!-- end of results -->"
    return f"{text.split(start)[0]}{start}\n{table()}\n{end}{text.split(end)[1]}"


if __name__ == "__main__":
    PAGE.write_text(renew_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(table())
