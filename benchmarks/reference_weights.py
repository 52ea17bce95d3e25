"""Train eight short runs and print a SHA-256 of the final weights of each.

    python -m benchmarks.reference_weights > before.txt     # and again after a change, on the same machine

Equal lines prove that a change leaves training the same, bit for bit. All images are generated from fixed seeds.
"""

import hashlib
import io
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import vitral

TINY: dict[str, Any] = dict(
    recipe="none",
    model="vit-pico4",
    network=dict(width=48, depth=2, heads=3, mlp_width=96),
    image_size=16,
    batch_size=8,
    steps=12,
    optim=dict(lr=2e-3, warmup_steps=2),
    seed=3,
    workers=0,
    device="cpu",
    precision="float32",
    keep="last",
    progress=False,
)
CLASSES = ("field", "water", "wood")


def make_image(label: int, index: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """Return noise with the channel of the label bright."""
    pixels = np.random.default_rng([label, index]).integers(0, 120, (*size, 3), dtype=np.uint8)
    pixels[..., label] += 100
    return Image.fromarray(pixels)


def write_folder(folder: Path, *, is_mixed: bool = False) -> Path:
    """Write a folder of class folders, with images of 16 x 16 or of mixed sizes."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(20):
            size = (12 + 4 * (index % 3), 12 + 4 * (index % 2)) if is_mixed else (16, 16)
            make_image(label, index, size).save(folder / name / f"{index:02d}.png")
    return folder


def write_table(folder: Path) -> Path:
    """Write a table whose images have one or two labels."""
    folder.mkdir()
    rows = ["image,labels"]
    for index in range(60):
        make_image(index % 3, index).save(folder / f"{index:02d}.png")
        second = f"|{CLASSES[(index + 1) % 3]}" if index % 2 else ""
        rows.append(f"{index:02d}.png,{CLASSES[index % 3]}{second}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "labels.csv"


def write_shards(folder: Path) -> Path:
    folder.mkdir()
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    for name, start, count in (("train-000", 0, 24), ("train-001", 24, 24), ("test-000", 48, 12)):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for index in range(start, start + count):
                content = io.BytesIO()
                make_image(index % 3, index).save(content, "png")
                for suffix, data in (("png", content.getvalue()), ("cls", str(index % 3).encode())):
                    member = tarfile.TarInfo(f"{index:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of all weights that a run wrote."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{path.name} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos, mixed = write_folder(folder / "photos"), write_folder(folder / "mixed", is_mixed=True)
        base = dict(from_=folder / "runs/digits", model=None, network=None, image_size=None)
        averaged = dict(ema=0.9, dropout=0.1, mix=dict(mixup=0.4, cutmix=1.0), loss=dict(smoothing=0.1))
        runs: dict[str, tuple[str | Path, dict[str, Any]]] = {
            "digits": ("builtin:digits", dict(recipe="small", steps=20, batch_size=16, augment=dict(crop="shift"))),
            "lora": (photos, base | dict(tune="lora", augment=dict(flip=0.5, crop="resized"), accumulate=2)),
            "ema-mixup": (photos, averaged | dict(drop_path=0.1)),
            "masked-patches": (photos, dict(objective="masked-patches", accumulate=2)),
            "bit": (photos, dict(model="bit-r50x1", network=None, image_size=32, steps=4, optim=dict(name="sgd"))),
            "multi-label": (write_table(folder / "table"), dict(loss=dict(class_weights="balanced"))),
            "shards": (write_shards(folder / "shards"), dict(epochs=2, steps=None, augment=dict(rotate=10, erase=0.5))),
            "native": (mixed, dict(resize="native", network=TINY["network"] | dict(pool="mean"))),
        }
        for name, (data, settings) in runs.items():
            run = vitral.train(data, out=folder / "runs" / name, **{**TINY, **settings})
            print(f"{hash_weights(run.folder)}  {name}  loss {run.test.loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
