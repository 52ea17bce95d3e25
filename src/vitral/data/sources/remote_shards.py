"""Open tar shards on an object store or a web server.

Each shard is read once from its start to its end to index its members; the index stays in the cache. After that,
images are read by ranges of bytes, so that nothing is stored on this machine.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vitral.cache import keep_entry, read_entry
from vitral.collectives import current_world, gather
from vitral.data.dataset import DatasetIndex
from vitral.data.headers import MAX_BYTES
from vitral.data.remote import (
    RemoteSource,
    RemoteStream,
    file_name,
    find_file,
    list_files,
    read_file,
    short_digest,
    without_query,
)
from vitral.data.sources.shards import ShardIndex, combine_shards, expand_braces, parse_classes, read_shard
from vitral.errors import DataError
from vitral.files import as_text

INDEX_VERSION = 1
THREADS = 8
"""Shards that are indexed at the same time."""


def open_remote_shards(url: str, *, labeled: bool = True) -> DatasetIndex:
    """Return the index of the shards that an address names: a folder, a brace pattern, or one tar file."""
    is_folder = not file_name(url).lower().endswith(".tar")
    urls = _shards_in(url) if is_folder else expand_braces(url)
    home = url.rstrip("/") if is_folder else urls[0].partition("?")[0].rpartition("/")[0]
    shards = index_shards(urls)
    listed = f"{home}/classes.txt"
    content = read_file(listed) if labeled else None
    first = shards[0].stem
    return combine_shards(
        shards,
        home=without_query(home),
        name=as_text(file_name(url) if is_folder and file_name(url) else first),
        is_folder=is_folder,
        classes=None if content is None else parse_classes(content, listed),
        labeled=labeled,
    )


def _shards_in(url: str) -> list[str]:
    """Return the tar files in a folder."""
    urls = [name for name in list_files(url) if file_name(name).lower().endswith(".tar")]
    if not urls:
        hint = "Pass a folder of tar shards, a pattern such as train-{000..009}.tar, or one .tar file."
        raise DataError(f"There are no tar shards in {without_query(url)}.", hint=hint)
    return urls


def index_shards(urls: Sequence[str]) -> list[ShardIndex]:
    """Return the index of each shard. The processes of a command divide the work."""
    world = current_world()
    mine = urls[world.rank :: world.size]
    with ThreadPoolExecutor(THREADS) as pool:
        indices = list(pool.map(index_shard, mine))
    by_url = {index.path: index for part in gather(indices) for index in part}
    return [by_url[url] for url in urls]


def index_shard(url: str) -> ShardIndex:
    """Return the index of a shard, from the cache or by reading it once."""
    file = find_file(url)
    key = hashlib.sha256(f"{INDEX_VERSION}\n{url}\n{file.size}\n{file.stamp}".encode()).hexdigest() + ".json"
    index = _from_json(read_entry("shards", key), url)
    if index is None:
        stream = io.BufferedReader(RemoteStream(file), 2**20)
        index = read_shard(RemoteShardIndex(file_name(url), url), stream)
        keep_entry("shards", key, _to_json(index))
    return index


class RemoteShardIndex(ShardIndex):
    """Collect the images of a shard together with a digest of each, because all of its bytes pass by."""

    def source(self, shard: tarfile.TarFile, member: tarfile.TarInfo) -> RemoteSource:
        digest = b""
        stream = shard.extractfile(member) if member.size <= MAX_BYTES else None
        if stream is not None:
            content = stream.read()
            if len(content) < member.size:
                raise tarfile.ReadError("unexpected end of data")
            digest = short_digest(content)
        return RemoteSource(self.path, member.offset_data, member.size, digest)


# ---- the cache ----


def _to_json(index: ShardIndex) -> bytes:
    images = [
        [key, source.offset, source.size, source.digest.hex()]
        for key, source in index.images.items()
        if isinstance(source, RemoteSource)
    ]
    content: dict[str, Any] = {"name": index.name, "images": images, "labels": index.labels, "skipped": index.skipped}
    return json.dumps(content | {"is_cut_off": index.is_cut_off}).encode()


def _from_json(content: bytes | None, url: str) -> ShardIndex | None:
    """Return the index of a shard, or None if the cache has none or a damaged one."""
    try:
        stored = json.loads(content or b"")
        make = partial(RemoteSource, url)
        images = {
            str(key): make(int(offset), int(size), bytes.fromhex(digest))
            for key, offset, size, digest in stored["images"]
        }
        labels = {key: tuple(label) if isinstance(label, list) else label for key, label in stored["labels"].items()}
        return ShardIndex(
            name=str(stored["name"]),
            path=url,
            images=dict(images),
            labels=labels,
            skipped={str(key): str(reason) for key, reason in stored["skipped"].items()},
            is_cut_off=bool(stored["is_cut_off"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
