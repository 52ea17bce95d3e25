"""Time `vitral data` on 60,000 small images, as a person runs it: the whole command, with its progress bar.

    python -m benchmarks.scan --save          # about three minutes on 2 cores

Half of the images are PNGs and half are JPEGs of 32 pixels, in ten class folders. A few are truncated and a few are
duplicates, so that every check finds something. The files are in the page cache. Windows has no pseudo-terminals, so
this does not run there.
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


def write_images(folder: Path, number: int) -> None:
    """Write smooth random images; of every thousand, one is truncated and one is a duplicate."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (number, 4, 4, 3), dtype=np.uint8)
    original = b""
    for index in range(number):
        class_folder = folder / f"class {index % CLASSES}"
        class_folder.mkdir(exist_ok=True)
        image = Image.fromarray(coarse[index]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        kind = ("PNG", "JPEG")[index // CLASSES % 2]
        stream = io.BytesIO()
        image.save(stream, kind)
        content = stream.getvalue()
        if index % EVERY == 17:
            content = content[: len(content) // 2]
        elif index % EVERY == 10 + CLASSES:
            content = original
        (class_folder / f"{index:06d}.{kind.lower()}").write_bytes(content)
        if index % EVERY == 10:
            original = content


def time_command(folder: Path, *options: str) -> tuple[float, str, str]:
    """Return the seconds of `vitral data`, its output, and its progress bar."""
    reader, terminal = pty.openpty()
    drawn: list[bytes] = []

    def collect() -> None:
        try:
            while chunk := os.read(reader, 65536):
                drawn.append(chunk)
        except OSError:  # the terminal is closed
            return

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    start = perf_counter()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "vitral", "data", str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, text=True, env=environment)
    seconds = perf_counter() - start
    os.close(terminal)
    thread.join()
    os.close(reader)
    bar = b"".join(drawn).decode(errors="replace")
    assert done.returncode == 0, done.stdout + bar
    return seconds, done.stdout, bar


def measure(folder: Path, number: int, runs: int, *options: str) -> dict[str, Any]:
    times, output, bar = [], "", ""
    for _ in range(runs):
        seconds, output, bar = time_command(folder, *options)
        times.append(seconds)
    assert f"{number:,} images" in output, output
    assert f"{number // EVERY} images are unreadable" in output or options, output
    steps = {int(step) for step in re.findall(rf"(\d+)/{number}", bar)}
    assert len(steps) > min(10, number // 1000), "no progress bar was drawn"
    return {
        "command": " ".join(("vitral data", *options)),
        "images": number,
        "seconds": min(times),
        "all_seconds": times,
        "images_per_second": number / min(times),
        "bar_updates": len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), options.images)
        rows = [measure(Path(folder), options.images, options.runs, *flags) for flags in ((), ("--headers-only",))]
    print("| command | images | seconds | images/s |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['command']} | {row['images']:,} | {row['seconds']:.1f} | {row['images_per_second']:.0f} |")
    if options.save:
        save("scan", describe_machine("pillow", "simplejpeg"), rows)
    if rows[0]["seconds"] > LIMIT * options.images / 60_000:
        sys.exit(f"60,000 images took {rows[0]['seconds']:.0f} s (expected at most {LIMIT:.0f} s).")


if __name__ == "__main__":
    main()
