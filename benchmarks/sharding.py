"""Measure the peak memory of each process: one process, two with DDP, two with FSDP2.

    python -m benchmarks.sharding --save                 # S, B and L: about ten minutes on 2 cores, 24 GB of memory
    python -m benchmarks.sharding --models vit-s16 --candidates "one process" fsdp

Each candidate trains the same network for a few steps on the same batches of generated images, with `vitral train`.
A step has 16 images of S, 8 of B and 4 of L, unless `--batch` says otherwise, over all processes.
"growth" is the peak of the resident memory (VmHWM) minus the memory of the process after it has trained a tiny network
in the same way, which loads all libraries. The goal for FSDP2 is a growth per process of at most 0.6 times that of one
process. Validation, the saved states, the one-file model and the test are part of the measured run. All candidates
return freed memory to the system, as FSDP does; without it, a run without FSDP keeps up to 1 GiB more.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.timing import describe_machine, save

CANDIDATES = {"one process": (1, "ddp"), "ddp": (2, "ddp"), "fsdp": (2, "fsdp")}
BATCHES = {"vit-s16": 16, "vit-b16": 8, "vit-l16": 4}
GOAL = 0.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit-s16", "vit-b16", "vit-l16"])
    parser.add_argument("--batch", type=int, help="images per step, over all processes")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "STRATEGY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        model, strategy, folder = options.worker
        measure(model, strategy, folder, options.batch, options.steps)
        return
    machine = describe_machine()
    print(machine, flush=True)
    titles = ["model", "images", *(f"{name} (MB)" for name in CANDIDATES), "ddp ratio", "fsdp ratio"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        batch = options.batch or BATCHES[model]
        growth = {name: run(model, name, batch, options.steps) for name in options.candidates}
        ratios = {f"{name} ratio": growth[name] / growth["one process"] for name in growth if name != "one process"}
        rows.append({"model": model, "batch": batch, **growth, **ratios, "goal": GOAL})
        cells = [f"{growth[name] / 1e6:,.0f}" if name in growth else "-" for name in CANDIDATES]
        cells += [f"{ratios[name]:.2f}" if name in ratios else "-" for name in ("ddp ratio", "fsdp ratio")]
        print(f"| {' | '.join([model, str(batch), *cells])} |", flush=True)
        if options.save:
            save("sharding", machine, rows, key=("model", "batch"))


def run(model: str, candidate: str, batch: int, steps: int) -> int:
    """Train in other processes and return the largest growth of their memory in bytes."""
    processes, strategy = CANDIDATES[candidate]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "photos")
        words = ["--batch", str(batch), "--steps", str(steps), "--worker", model, strategy, folder]
        command = [sys.executable, *(launcher if processes > 1 else []), "-m", "benchmarks.sharding", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        results = [json.loads(path.read_text()) for path in Path(folder).glob("memory-*.json")]
        if done.returncode or len(results) != processes:
            raise SystemExit(f"{candidate} failed:\n{done.stderr[-4000:]}")
    return max(result["peak"] - result["before"] for result in results)


def measure(model: str, strategy: str, folder: str, batch: int, steps: int) -> None:
    """Train in this process and write its memory before the run of the model and at its peak."""
    import vitral
    import vitral.training.step
    from vitral.collectives import join_world
    from vitral.devices import keep_freed_memory
    from vitral.training.sharding import LARGE_TENSOR

    vitral.training.step.keep_freed_memory = lambda **_: keep_freed_memory(below=LARGE_TENSOR)
    world = join_world()
    settings: dict[str, Any] = dict(recipe="none", image_size=224, batch_size=batch, steps=steps, parallel=strategy)
    settings |= dict(device="cpu", precision="float32", workers=0, progress=False)
    tiny = dict(width=48, depth=2, heads=3, patch_size=32)
    vitral.train(f"{folder}/photos", out=f"{folder}/tiny", model="vit-pico8", network=tiny, **settings)
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restart the measurement of the peak
    vitral.train(f"{folder}/photos", out=f"{folder}/run", model=model, **settings)
    result = {"before": before, "peak": read_status("VmHWM")}
    Path(f"{folder}/memory-{world.rank}.json").write_text(json.dumps(result))


def read_status(field: str) -> int:
    match = re.search(rf"{field}:\s+([0-9]+) kB", Path("/proc/self/status").read_text())
    assert match
    return 1024 * int(match[1])


def write_images(folder: Path) -> None:
    for label, name in enumerate(("first", "second")):
        (folder / name).mkdir(parents=True)
        for index in range(12):
            pixels = np.random.default_rng([label, index]).integers(0, 256, (224, 224, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index:02d}.png")


if __name__ == "__main__":
    main()
