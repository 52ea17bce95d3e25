"""Count the photos per second from a folder to labels: vitral, the pipeline of transformers, and a script with timm.

    python -m benchmarks.predict_folder PHOTOS                       # ViT-S/16 and Ti/16, 400 photos
    python -m benchmarks.predict_folder PHOTOS --models vit-ti16 --images 100 --runs 3 --save

Every candidate has the same random weights and predicts the same files; its labels are compared first. Candidates take
turns in a new order every run, and the ratio to timm is the median over the runs; "A/A" is timm against itself.
"decoder" is the speed of decoding and resizing alone, on all cores.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import vitral
from benchmarks.peers import in_timm, in_transformers, randomize, repair_torchvision
from benchmarks.timing import describe_machine, save
from vitral.data.prefetch import load_ahead, loading_threads
from vitral.data.sources.image_files import find_images
from vitral.inference.engines import Gate
from vitral.inference.engines.fingerprint import describe_cpu
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint

BATCH = 32
Labels = list[int]
Candidate = Callable[[Sequence[str]], Labels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--models", nargs="+", default=["vit-s16", "vit-ti16"])
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    found = find_images([str(options.photos)], ())
    files = [found[number % len(found)] for number in range(options.images)]
    machine = describe_machine("timm", "transformers", "openvino", "onnxruntime", "pillow") | describe_cpu()
    print(machine, flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows.append(measure(name, files, options.runs))
        for title, speed in sorted(rows[-1]["images_per_second"].items(), key=lambda pair: pair[1]):
            print(
                f"{name:10} {title:26} {speed:8.1f} images/s {rows[-1]['ratios'].get(title, 0):6.2f} x timm", flush=True
            )
        if options.save:
            save("predict-folder", machine, rows, key=("model",))


def measure(name: str, files: list[str], runs: int) -> dict[str, Any]:
    model = randomize(vitral.create(name, activation="gelu", num_classes=1000)).eval()
    assert isinstance(model, vitral.ViT)
    candidates = build_candidates(model)
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
    speeds["decoder"] = decoder_speed(model, files)
    return {"model": name, "images": len(files), "images_per_second": speeds, "ratios": ratios, "agreement": agreement}


def build_candidates(model: vitral.ViT) -> dict[str, Candidate]:
    checkpoint = Checkpoint(model=model, preprocess=Preprocess(size=model.config.image_hw))
    candidates: dict[str, Candidate] = {}
    requests = (("torch", "float32"), ("torch", "bfloat16"), ("openvino", "float32"), ("openvino", "bfloat16"))
    for engine, precision in requests:
        loose = Gate(max_difference=1, min_top1=0)
        predictor = vitral.Predictor(checkpoint, engine=engine, precision=precision, batch_size=BATCH, gate=loose)
        candidates[f"vitral {engine} {precision}"] = bind(predictor)
    candidates |= {"timm": timm_script(model), "timm (A/A)": timm_script(model)}
    return candidates | {"transformers pipeline": transformers_pipeline(model)}


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


def decoder_speed(model: vitral.ViT, files: list[str]) -> float:
    """Return the photos per second that decoding and resizing alone reach, on all cores."""
    checkpoint = Checkpoint(model=model, preprocess=Preprocess(size=model.config.image_hw))
    predictor = vitral.Predictor(checkpoint, engine="torch")
    start = time.perf_counter()
    for _ in load_ahead(files, predictor.preprocess, threads=loading_threads(), ahead=BATCH):
        pass
    return len(files) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
