"""Measure time and memory of loading ViT-L/16: vitral from four dialects, timm and transformers from their own.

    python -m benchmarks.load --save          # about five minutes on 2 cores

The same random weights are written in each dialect. Every load runs in its own process, in turns. Time is measured from
the path to a model in evaluation mode, and to its first output, without imports. Memory is the growth of the process's
peak while loading. Files are in the page cache; Linux only. All models must output the same logits.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import vitral
from benchmarks.peers import randomize, repair_torchvision
from benchmarks.timing import describe_machine, save

CANDIDATES = {  # loader: dialects that it reads
    "vitral": ("native", "timm", "google", "huggingface"),
    "timm": ("timm", "google"),
    "transformers": ("huggingface",),
}
FILES = {"native": "ours.safetensors", "timm": "timm.safetensors", "google": "google.npz", "huggingface": "folder"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-l16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    parser.add_argument("--one", nargs=3, metavar=("LOADER", "PATH", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_load(*options.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_all(options.model, Path(folder))
        rows = measure_all(options.model, Path(folder), options.rounds)
    print("| loader | file | loaded, s | first output, s | peak memory, MB | of the file |\n|---|---|---|---|---|---|")
    for row in rows:
        numbers = f"{row['seconds']:.2f} | {row['first_output']:.2f} | {row['peak'] / 1e6:.0f}"
        print(f"| {row['loader']} | {row['dialect']} | {numbers} | {row['peak'] / row['bytes']:.2f} x |")
    if options.save:
        save("load", describe_machine("timm", "transformers"), rows)


def write_all(name: str, folder: Path) -> None:
    model = randomize(vitral.create(name, activation="gelu-tanh"))
    assert isinstance(model, vitral.ViT)
    for dialect, file in FILES.items():
        vitral.save(model, folder / file, dialect=dialect)


def measure_all(name: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    turns = [(loader, dialect) for loader, dialects in CANDIDATES.items() for dialect in dialects]
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {turn: [] for turn in turns}
    for turn in random.Random(0).sample(turns * rounds, len(turns) * rounds):
        loader, dialect = turn
        command = [sys.executable, "-m", "benchmarks.load", "--one", loader, str(folder / FILES[dialect]), name]
        measured[turn].append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    expected = torch.tensor(measured[turns[0]][0]["logits"])
    rows = []
    for (loader, dialect), results in measured.items():
        torch.testing.assert_close(torch.tensor(results[0]["logits"]), expected, atol=1e-3, rtol=1e-3)
        path = folder / FILES[dialect]
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
        rows.append(
            {
                "loader": loader,
                "dialect": dialect,
                "seconds": min(result["seconds"] for result in results),
                "first_output": min(result["first_output"] for result in results),
                "peak": median(result["peak"] for result in results),
                "bytes": size,
            }
        )
    return rows


def measure_load(loader: str, path: str, name: str) -> dict[str, Any]:
    open_model = prepare_loader(loader, path, name)
    before, start = peak_memory(), perf_counter()
    model = open_model()
    seconds, after = perf_counter() - start, peak_memory()
    size = vitral.create(name).config.image_hw if loader != "vitral" else model.config.image_hw
    images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(images)  # reads what was only mapped
    logits = getattr(logits, "logits", logits)
    first_output = perf_counter() - start
    return {"seconds": seconds, "first_output": first_output, "peak": after - before, "logits": logits[0, :20].tolist()}


def peak_memory() -> int:
    """Return the peak memory of this process in bytes. The resource module would include that of the parent."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def prepare_loader(loader: str, path: str, name: str) -> Any:
    """Import everything, so that only loading is measured, and return the function that loads."""
    repair_torchvision()
    if loader == "vitral":
        import vitral.weights.load

        return lambda: vitral.load(path).model
    if loader == "timm":
        import timm

        theirs = {
            "vit-l16": "vit_large_patch16_224",
            "vit-b16": "vit_base_patch16_224",
            "vit-s16": "vit_small_patch16_224",
        }
        return lambda: timm.create_model(theirs[name], checkpoint_path=path, act_layer="gelu_tanh").eval()
    from transformers import ViTForImageClassification

    return lambda: ViTForImageClassification.from_pretrained(path).eval()


if __name__ == "__main__":
    main()
