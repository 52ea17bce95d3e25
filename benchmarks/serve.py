"""Compare servers under load: vitral serve, a FastAPI route around a transformers pipeline, LitServe around timm.

    python -m benchmarks.serve --save                  # the comparison; about eight minutes on 2 cores
    python -m benchmarks.serve --saturation 60 --save  # vitral alone at twice its throughput; under two minutes
    python -m benchmarks.table                         # writes the comparison into docs/explanation/speed.md

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from PIL import Image

import vitral
from benchmarks.peers import in_transformers, randomize, repair_torchvision
from benchmarks.timing import describe_machine, save, undisturbed

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
    load_names = ("URL", "FOLDER", "CLIENTS", "SECONDS", "ARRIVALS")
    parser.add_argument("--load", nargs=5, metavar=load_names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_peer(options.run[0], Path(options.run[1]), int(options.run[2]))
    elif options.load:
        url, folder, clients, seconds, arrivals = options.load
        print(json.dumps(asyncio.run(apply_load(url, Path(folder), int(clients), float(seconds), float(arrivals)))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), options.model)
            if options.saturation:
                saturate(Path(folder), options.saturation, options.clients, is_saved=options.save)
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
    if server == "litserve":
        from benchmarks.litserve_peer import run_litserve

        run_litserve(folder / "model.safetensors", port, batch=BATCH)
    else:
        model = vitral.load(folder / "model.safetensors").model
        assert isinstance(model, vitral.ViT)
        run_pipeline(model, port)


def run_pipeline(model: vitral.ViT, port: int) -> None:
    """Serve a transformers pipeline: a route that calls it in one thread, because several would fight for the cores."""
    import uvicorn
    from fastapi import FastAPI, Request
    from transformers import ImageClassificationPipeline, ViTImageProcessor

    peer: Any = in_transformers(model)
    processor = ViTImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    classify: Any = ImageClassificationPipeline(model=peer.model.eval(), image_processor=processor, device="cpu")
    app, thread = FastAPI(), ThreadPoolExecutor(1)

    @app.post("/predict")
    async def predict(request: Request) -> object:
        content = await request.body()

        def answer() -> object:
            return classify(Image.open(io.BytesIO(content)).convert("RGB"), top_k=5)

        return await asyncio.get_running_loop().run_in_executor(thread, answer)

    uvicorn.run(app, port=port, log_level="error")


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


async def apply_load(url: str, folder: Path, clients: int, seconds: float, arrivals: float) -> dict[str, Any]:
    """Return throughput, latencies and statuses.

    Each client sends the next image after a response. With `arrivals`, that many requests per second are sent instead.
    """
    photos = [path.read_bytes() for path in sorted((folder / "photos").iterdir())]
    is_form = url.endswith("/predict") and "/api/" not in url and await _wants_form(url, photos[0])
    requests = [encode_request(url, photo, is_form=is_form) for photo in photos]
    port = httpx.URL(url).port
    latencies: list[float] = []
    statuses: Counter[str] = Counter()
    idle: list[Connection] = []
    end = time.perf_counter() + seconds

    async def send(number: int) -> int:
        """Return the status, 0 if the connection broke."""
        start = time.perf_counter()
        request = requests[number % len(requests)]
        try:
            is_reused = bool(idle)
            connection = idle.pop() if is_reused else await asyncio.open_connection("127.0.0.1", port)
            try:
                status, stays_open = await exchange(connection, request)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                if not is_reused or getattr(error, "partial", b""):
                    raise
                # A server may close an idle connection at any moment: HTTP clients then repeat the request.
                connection = await asyncio.open_connection("127.0.0.1", port)
                status, stays_open = await exchange(connection, request)
        except (OSError, EOFError, ValueError) as error:
            statuses[type(error).__name__] += 1
            return 0
        if stays_open:
            idle.append(connection)
        else:
            connection[1].close()
        statuses[str(status)] += 1
        if status == 200:
            latencies.append(time.perf_counter() - start)
        return status

    async def client(number: int) -> None:
        while time.perf_counter() < end:
            if await send(number) != 200:
                await asyncio.sleep(0.05)
            number += clients

    start = time.perf_counter()
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(client(number)) for number in range(clients)]
    for number in range(round(arrivals * seconds)):
        await asyncio.sleep(max(0.0, start + number / arrivals - time.perf_counter()))
        tasks.append(asyncio.create_task(send(number)))
    await asyncio.gather(*tasks)
    p50, p99 = (float(np.percentile(latencies, part)) for part in (50, 99)) if latencies else (0.0, 0.0)
    return {"rate": len(latencies) / (time.perf_counter() - start), "p50": p50, "p99": p99, "statuses": dict(statuses)}


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def encode_request(url: str, photo: bytes, *, is_form: bool) -> bytes:
    """Return a whole request, encoded once: the clients must not take the time of the servers."""
    body: dict[str, Any] = {"files": {"image": photo}} if is_form else {"content": photo}
    request = httpx.Request("POST", url, **body)
    lines = [f"POST {request.url.path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + request.read()


async def exchange(connection: Connection, request: bytes) -> tuple[int, bool]:
    """Send a request, and return the status and whether the connection stays open."""
    reader, writer = connection
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    return int(head.split()[1]), b"connection: close" not in head


async def _wants_form(url: str, photo: bytes) -> bool:
    async with httpx.AsyncClient(timeout=60) as session:
        return (await session.post(url, content=photo)).status_code != 200


def load(url: str, folder: Path, clients: int, seconds: float, arrivals: float = 0.0) -> dict[str, Any]:
    """Apply load from another process."""
    command = [sys.executable, "-m", "benchmarks.serve", "--load", url, str(folder)]
    command += [str(number) for number in (clients, seconds, arrivals)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the median over the rounds for each server, and the bare engine at the same batch size.

    vitral is also measured with twice as many clients as images in a batch: with fewer, the engine waits while the
    clients take their responses. Its rate is divided by that of the bare engine in the same minute.
    """
    names = options.servers.split(",")
    turns: dict[str, list[dict[str, Any]]] = {}
    bare: dict[str, list[float]] = {}
    shuffle = random.Random(0)
    for number in range(options.rounds):
        shuffle.shuffle(names)
        for name in names:
            about_model: dict[str, Any] = {}
            with running(name, folder, "--max-per-client", "64") as url:
                load(url, folder, options.clients, 2)
                results = {name: undisturbed(partial(load, url, folder, options.clients, options.seconds))}
                if name.startswith("vitral"):
                    turn = undisturbed(partial(load, url, folder, 2 * BATCH, options.seconds))
                    results[f"{name}, {2 * BATCH} clients"] = turn
                    about_model = httpx.get(url.replace("/predict", "/model")).json()
            if about_model:
                rates = undisturbed(partial(bare_rates, folder, about_model["engine"], about_model["precision"]))
                alone = next(iter(rates.values()))
                results = {title: {**turn, "of_engine": turn["rate"] / alone} for title, turn in results.items()}
                for title, rate in rates.items():
                    bare.setdefault(title, []).append(rate)
            for title, turn in results.items():
                turns.setdefault(title, []).append(turn)
                print(f"round {number + 1}, {title}: {turn}", file=sys.stderr)
    about = {"clients": options.clients, "rounds": options.rounds}
    keys = ("rate", "p50", "p99", "of_engine")
    rows = [
        {"server": title, **{key: median(turn.get(key, 0.0) for turn in results) for key in keys}, **about}
        for title, results in turns.items()
    ]
    nothing = dict.fromkeys(keys[1:], 0.0)
    return rows + [{"server": title, "rate": median(rates), **nothing} for title, rates in bare.items()]


def bare_rates(folder: Path, engine: str, precision: str) -> dict[str, float]:
    """Return images per second of an engine alone and of a Predictor with decoding, in batches of the same size."""
    script = """
import sys, time, pathlib, vitral
predictor = vitral.Predictor(sys.argv[1], batch_size=16, engine=sys.argv[3], precision=sys.argv[4])
files = [path.read_bytes() for path in sorted(pathlib.Path(sys.argv[2]).iterdir())]
images = [predictor.prepare(file) for file in files]
def rate(step):
    step()
    start, rounds = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < 4:
        step()
        rounds += 1
    return rounds * len(files) / seconds
alone = rate(lambda: [predictor.predict_prepared(images[at : at + 16]) for at in range(0, len(images), 16)])
print(alone, rate(lambda: predictor(files)))
"""
    command = [
        sys.executable,
        "-c",
        script,
        str(folder / "model.safetensors"),
        str(folder / "photos"),
        engine,
        precision,
    ]
    alone, decoding = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    title = f"{engine} {precision}"
    return {f"engine alone, {title}": float(alone), f"Predictor with decoding, {title}": float(decoding)}


def show(rows: list[dict[str, Any]]) -> None:
    print("| server | images/s | of the engine alone | p50, ms | p99, ms |\n|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -row["rate"]):
        times = f"{1000 * row['p50']:.0f} | {1000 * row['p99']:.0f}"
        print(f"| {row['server']} | {row['rate']:.1f} | {row['of_engine']:.2f} | {times} |")


def saturate(folder: Path, seconds: float, clients: int, *, is_saved: bool) -> None:
    """Send twice as many requests as vitral can compute; show statuses, p99 and its bound, and memory.

    The requests come at fixed times, whether earlier ones have a response or not. An image waits at most for the queue
    and two batches: the one that is computed, and its own.
    """
    queue = 48
    with running("vitral", folder, "--max-queue", str(queue), "--max-per-client", "4096") as url:
        alone = load(url, folder, clients, 10)["rate"]
        load(url, folder, 0, 10, arrivals=2 * alone)  # the buffers of many connections are allocated
        before = memory_of(url)
        result = load(url, folder, 0, seconds, arrivals=2 * alone)
        growth = memory_of(url) / before - 1
    bound = (queue + 2 * BATCH) / result["rate"]
    statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(result["statuses"].items()))
    reached = f"{statuses}; p99 {result['p99']:.2f} s (bound {bound:.2f} s); memory {growth:+.1%}"
    print(f"{alone:.1f} images/s alone, {result['rate']:.1f} under {2 * alone:.1f} requests/s for {seconds:.0f} s")
    print(reached)
    if is_saved:
        from tests.faults.figures import record

        goal = "only 200, 429 and 503; p99 at most the queue and two batches; memory flat (5 %)"
        record("Twice as many requests as a server can compute", goal, reached)


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
