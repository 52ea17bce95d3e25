"""A dataset larger than memory: training on remote shards needs the same memory, however large they are."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.stores import serve_folder
from tests.faults.figures import record

SHARD_IMAGES, IMAGE_BYTES = 100, 1_000_000
LIMIT = 2**29
"""Training may need as many bytes more than it needs on a small dataset: two windows, and batches on their way."""
SETTINGS = (
    "--recipe none --model vit-pico4 --network.width 48 --network.depth 1 --network.heads 3 --image-size 32 "
    "--batch-size 16 --epochs 1 --workers {workers} --device cpu --precision float32 --format quiet"
)
MEASURED = """
import resource, sys
from vitral.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def write_large_shards(folder: Path, shards: int) -> int:
    """Write JPEGs of a megabyte, most of it after their end, where decoders ignore it. Return the bytes of all."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(shards):
        with tarfile.open(folder / f"train-{number:03d}.tar", "w") as shard:
            for image in range(SHARD_IMAGES):
                stream = io.BytesIO()
                pixels = random.integers(0, 255, (48, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(stream, "JPEG")
                stream.write(random.bytes(IMAGE_BYTES - stream.tell()))
                for suffix, content in (("jpg", stream.getvalue()), ("cls", b"%d" % (image % 2))):
                    member = tarfile.TarInfo(f"{number}-{image}.{suffix}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
    return sum(file.stat().st_size for file in folder.glob("*.tar"))


def peak_memory(url: str, out: Path, cache: Path, workers: int) -> int:
    """Train in a process of its own and return its largest resident memory in bytes."""
    command = [sys.executable, "-c", MEASURED, "train", url, "--out", str(out)]
    command += SETTINGS.format(workers=workers).split()
    environment = os.environ | {"VITRAL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stderr.split()[-1]) * 1024


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serve_folder(tmp_path) as server:
        yield server.url


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_is_flat(url: str, tmp_path: Path, workers: int) -> None:
    write_large_shards(tmp_path / "small", 1)
    size = write_large_shards(tmp_path / "large", 12)
    small, large = (
        peak_memory(f"{url}/{name}", tmp_path / f"run-{name}", tmp_path / "cache", workers)
        for name in ("small", "large")
    )
    assert large - small < LIMIT < size / 2, (small, large)
    if not workers:
        growth = f"{(large - small) / 1e6:.0f} MB more than for {SHARD_IMAGES / 1000:.1f} GB"
        record("remote shards of 1.2 GB", "flat memory", f"peak {large / 1e6:.0f} MB, {growth}")
