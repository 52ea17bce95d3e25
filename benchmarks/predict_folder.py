"""Count the photos per second from a folder to labels: vitral, the pipeline of transformers, and a script with timm.

    python -m benchmarks.predict_folder PHOTOS --save                # ViT-S/16 and Ti/16: ten minutes on 2 cores
    python -m benchmarks.predict_folder PHOTOS --models vit-ti16 --images 400 --runs 3

Every candidate has the same random weights and predicts the same files; its labels are compared first. Candidates take
turns in a new order every run, and the ratio to timm is the median over the runs; "A/A" is timm against itself.
bfloat16 is measured only where the CPU computes it. int8 is a file of `vitral export`, calibrated on some of the
photos. The cold start is the time of a whole command, from a new process to the label of a photo.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import vitral
from benchmarks.peers import in_timm, in_transformers, randomize, repair_torchvision
from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.data.sources.image_files import find_images
from vitral.devices import choose_precision
from vitral.exporting.exporter import export
from vitral.inference.engines import Gate
from vitral.inference.real_images import RealImages
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint

BATCH = 32
CALIBRATION = 48
Labels = list[int]
Candidate = Callable[[Sequence[str]], Labels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--models", nargs="+", default=["vit-s16", "vit-ti16"])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    found = find_images([str(options.photos)], ())
    files = [found[number % len(found)] for number in range(options.images)]
    machine = describe_machine("timm", "transformers", "openvino", "onnxruntime", "pillow")
    print(machine, flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        with TemporaryDirectory() as folder:
            rows.append(measure(name, files, options.runs, Path(folder)))
        print(as_lines(rows[-1]), flush=True)
        if options.save:
            save("predict-folder", machine, rows, key=("model",))


def measure(name: str, files: list[str], runs: int, folder: Path) -> dict[str, Any]:
    model = randomize(vitral.create(name, activation="gelu", num_classes=1000)).eval()
    assert isinstance(model, vitral.ViT)
    checkpoint = Checkpoint(model=model, preprocess=Preprocess(size=model.config.image_hw))
    write_files(checkpoint, files, folder)
    starts = measure_starts(name, folder, files[0], runs)
    candidates = build_candidates(checkpoint, model, folder)
    expected = candidates["vitral torch float32"](files[:BATCH])
    agreement = {title: match(run(files[:BATCH]), expected) for title, run in candidates.items()}
    print("top-1 agreement on the first photos:", agreement, flush=True)
    times: dict[str, list[float]] = {title: [] for title in candidates}
    for run in range(runs):
        order = list(candidates)
        random.Random(run).shuffle(order)
        for title in order:
            start = time.perf_counter()
            candidates[title](files)
            times[title].append(time.perf_counter() - start)
    speeds = {title: len(files) / min(seconds) for title, seconds in times.items()}
    ratios = {
        title: median(theirs / ours for theirs, ours in zip(times["timm"], seconds, strict=True))
        for title, seconds in times.items()
    }
    return {
        "model": name,
        "images": len(files),
        "images_per_second": speeds,
        "ratios": ratios,
        "agreement": agreement,
        "cold_start_seconds": starts,
    }


def as_lines(row: dict[str, Any]) -> str:
    ordered = sorted(row["images_per_second"].items(), key=lambda pair: pair[1])
    lines = [
        f"{row['model']:10} {title:26} {speed:8.1f} images/s"
        + (f" {row['ratios'][title]:6.2f} x timm" if title in row["ratios"] else "")
        for title, speed in ordered
    ]
    starts = [
        f"{row['model']:10} {title:26} {seconds:8.2f} s cold" for title, seconds in row["cold_start_seconds"].items()
    ]
    return "\n".join([*lines, *starts])


def build_candidates(checkpoint: Checkpoint, model: vitral.ViT, folder: Path) -> dict[str, Candidate]:
    candidates: dict[str, Candidate] = {}
    loose = Gate(max_difference=1, min_top1=0)  # random weights; the agreement is printed
    for engine in ("torch", "openvino"):
        for precision in dict.fromkeys(("float32", choose_precision("cpu").value)):
            predictor = vitral.Predictor(checkpoint, engine=engine, precision=precision, batch_size=BATCH, gate=loose)
            candidates[f"vitral {engine} {precision}"] = bind(predictor)
    candidates["vitral openvino int8"] = bind(vitral.Predictor(folder / "int8.xml", batch_size=BATCH))
    candidates |= {"timm": timm_script(model), "timm (A/A)": timm_script(model)}
    return candidates | {"transformers pipeline": transformers_pipeline(model)}


def write_files(checkpoint: Checkpoint, files: list[str], folder: Path) -> None:
    """Write the model as each candidate reads it."""
    vitral.save(checkpoint, folder / "model.safetensors")
    vitral.save(checkpoint, folder / "huggingface", dialect="huggingface")
    vitral.save(checkpoint, folder / "timm.safetensors", dialect="timm")
    export(checkpoint, folder / "model.onnx", to="onnx")
    export(checkpoint, folder / "model.xml", to="openvino")
    predictor = vitral.Predictor(checkpoint, engine="torch")
    photos = np.stack(
        [image for image in map(predictor.preprocess, files[:CALIBRATION]) if isinstance(image, np.ndarray)]
    )
    images = RealImages(calibration=photos, compared=photos[:16], labels=None, origin="photos")
    export(checkpoint, folder / "int8.xml", to="openvino", precision="int8", images=images, max_drop=100)


def bind(predictor: vitral.Predictor) -> Candidate:
    return lambda files: [int(prediction.label) for prediction in predictor(list(files))]


def timm_script(model: vitral.ViT) -> Candidate:
    """Return the usual script: Pillow, torchvision's transforms, batches."""
    network = in_timm(model).eval()
    height, width = model.config.image_hw

    def run(files: Sequence[str]) -> Labels:
        from PIL import Image
        from torchvision import transforms

        prepare: Any = transforms.Compose(
            [transforms.Resize((height, width)), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
        )
        labels: Labels = []
        with torch.inference_mode():
            for start in range(0, len(files), BATCH):
                images = [prepare(Image.open(file).convert("RGB")) for file in files[start : start + BATCH]]
                labels += network(torch.stack(images)).argmax(1).tolist()
        return labels

    return run


def transformers_pipeline(model: vitral.ViT) -> Candidate:
    repair_torchvision()
    from transformers import ViTImageProcessor, pipeline

    peer: Any = in_transformers(model)
    height, width = model.config.image_hw
    processor = ViTImageProcessor(size={"height": height, "width": width})
    classify: Any = pipeline("image-classification", model=peer.model.eval(), image_processor=processor, device="cpu")

    def run(files: Sequence[str]) -> Labels:
        results = classify(list(files), batch_size=BATCH, top_k=1)
        return [int(result[0]["label"].removeprefix("LABEL_")) for result in results]

    return run


def match(labels: Labels, expected: Labels) -> float:
    return sum(ours == theirs for ours, theirs in zip(labels, expected, strict=True)) / len(expected)


REPAIR = """
import sys, types
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
"""
"""Lets torchvision start where its compiled extension does not fit torch."""
TIMM = """
import torch, timm
from PIL import Image
from timm.data import create_transform
model = timm.create_model(sys.argv[1], checkpoint_path=sys.argv[2]).eval()
image = create_transform((3, 224, 224))(Image.open(sys.argv[3]).convert("RGB"))
with torch.inference_mode():
    print(model(image[None]).argmax(1).item())
"""
TRANSFORMERS = """
from transformers import pipeline
print(pipeline("image-classification", sys.argv[1], device="cpu")(sys.argv[2])[0]["label"])
"""


def measure_starts(name: str, folder: Path, photo: str, runs: int) -> dict[str, float]:
    """Return the median seconds of whole commands that print the label of one photo, which take turns."""
    theirs = f"vit_{'tiny' if 'ti16' in name else 'small'}_patch16_224"
    commands = {
        f"vitral {file}": ["-m", "vitral", "predict", str(folder / file), photo, "--format", "quiet"]
        for file in ("model.safetensors", "model.onnx", "model.xml", "int8.xml")
    }
    commands["timm script"] = ["-c", REPAIR + TIMM, theirs, str(folder / "timm.safetensors"), photo]
    commands["transformers script"] = ["-c", REPAIR + TRANSFORMERS, str(folder / "huggingface"), photo]
    turns = {title: bind_command([sys.executable, *words]) for title, words in commands.items()}
    fastest_turns(turns, rounds=1)  # fills the caches of the file system
    times = [fastest_turns(turns, rounds=1, seed=run) for run in range(runs)]
    return {title: median(run[title] for run in times) for title in turns}


def bind_command(words: list[str]) -> Callable[[], object]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return lambda: subprocess.run(words, check=True, capture_output=True, env=environment)


if __name__ == "__main__":
    main()
