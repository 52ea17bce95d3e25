"""Time JPEG photos to normalized random crops of 224 pixels in one thread: vitral, Pillow, torchvision, timm.

    python -m benchmarks.loader --save              # about two minutes

The photos come from two of scikit-learn and one of matplotlib, cropped and resized to 500 x 375 pixels ("A", like
ImageNet) and 2000 x 1500 ("B"). Every method gets the same random boxes. Each runs in a process of its own, as people
run them, because the memory that one method frees would make the next one faster. They take turns pass by pass, and
the fastest pass counts. "difference" is the mean absolute difference from Pillow, in normalized units.
"""

import argparse
import io
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.peers import repair_torchvision
from benchmarks.timing import describe_machine, save
from vitral.data.augment import Augment, random_box
from vitral.data.decode import fast_jpeg
from vitral.data.randomness import random_generator
from vitral.data.transforms import Box, crop_and_resize, normalize
from vitral.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

SIZE = 224
PREPROCESS = Preprocess(size=(SIZE, SIZE), mean=IMAGENET_MEAN, std=IMAGENET_STD)
SETS = {"A": (500, 375), "B": (2000, 1500)}
Method = Callable[[bytes, Box], torch.Tensor]


def make_photos(size: tuple[int, int], number: int) -> list[bytes]:
    from matplotlib import get_data_path
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    originals.append(Image.open(f"{get_data_path()}/sample_data/grace_hopper.jpg").convert("RGB"))
    random = np.random.default_rng(0)
    photos = []
    for index in range(number):
        image = originals[index % len(originals)]
        width, height = image.size
        fraction = random.uniform(0.8, 1.0)
        left, top = (random.uniform(0, side * (1 - fraction)) for side in (width, height))
        box = (left, top, left + width * fraction, top + height * fraction)
        stream = io.BytesIO()
        image.resize(size, Image.Resampling.LANCZOS, box=box).save(stream, "JPEG", quality=90)
        photos.append(stream.getvalue())
    return photos


def with_pillow(content: bytes, box: Box) -> torch.Tensor:
    top, left, height, width = box
    cropped = Image.open(io.BytesIO(content)).convert("RGB").crop((left, top, left + width, top + height))
    pixels = np.asarray(cropped.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div(255)
    return (image - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None]


def with_vitral(content: bytes, box: Box) -> torch.Tensor:
    return normalize(crop_and_resize(content, box, PREPROCESS), PREPROCESS)


def with_torchvision() -> Method:
    repair_torchvision()
    from torchvision.transforms.v2 import functional as F

    def run(content: bytes, box: Box) -> torch.Tensor:
        pixels = F.pil_to_tensor(Image.open(io.BytesIO(content)).convert("RGB"))
        top, left, height, width = box
        image = F.resized_crop(pixels, top, left, height, width, [SIZE, SIZE], antialias=True)
        return F.normalize(F.to_dtype(image, torch.float32, scale=True), list(IMAGENET_MEAN), list(IMAGENET_STD))

    return run


def with_timm() -> Method:
    """Return what timm's training transform does with a box: crop and resize in Pillow, then normalize."""
    repair_torchvision()
    from timm.data.transforms import MaybeToTensor
    from torchvision.transforms import functional as F

    to_tensor = MaybeToTensor()

    def run(content: bytes, box: Box) -> torch.Tensor:
        top, left, height, width = box
        image = Image.open(io.BytesIO(content)).convert("RGB")
        cropped = F.resized_crop(image, top, left, height, width, [SIZE, SIZE])  # type: ignore[arg-type]
        return F.normalize(to_tensor(cropped), list(IMAGENET_MEAN), list(IMAGENET_STD))

    return run


METHODS: dict[str, Callable[[], Method]] = {
    "pillow": lambda: with_pillow,
    "vitral": lambda: with_vitral,
    "torchvision": with_torchvision,
    "timm": with_timm,
}


@cache
def prepare(name: str, number: int) -> tuple[list[bytes], list[Box]]:
    """Return the photos of a set, with a random box for each."""
    contents, how = make_photos(SETS[name], number), Augment(crop="resized")
    return contents, [random_box(photo, PREPROCESS, how, random_generator(0, 0, i)) for i, photo in enumerate(contents)]


def time_pass(method: str, name: str, number: int) -> float:
    """Return the seconds of one pass over the photos of a set, in this process."""
    torch.set_num_threads(1)
    run, (contents, boxes) = METHODS[method](), prepare(name, number)
    start = time.perf_counter()
    for content, box in zip(contents, boxes, strict=True):
        run(content, box)
    return time.perf_counter() - start


def measure(name: str, number: int, passes: int, methods: Collection[str] = tuple(METHODS)) -> dict[str, Any]:
    with ExitStack() as stack:
        spawn = get_context("spawn")
        pools = {method: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for method in methods}
        rounds = [
            {method: pool.submit(time_pass, method, name, number).result() for method, pool in pools.items()}
            for _ in range(passes + 1)
        ]
    best = {method: min(seconds[method] for seconds in rounds[1:]) for method in methods}  # the first warms up
    pairs = zip(*prepare(name, number), strict=True)
    differences = [(with_vitral(photo, box) - with_pillow(photo, box)).abs().mean().item() for photo, box in pairs]
    return {
        "set": name,
        "photos": number,
        "simplejpeg": fast_jpeg() is not None,
        "images_per_second": {method: number / seconds for method, seconds in best.items()},
        "ratio": {method: best["pillow"] / seconds for method, seconds in best.items()},
        "difference": float(np.mean(differences)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure("A", 120, options.passes), measure("B", 24, options.passes)]
    print("| photos | pillow, images/s | vitral | torchvision | timm | difference |\n|---|---|---|---|---|---|")
    for row in rows:
        ratios = " | ".join(f"{row['ratio'][name]:.2f} x" for name in ("vitral", "torchvision", "timm"))
        print(f"| {row['set']} | {row['images_per_second']['pillow']:.0f} | {ratios} | {row['difference']:.4f} |")
    if options.save:
        save("loader", describe_machine("timm", "torchvision", "pillow", "simplejpeg"), rows)


if __name__ == "__main__":
    main()
