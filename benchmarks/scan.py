"""`vitral data` on 60,000 small pictures, as a person runs it: the whole command, its bar drawn on a terminal.

    python -m benchmarks.scan --save          # about three minutes on 2 cores

Half of the pictures are PNGs and half are JPEGs of 32 pixels, in ten class folders; a few are cut off and a few are
copies, so that all findings have something to find. The files are in the page cache. Not for Windows, which has no
pseudo-terminals.
"""

import argparse
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.timing import describe_machine, save

CLASSES, SIDE, EVERY = 10, 32, 1000
LIMIT = 60.0


def write_pictures(folder: Path, number: int) -> None:
    """Smooth colours, each picture its own; one in a thousand is cut off, and one is the copy of another."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (number, 4, 4, 3), dtype=np.uint8)
    before = b""
    for index in range(number):
        place = folder / f"class {index % CLASSES}"
        place.mkdir(exist_ok=True)
        picture = Image.fromarray(coarse[index]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        kind = ("PNG", "JPEG")[index // CLASSES % 2]
        stream = io.BytesIO()
        picture.save(stream, kind)
        content = stream.getvalue()
        if index % EVERY == 17:
            content = content[: len(content) // 2]
        elif index % EVERY == 10 + CLASSES:
            content = before
        (place / f"{index:06d}.{kind.lower()}").write_bytes(content)
        if index % EVERY == 10:
            before = content


def time_command(folder: Path, *words: str) -> tuple[float, str, str]:
    """Seconds of `vitral data`, its page, and what it drew while it went on."""
    reader, terminal = pty.openpty()
    drawn: list[bytes] = []

    def collect() -> None:
        try:
            while chunk := os.read(reader, 65536):
                drawn.append(chunk)
        except OSError:  # the other end is closed
            return

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    start = perf_counter()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "vitral", "data", str(folder), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, text=True, env=environment)
    seconds = perf_counter() - start
    os.close(terminal)
    thread.join()
    os.close(reader)
    page = b"".join(drawn).decode(errors="replace")
    assert done.returncode == 0, done.stdout + page
    return seconds, done.stdout, page


def measure(folder: Path, number: int, runs: int, *words: str) -> dict[str, Any]:
    times, page, bar = [], "", ""
    for _ in range(runs):
        seconds, page, bar = time_command(folder, *words)
        times.append(seconds)
    assert f"{number:,} pictures" in page, page
    assert f"{number // EVERY} pictures cannot be read" in page or words, page
    steps = {int(step) for step in re.findall(rf"(\d+)/{number}", bar)}
    assert len(steps) > 10, "there was no bar"
    return {
        "command": " ".join(("vitral data", *words)),
        "pictures": number,
        "seconds": min(times),
        "all_seconds": times,
        "pictures_per_second": number / min(times),
        "bar_updates": len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=60_000)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write a dated JSON into benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), options.pictures)
        rows = [measure(Path(folder), options.pictures, options.runs, *words) for words in ((), ("--headers-only",))]
    print("| command | pictures | seconds | pictures/s |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['command']} | {row['pictures']:,} | {row['seconds']:.1f} | {row['pictures_per_second']:.0f} |")
    if options.save:
        save("scan", describe_machine("pillow", "simplejpeg"), rows)
    if rows[0]["seconds"] > LIMIT * options.pictures / 60_000:
        sys.exit(f"{rows[0]['seconds']:.0f} s are more than the {LIMIT:.0f} that 60,000 pictures may take.")


if __name__ == "__main__":
    main()
