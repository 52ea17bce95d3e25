"""The settings of a server, each with the reason for its default. Imports neither torch nor FastAPI."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vitral.errors import ConfigError, check_int, check_number, check_type, short_repr

MEBIBYTE = 2**20
MAX_NAME = 64
METHODS = ("attention", "rollout", "relevance")
"""Maps of an image: the attention of single layers and heads, all layers joined, or what led to a label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one request. Each is checked before the memory or time that it bounds is spent."""

    body: int = 10 * MEBIBYTE
    """Bytes of a request body: a 40-megapixel JPEG of ordinary quality fits."""
    images: int = 32
    """Images per request."""
    pixels: int = 40_000_000
    """Pixels per image, read from its header: decoded, 40 million take 120 MB."""
    side: int = 16_384
    """Pixels of the longer side."""
    headers: int = 100
    head: int = 16 * 1024
    """Bytes of all headers together."""
    url: int = 8 * 1024
    """Bytes of the path and the query."""
    boundary: int = 70
    """Characters of a multipart boundary, as RFC 2046 allows."""
    head_seconds: float = 10.0
    """Time for the headers of a request to arrive, which a person on a slow line does not need."""
    body_seconds: float = 30.0
    buffered: int = 128 * MEBIBYTE
    """Bytes of all bodies that are being received or wait in the queue."""
    unread: int = 64 * MEBIBYTE
    """Bytes of all responses that clients have not read; beyond, the clients that have waited longest are dropped."""
    connections: int = 4096
    """Open connections; requests on further ones are refused."""
    top_k: int = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model to serve, and how to run it."""

    name: str
    source: str
    device: str = "auto"
    precision: str = "auto"
    engine: str = "auto"
    image_size: tuple[int, int] | None = None
    threads: int | None = None
    """CPU threads of a worker; None lets torch decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Everything that a server needs to know before it starts."""

    models: tuple[ModelSource, ...]
    """The first one answers requests that name no model."""
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    """Processes per model. One uses all cores; more pay off only for small models and many cores."""
    max_batch: int = 16
    max_wait: float = 2.0
    """Milliseconds that an image waits for others before a batch starts without them."""
    max_queue: int = 64
    """Images that wait for a worker, per model. A longer queue only makes clients wait longer."""
    max_per_client: int = 32
    """Images per client that are queued or computed: no client can fill the queue alone."""
    timeout: float = 30.0
    """Seconds from a request to its response; afterwards it is dropped from the queue."""
    drain_seconds: float = 10.0
    """After SIGTERM, seconds to finish accepted requests."""
    reject: float = 0.95
    """Images at least this unusual are shown as "none of these"."""
    token: str | None = field(default=None, repr=False)
    root_path: str = ""
    """The path under which a proxy publishes the server."""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_int("port", self.port, minimum=0, maximum=65535)
        for name in ("workers", "max_batch", "max_queue", "max_per_client"):
            check_int(name, getattr(self, name), minimum=1, maximum=4096)
        check_number("max_wait", self.max_wait, minimum=0, maximum=10_000)
        check_number("timeout", self.timeout, above=0, maximum=3600)
        check_number("reject", self.reject, above=0, maximum=1)
        check_int("max_body", self.limits.body, minimum=1024, maximum=1024 * MEBIBYTE)
        if self.token is not None and not re.fullmatch(r"[!-~]{8,256}", self.token):
            raise ConfigError("The token must have 8 to 256 printable ASCII characters without spaces.")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ConfigError(f"root_path must look like /models (got {short_repr(self.root_path)}).")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"https?://[^/?#\s*]+", origin):
                hint = "Pass scheme and host, such as https://example.org."
                raise ConfigError(f"allowed origin {short_repr(origin)} is not an origin.", hint=hint)
        self._check_models()

    def _check_models(self) -> None:
        if not self.models:
            raise ConfigError("There is no model to serve.", hint="Pass a MODEL, such as vit-cifar10.")
        names = [model.name for model in self.models]
        for name in names:
            if not re.fullmatch(rf"[\w.-]{{1,{MAX_NAME}}}", name):
                rule = f"1 to {MAX_NAME} letters, digits, dots, hyphens and underscores"
                raise ConfigError(f"A model's name must have {rule} (got {short_repr(name)}).")
            if names.count(name) > 1:
                raise ConfigError(f"Two models have the name {name}.", hint="Pass --model OTHER-NAME=MODEL.")


def name_of(source: str | Path) -> str:
    """Return a name for a model: runs/pets-1 -> pets-1, vit.safetensors -> vit, hf:google/vit -> vit."""
    text = str(source).removeprefix("hf:").rstrip("/\\")
    last = re.split(r"[/\\:]", text)[-1]
    stem = re.sub(r"\.(safetensors|npz|pth|pt|bin|onnx|xml|ckpt)$", "", last)
    return re.sub(r"[^\w.-]", "-", stem)[:MAX_NAME].strip(".-") or "model"


def name_sources(sources: object) -> dict[str, str]:
    """Return the sources by name, from one source, a list of them, or a mapping from names to sources."""
    if isinstance(sources, Mapping):
        return {str(name): str(source) for name, source in sources.items()}
    listed = list(sources) if isinstance(sources, list | tuple) else [sources]
    named: dict[str, str] = {}
    for source in listed:
        check_type("A model to serve", source, str, Path, hint="Pass a run folder, a weights file or a name.")
        named[_unused(name_of(str(source)), named)] = str(source)
    return named


def _unused(name: str, taken: Mapping[str, str]) -> str:
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return next(choice for choice in (name, *numbered) if choice not in taken)
