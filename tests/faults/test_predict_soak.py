"""Predict ten thousand images, five hundred of them unreadable, with a command that is killed twenty times.

python -m pytest -m soak -s tests/faults/test_predict_soak.py      # about four minutes on 2 cores
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vitral
from tests.data.images import class_folders, encoded, photo, png_header
from tests.faults.figures import record

COUNT, BAD, KILLS = 10_000, 500, 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    photos = class_folders(folder / "photos", {"red": 40, "green": 40, "blue": 40}, size=(16, 16))
    settings = dict(model="vit-pico4", network=dict(width=48, depth=1, heads=3), image_size=16, batch_size=8, epochs=4)
    run = vitral.train(photos, out=folder / "run", optim=dict(name="adamw", lr=3e-3), progress=False, **settings)
    return str(run.folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    """Return the paths, and the label of each readable image."""
    folder = tmp_path_factory.mktemp("images")
    source = class_folders(folder / "source", {"red": 12, "green": 12, "blue": 12}, size=(16, 16))
    good = [(path.parent.name, path.read_bytes()) for path in sorted(source.glob("*/*.png"))]
    jpeg = encoded(photo(), "JPEG")
    bad = [b"", b"not an image", jpeg[: len(jpeg) // 2], png_header(30_000, 30_000), b"\x89PNG\r\n\x1a\n" + b"\0" * 50]
    unreadable = set(random.Random(0).sample(range(COUNT), BAD))
    files, labels = [], {}
    for number in range(COUNT):
        path = folder / f"{number:05d}.png"
        if number in unreadable:
            path.write_bytes(bad[number % len(bad)])
        else:
            label, content = good[number % len(good)]
            path.write_bytes(content)
            labels[str(path)] = label
        files.append(str(path))
    return files, labels


def start(model: str, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vitral", "predict", model, "-", "--out", str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)


def feed(process: subprocess.Popen[str], files: list[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n".join(files))
    process.stdin.close()


def check(out: Path, files: list[str], labels: dict[str, str]) -> None:
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["file"] for row in rows] == files
    assert sum("error" in row for row in rows) == BAD
    assert sum(row.get("label") == labels[row["file"]] for row in rows if row["file"] in labels) == COUNT - BAD


@pytest.mark.soak
def test_every_image_has_its_row_and_memory_stays_flat(
    model: str, images: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    files, labels = images
    out = tmp_path / "rows.jsonl"
    process = start(model, out)
    feed(process, files)
    sizes: list[tuple[int, int]] = []
    while process.poll() is None:
        done = out.read_bytes().count(b"\n") if out.exists() else 0
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            sizes.append((done, int(status.split("VmRSS:")[1].split()[0])))
        except (OSError, IndexError):
            break
        time.sleep(0.2)
    assert process.wait() == 3
    check(out, files, labels)
    early = max(size for done, size in sizes if 1000 <= done <= 3000)
    late = max(size for done, size in sizes if done >= 9000)
    print(f"resident: {early / 1024:.0f} MiB after 1,000 to 3,000 images, {late / 1024:.0f} MiB at the end")
    assert late <= 1.02 * early
    record(
        "10,000 predictions with 500 bad files",
        "9,500 labels, 500 errors, order kept, exit code 3",
        f"{COUNT - BAD:,} right labels, {BAD} errors; memory {late / early - 1:+.1%}",
    )


@pytest.mark.soak
def test_no_row_is_lost_or_duplicated_by_twenty_kills(
    model: str, images: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    files, labels = images
    out = tmp_path / "rows.jsonl"
    chance = random.Random(1)
    for _ in range(KILLS):
        before = out.stat().st_size if out.exists() else 0
        process = start(model, out, "--resume")
        feed(process, files)
        target = before + chance.randrange(5_000, 50_000)
        deadline = time.monotonic() + 120
        while (not out.exists() or out.stat().st_size < target) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    process = start(model, out, "--resume")
    feed(process, files)
    assert process.wait() == 3
    check(out, files, labels)
    record(
        "10,000 predictions with 500 bad files, killed 20 times",
        "no row lost or doubled",
        f"{COUNT:,} rows after {KILLS} kills, none lost or doubled",
    )
