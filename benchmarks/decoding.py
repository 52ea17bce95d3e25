"""Count the photos per second of the pipeline from files to predictions where the network takes next to no time.

    python -m benchmarks.decoding PHOTOS --save      # a minute on 2 cores

"decoder" decodes and resizes in as many threads as there are cores. "pipeline" adds everything that `vitral predict`
does around the network: reading ahead, order, batches. "tiny network" stacks and normalizes prepared photos and
computes them; "pipeline and tiny network" does both from the files. "attainable" follows from the decoder and the
tiny network, because both need all cores: 1 / (1 / decoder + 1 / network). The photos are measured at their own size
and enlarged, because large photos take longer to decode, and as long to compute.
"""

import argparse
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import vitral
from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.data.prefetch import load_ahead, loading_threads
from vitral.data.sources.image_files import find_images
from vitral.devices import keep_freed_memory
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint

BATCH = 32
SIDES = (None, 960)
"""The longer side of the photos; None leaves them as they are."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=320)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    keep_freed_memory()  # as the commands do
    files = find_images([str(options.photos)], ())[: options.images]
    machine = describe_machine("openvino", "pillow")
    print(machine, flush=True)
    rows: list[dict[str, Any]] = []
    for side in SIDES:
        photos = [enlarge(Path(file).read_bytes(), side) for file in files]
        for engine in ("torch", "openvino"):
            rows.append(measure(photos, engine, options.runs))
            print(rows[-1], flush=True)
    if options.save:
        save("decoding", machine, rows)


def enlarge(content: bytes, side: int | None) -> bytes:
    """Return the JPEG file of a photo whose longer side has so many pixels."""
    if side is None:
        return content
    stream = BytesIO()
    with Image.open(BytesIO(content)) as image:
        factor = side / max(image.size)
        resized = image.convert("RGB").resize((round(image.width * factor), round(image.height * factor)))
        resized.save(stream, "JPEG", quality=90)
    return stream.getvalue()


def measure(photos: Sequence[bytes], engine: str, runs: int) -> dict[str, Any]:
    predictor = build_predictor(engine)
    images = [image for image in map(predictor.preprocess, photos) if isinstance(image, np.ndarray)]
    batches = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]

    def decode() -> None:
        for _ in load_ahead(photos, predictor.preprocess, threads=loading_threads(), ahead=BATCH):
            pass

    turns: dict[str, Callable[[], object]] = {
        "decoder": decode,
        "pipeline": lambda: list(predictor.preprocessed(photos)),
        "tiny network": lambda: [predictor.predict_prepared(batch) for batch in batches],
        "pipeline and tiny network": lambda: predictor(list(photos)),
    }
    times = fastest_turns(turns, rounds=runs)
    speeds = {title: len(photos) / seconds for title, seconds in times.items()}
    speeds["attainable"] = len(photos) / (times["decoder"] + times["tiny network"])
    sides = [max(Image.open(BytesIO(photo)).size) for photo in photos]
    return {
        "side": round(sum(sides) / len(sides)),
        "engine": engine,
        "images": len(photos),
        "images_per_second": speeds,
    }


def build_predictor(engine: str) -> vitral.Predictor:
    model = vitral.create("vit-ti16", patch_size=56, width=32, depth=1, heads=1, mlp_width=32, num_classes=10)
    checkpoint = Checkpoint(model=model.eval(), preprocess=Preprocess(size=(224, 224)))
    return vitral.Predictor(checkpoint, engine=engine, precision="float32", batch_size=BATCH)


if __name__ == "__main__":
    main()
