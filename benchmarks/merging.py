"""Measure token merging, alone and with int8: speed against accuracy, without any training.

    python -m benchmarks.merging --model vit-cifar10 --data cifar10/ --images 2000 --save
    python -m benchmarks.merging --model S14.safetensors --data flowers/ --image-size 224 --merge 8 12 16 --batch 8

A model without a head gets one: a ridge regression that is fitted to training features without merging, as a probe
that was trained before. int8 is OpenVINO with NNCF, calibrated on training images. Accuracy is that of the test split,
whose difference to the plain model is paired image by image. All forward passes take turns; speeds are relative to timm
in eager float32, whose outputs are compared first, or to ours for networks that timm does not have. "agreement" is the
share of images labeled as by the plain model.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engines import run_peer
from benchmarks.peers import in_timm
from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.data.sources import open_dataset
from vitral.evaluation.frozen_features import fit_ridge, one_hot_targets, whiten
from vitral.evaluation.metrics import wilson
from vitral.inference.engines.graph import PixelModel, trace
from vitral.inference.engines.openvino import OpenVinoEngine, compile_model, convert_program
from vitral.inference.engines.quantization import import_nncf, measure_drop, run_all, run_nncf
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import make_loader
from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.model.vit import ViT

CALIBRATION = 32
Turn = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="a dataset with a train and a test split")
    parser.add_argument("--merge", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--image-size", type=int, help="another size than that of the model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=10_000, help="images of each split, spread over it")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    counts = [0, *(count for count in options.merge if count)]
    models = {count: load_model(options.model, merge=count, image_size=options.image_size) for count in counts}
    calibration, _ = read_split(models[0], options.data, "train", CALIBRATION)
    if not models[0].model.config.num_classes:
        weight, bias = fit_head(models[0], options.data, options.images)
        for model in models.values():
            add_head(model, weight, bias)
    quantized = {count: quantize(model, calibration) for count, model in models.items()}
    images, labels = read_split(models[0], options.data, "test", options.images)
    is_timm = has_timm(models[0])
    speeds = measure_speeds(models, quantized, images[: options.batch], options.rounds, is_timm=is_timm)
    rows: list[dict[str, Any]] = []
    plain: np.ndarray | None = None
    operations = count_cost(models[0].model.config).forward_flops
    print("| merge | tokens left | precision | operations | speed | top-1 | agreement |\n|---|---|---|---|---|---|---|")
    for count, model in models.items():
        logits = {"float32": run_torch(model, images), "int8": run_all(quantized[count].logits, images)}
        plain = logits["float32"] if plain is None else plain
        for precision, outputs in logits.items():
            correct = int((outputs.argmax(1) == labels).sum())
            drop = measure_drop(outputs, plain, labels)
            rows.append(
                {
                    "model": options.model,
                    "batch": options.batch,
                    "merge": count,
                    "precision": precision,
                    "tokens_left": tokens_left(model),
                    "operations": count_cost(model.model.config).forward_flops / operations,
                    "speed": speeds[f"{precision} {count}"],
                    "relative_to": "timm" if is_timm else "torch",
                    "top1": correct / len(labels),
                    "interval": list(wilson(correct, len(labels))),
                    "drop": drop.points,
                    "drop_interval": [drop.low, drop.high],
                    "agreement": float((outputs.argmax(1) == plain.argmax(1)).mean()),
                    "images": len(labels),
                }
            )
            print(as_line(rows[-1]), flush=True)
    if options.save:
        machine = describe_machine("timm", "openvino", "nncf")
        save("merging", machine, rows, key=("model", "batch", "merge", "precision"))


def has_timm(model: LoadedModel) -> bool:
    """Return whether timm has this network: one pooled vector, no stem, and one learned table of positions."""
    config = model.model.config
    assert isinstance(config, ViTConfig)
    return (
        config.stem is None
        and config.pool in ("token", "mean", "map")
        and (config.position, config.position_at) == ("learned", "stem")
    )


def measure_speeds(
    models: dict[int, LoadedModel],
    quantized: dict[int, OpenVinoEngine],
    images: np.ndarray,
    rounds: int,
    *,
    is_timm: bool,
) -> dict[str, float]:
    """Return the speed of every candidate relative to timm in eager float32, or to ours without one in timm."""
    network = models[0].model
    assert isinstance(network, ViT)
    plain = bind(models[0], images)
    if is_timm:
        peer = run_peer(in_timm(network).eval(), models[0].preprocess)
        if not np.allclose(peer(images), run_torch(models[0], images), atol=1e-2):
            raise SystemExit("timm's outputs differ.")
        plain = bind_compute(peer, images)
    turns: dict[str, Turn] = {"plain": plain}
    turns |= {f"float32 {count}": bind(model, images) for count, model in models.items()}
    turns |= {f"int8 {count}": bind_compute(engine.logits, images) for count, engine in quantized.items()}
    times = fastest_turns(turns, rounds)
    return {title: times["plain"] / seconds for title, seconds in times.items()}


def bind(model: LoadedModel, images: np.ndarray) -> Turn:
    batch = torch.from_numpy(images)
    return lambda: model.logits(batch)


def bind_compute(compute: Callable[[np.ndarray], object], images: np.ndarray) -> Turn:
    return lambda: compute(images)


def quantize(model: LoadedModel, calibration: np.ndarray) -> OpenVinoEngine:
    """Return the model in int8."""
    program = trace(PixelModel(model.model, model.preprocess).eval(), torch.from_numpy(calibration[:3]))
    graph = convert_program(program, model.preprocess, ["logits"])
    return compile_model(run_nncf(import_nncf(), graph, calibration, ()), precision="int8")


def tokens_left(model: LoadedModel) -> int:
    """Return the tokens after the last block."""
    config = model.model.config
    assert isinstance(config, ViTConfig)
    rows, columns = config.grid(*config.image_hw)
    patches = rows * columns
    for _ in range(config.blocks):
        patches -= min(config.merge, patches // 2)
    return config.extra_tokens + patches


def fit_head(model: LoadedModel, data: str, images: int) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a ridge regression on features."""
    pixels, labels = read_split(model, data, "train", images)
    train = torch.cat([model.features(batch) for batch in torch.from_numpy(pixels).split(64)])
    targets = one_hot_targets(torch.from_numpy(labels), int(labels.max()) + 1)
    weights = fit_ridge(whiten(train, train), targets)
    bias = whiten(torch.zeros(1, train.shape[1]), train) @ weights
    return (whiten(torch.eye(train.shape[1]), train) @ weights - bias).T, bias[0]


def add_head(model: LoadedModel, weight: Tensor, bias: Tensor) -> None:
    model.model.reset_head(len(bias))
    model.model.head.load_state_dict({"weight": weight.float(), "bias": bias.float()})


def read_split(model: LoadedModel, data: str, split: str, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 (N, C, H, W) and labels, spread over the split."""
    items = open_dataset(data).splits[split]
    items = items[:: max(1, len(items) // images)][:images]
    batches = list(make_loader(model, items, batch_size=64).epoch())
    pixels = [batch.images.numpy() for batch in batches if isinstance(batch.images, Tensor)]
    return np.concatenate(pixels), np.concatenate([batch.labels.numpy() for batch in batches])


def run_torch(model: LoadedModel, images: np.ndarray) -> np.ndarray:
    return np.concatenate([model.logits(batch).numpy() for batch in torch.from_numpy(images).split(64)])


def as_line(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return (
        f"| {row['merge']} | {row['tokens_left']} | {row['precision']} | {row['operations']:.0%} | "
        f"{row['speed']:.2f} x | {row['top1']:.2%} ({low:.1%} to {high:.1%}) | {row['agreement']:.1%} |"
    )


if __name__ == "__main__":
    main()
