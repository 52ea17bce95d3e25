"""Write the figures of the fault tests into the table of docs/explanation/reliability.md.

make soak                                # runs the tests, which record their figures
python -m benchmarks.reliability         # writes the table into the page
"""

import json
import platform
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "reliability.json"
PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "reliability.md"
NOT_MEASURED = "not measured"

# Area: (fault, goal). A test records its figure under the name of the fault.
LINES = {
    "Training": [
        ("kill -9 of a run at random moments", "50 of 50 bit-equal, at least 10 kills inside a save"),
        ("kill -9 of a random process, DDP", "10 of 10 bit-equal, no hang, training again within 30 s"),
        ("kill -9 of a random process, FSDP", "10 of 10 bit-equal, no hang, training again within 30 s"),
        ("SIGTERM in a step, evaluation, start-up, data wait and save", "20 of 20: no step lost, exit within 10 s"),
        ("A frozen process (SIGSTOP)", "the command ends by its timeout plus 35 s and names the process"),
        ("NaN on one rank", "all stop at the same step, weights unchanged, images named"),
        ("One process with two micro-batches, two ranks of DDP, two of FSDP2", "bit-equal; within 1e-5 with clipping"),
        ("Another number of ranks or another strategy after a resume", "bit-equal, each sample once per epoch"),
        ("Two runs with the same seed and threads", "bit-equal, 3 runs"),
        ("Two commands on one run folder", "the second is refused, the first is not disturbed"),
        ("Two hosts with a cut and restored link", "training continues"),
    ],
    "Checkpoints": [
        ("Random faults in saved states", "500 of 500 detected, the newest intact state used and reported"),
        (
            "Disk full at 10 points of a save; read-only folder",
            "old state intact, no partial state, one clear sentence",
        ),
        ("Files that try to run code", "no code runs"),
        ("Time of a save", "at most 1.3 times that of writing and hashing the bytes"),
        ("Wait of the training loop for a save", "at most 10 % of a save"),
    ],
    "Data": [
        ("40 kinds of unreadable images in 25 places of a dataset", "no crash, each listed with its reason"),
        ("Odd datasets: empty class, duplicates, links, Unicode names", "each reported by `vitral data`"),
        ("Order and augmentation with 0, 1, 2 and 4 workers and after a resume", "byte-identical"),
        ("Speed of decoding and cropping", "at least 1.6 times plain Pillow, 3 times on large JPEGs"),
        ("Memory and open files over 10 epochs", "at most 2 % more memory, as many open files"),
    ],
    "Predict": [
        ("10,000 predictions with 500 bad files", "9,500 labels, 500 errors, order kept, exit code 3"),
        ("10,000 predictions with 500 bad files, killed 20 times", "no row lost or doubled"),
        ("One image by command, Python, server and ONNX", "the same top 5, probabilities within 1e-5 (ONNX 1e-4)"),
    ],
    "Server": [
        (
            "Twice as many requests as a server can compute",
            "only 200, 429 and 503; p99 at most the queue and two batches; memory flat (5 %)",
        ),
        ("20,000 mixed requests to a server", "no swapped response"),
        ("50,000 mutated files and requests", "no 500, no crash, at most 200 MB"),
        ("Requests that schemathesis generates", "every response conforms to the OpenAPI document"),
        ("SIGTERM to a server under load, 20 times", "every accepted request answered, exit within 15 s"),
        ("kill -9 of the model's worker, 20 times", "503 within 1 s, ready within 10 s"),
        ("1,000 slow clients beside a normal one", "latency at most 1.5 times"),
    ],
}


def cpu_name() -> str:
    """Return the name of the processor, as Linux reports it or as Python does elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table() -> str:
    """Return a row per fault: the goal, and what its test reached last, or that it was not measured."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    lines = ["| Area | Fault | Goal | Reached | Measured |", "|---|---|---|---|---|"]
    known = {fault for faults in LINES.values() for fault, _ in faults}
    others = [(fault, row["goal"]) for fault, row in rows.items() if fault not in known]
    for area, faults in (LINES | ({"Other": others} if others else {})).items():
        for number, (fault, goal) in enumerate(faults):
            row = rows.get(fault)
            figures = [NOT_MEASURED, ""] if row is None else [row["reached"], f"{row['date']}, {row['cpu']}"]
            lines.append(f"| {area if number == 0 else ''} | {' | '.join((fault, goal, *figures))} |")
    return "\n".join(lines)


def renew_page(text: str) -> str:
    """Return the page with the newest table between its two markers."""
    start, end = "<!-- results -->", "<!-- end of results -->"
    return f"{text.split(start)[0]}{start}\n{table()}\n{end}{text.split(end)[1]}"


if __name__ == "__main__":
    PAGE.write_text(renew_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(table())
