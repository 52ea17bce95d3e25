"""Compare servers under load: vitral serve, a FastAPI route around a transformers pipeline, LitServe around timm.

    python -m benchmarks.serve --save                  # about six minutes on 2 cores
    python -m benchmarks.serve --saturation 600        # vitral alone at twice its throughput, for ten minutes

All serve the same S/16 at 224 px with the same random weights, and get the same JPEG photos. The servers take turns, in
a new order every round; the clients run in a process of their own. A server is stopped while another one is measured.
"""

import argparse
import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

import vitral
from benchmarks.peers import in_timm, in_transformers, randomize, repair_torchvision
from benchmarks.timing import describe_machine, save

SERVERS = ("vitral", "vitral float32", "pipeline", "litserve")
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-s16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="per turn")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument(
        "--saturation", type=float, metavar="SECONDS", help="load vitral at twice its throughput instead"
    )
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    parser.add_argument("--run", nargs=3, metavar=("SERVER", "FOLDER", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=4, metavar=("URL", "FOLDER", "CLIENTS", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_peer(options.run[0], Path(options.run[1]), int(options.run[2]))
    elif options.load:
        url, folder, clients, seconds = options.load
        print(json.dumps(asyncio.run(apply_load(url, Path(folder), int(clients), float(seconds)))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), options.model)
            if options.saturation:
                saturate(Path(folder), options.saturation, options.clients)
                return
            rows = compare(Path(folder), options)
        show(rows)
        if options.save:
            save("serve", describe_machine("timm", "transformers", "litserve", "fastapi", "uvicorn"), rows)


def prepare(folder: Path, name: str) -> None:
    """Write the model for every server, and JPEG photos of several sizes."""
    model = randomize(vitral.create(name, activation="gelu")).eval()
    assert isinstance(model, vitral.ViT)
    labels = tuple(f"class {number}" for number in range(model.config.num_classes))
    checkpoint = vitral.Checkpoint(model=model, preprocess=vitral.Preprocess(size=(224, 224)), labels=labels)
    vitral.save(checkpoint, folder / "model.safetensors")
    (folder / "photos").mkdir()
    for number in range(32):
        chance = np.random.default_rng(number)
        height, width = int(chance.integers(300, 600)), int(chance.integers(300, 600))
        small = Image.fromarray(chance.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        noise = Image.fromarray(chance.integers(0, 256, (height, width, 3), dtype=np.uint8))
        smooth = small.resize((width, height), Image.Resampling.BICUBIC)
        Image.blend(smooth, noise, 0.06).save(folder / "photos" / f"{number}.jpg", quality=90)


# ---- servers ----


def run_peer(server: str, folder: Path, port: int) -> None:
    """Run one of the other servers until it is stopped."""
    repair_torchvision()
    model = vitral.load(folder / "model.safetensors").model
    assert isinstance(model, vitral.ViT)
    (run_pipeline if server == "pipeline" else run_litserve)(model, port)


def run_pipeline(model: vitral.ViT, port: int) -> None:
    """Serve a transformers pipeline as its documentation shows: a route that calls it."""
    import uvicorn
    from fastapi import FastAPI, Request
    from transformers import ImageClassificationPipeline, ViTImageProcessor

    peer = in_transformers(model)
    processor = ViTImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    classify = ImageClassificationPipeline(model=peer, image_processor=processor, device="cpu")  # type: ignore[arg-type]
    app = FastAPI()

    @app.post("/predict")
    async def predict(request: Request) -> object:
        content = await request.body()
        return await asyncio.to_thread(lambda: classify(Image.open(io.BytesIO(content)).convert("RGB"), top_k=5))

    uvicorn.run(app, port=port, log_level="error")


def run_litserve(model: vitral.ViT, port: int) -> None:
    """Serve timm with LitServe's dynamic batching."""
    import litserve

    class Classifier(litserve.LitAPI):
        def setup(self, device: str) -> None:
            from timm.data.transforms_factory import create_transform

            self.model = in_timm(model).eval()
            self.transform: Any = create_transform((3, 224, 224), mean=(0.5,) * 3, std=(0.5,) * 3)

        def decode_request(self, request: Any, **_: Any) -> torch.Tensor:
            return self.transform(Image.open(request["image"].file).convert("RGB"))

        def predict(self, x: torch.Tensor, **_: Any) -> Any:
            with torch.inference_mode():
                return self.model(x).softmax(1).topk(5)

        def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(inputs)

        def unbatch(self, output: Any) -> Iterator[Any]:
            yield from zip(output.values.tolist(), output.indices.tolist(), strict=True)

        def encode_response(self, output: Any, **_: Any) -> dict[str, Any]:
            return {"probabilities": output[0], "labels": output[1]}

    api = Classifier(max_batch_size=BATCH, batch_timeout=0.002)
    litserve.LitServer(api, accelerator="cpu", timeout=60).run(
        port=port, host="127.0.0.1", log_level="error", generate_client_file=False
    )


@contextmanager
def running(server: str, folder: Path, *flags: str) -> Iterator[str]:
    """Yield the URL to post images to."""
    port = free_port()
    if server.startswith("vitral"):
        path, command = "/api/predict", [sys.executable, "-m", "vitral", "serve", str(folder / "model.safetensors")]
        command += ["--port", str(port), "--max-batch", str(BATCH), *flags]
        command += ["--precision", "float32"] if "float32" in server else []
    else:
        path, command = "/predict", [sys.executable, "-m", "benchmarks.serve", "--run", server, str(folder), str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}{path}"
    try:
        wait_until_up(url, next((folder / "photos").iterdir()), is_litserve=server == "litserve")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(url: str, photo: Path, *, is_litserve: bool) -> None:
    for _ in range(600):
        try:
            content = photo.read_bytes()
            body: dict[str, Any] = {"files": {"image": content}} if is_litserve else {"content": content}
            if httpx.post(url, **body, timeout=30).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{url} did not start")


# ---- load ----


async def apply_load(url: str, folder: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Return throughput, latencies and statuses of clients that each send the next image after a response."""
    photos = [path.read_bytes() for path in sorted((folder / "photos").iterdir())]
    is_litserve = url.endswith("/predict") and "/api/" not in url and await _wants_form(url, photos[0])
    latencies: list[float] = []
    statuses: Counter[str] = Counter()
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=120) as session:
            while (start := time.perf_counter()) < end:
                content = photos[number % len(photos)]
                body: dict[str, Any] = {"files": {"image": content}} if is_litserve else {"content": content}
                number += clients
                try:
                    response = await session.post(url, **body)
                except httpx.HTTPError as error:
                    statuses[type(error).__name__] += 1
                    continue
                statuses[str(response.status_code)] += 1
                if response.status_code == 200:
                    latencies.append(time.perf_counter() - start)
                else:
                    await asyncio.sleep(0.05)

    start = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    p50, p99 = (float(np.percentile(latencies, part)) for part in (50, 99)) if latencies else (0.0, 0.0)
    return {"rate": len(latencies) / (time.perf_counter() - start), "p50": p50, "p99": p99, "statuses": dict(statuses)}


async def _wants_form(url: str, photo: bytes) -> bool:
    async with httpx.AsyncClient(timeout=60) as session:
        return (await session.post(url, content=photo)).status_code != 200


def load(url: str, folder: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Apply load from another process."""
    command = [sys.executable, "-m", "benchmarks.serve", "--load", url, str(folder), str(clients), str(seconds)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the median over the rounds for each server, and the bare model at the same batch size."""
    names = options.servers.split(",")
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    bare = []
    shuffle = random.Random(0)
    for number in range(options.rounds):
        shuffle.shuffle(names)
        bare.append(bare_rate(folder))
        for name in names:
            with running(name, folder, "--max-per-client", "64") as url:
                load(url, folder, options.clients, 2)
                turns[name].append(load(url, folder, options.clients, options.seconds))
            print(f"round {number + 1}, {name}: {turns[name][-1]}", file=sys.stderr)
    rows = [
        {"server": name, **{key: median(turn[key] for turn in results) for key in ("rate", "p50", "p99")}}
        for name, results in turns.items()
    ]
    return [*rows, {"server": "Predictor in a loop, no server", "rate": median(bare), "p50": 0.0, "p99": 0.0}]


def bare_rate(folder: Path) -> float:
    """Return images per second of a Predictor on the same files, in batches of the same size."""
    script = (
        "import sys, time, pathlib, vitral; p = vitral.Predictor(sys.argv[1], batch_size=16);"
        "f = [x.read_bytes() for x in sorted(pathlib.Path(sys.argv[2]).iterdir())]; p(f);"
        "s = time.perf_counter(); [p(f) for _ in range(6)]; print(6 * len(f) / (time.perf_counter() - s))"
    )
    command = [sys.executable, "-c", script, str(folder / "model.safetensors"), str(folder / "photos")]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def show(rows: list[dict[str, Any]]) -> None:
    print("| server | images/s | p50, ms | p99, ms |\n|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -row["rate"]):
        print(f"| {row['server']} | {row['rate']:.1f} | {1000 * row['p50']:.0f} | {1000 * row['p99']:.0f} |")


def saturate(folder: Path, seconds: float, clients: int) -> None:
    """Load vitral with far more clients than its queue holds, and show statuses, p99 and its bound, and memory."""
    with running("vitral", folder, "--max-queue", "48", "--max-per-client", "160") as url:
        rate = load(url, folder, clients, 10)["rate"]
        before = memory_of(url)
        result = load(url, folder, 160, seconds)
        bound = (48 + 4 * BATCH) / rate  # the queue, two batches in the worker, and two more
        growth = memory_of(url) / before - 1
    print(f"{rate:.1f} images/s alone; at saturation {result['rate']:.1f}, statuses {result['statuses']}")
    print(f"p99 {result['p99']:.2f} s (bound {bound:.2f} s), memory {growth:+.1%}")


def memory_of(url: str) -> int:
    """Return the resident bytes of the server and its workers."""
    port = int(url.split(":")[2].split("/")[0])
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and f"--port\0{port}".encode() in (entry / "cmdline").read_bytes():
            children = (entry / "task" / entry.name / "children").read_text().split()
            for pid in (entry.name, *children):
                status = Path(f"/proc/{pid}/status").read_text()
                total += int(status.split("VmRSS:")[1].split()[0]) * 1024
    return total


if __name__ == "__main__":
    main()
