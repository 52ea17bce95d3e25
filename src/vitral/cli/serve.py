"""`vitral serve`: a web page and an API."""

import sys
from typing import Annotated

from vitral.cli.parameters import RUNNABLE_HELP, Device, ImageSize, Integer, Precision, Text, option
from vitral.errors import ConfigError
from vitral.files import printable

Names = tuple[str, ...]


def serve(
    model: Annotated[str | None, option(RUNNABLE_HELP)] = None,
    /,
    *,
    models: Annotated[
        Names,
        option(
            "Serve a model under a name. Repeat for several.",
            "NAME=MODEL",
            name="--model",
            negative="",
            show_default=False,
        ),
    ] = (),
    host: Annotated[str, option("Address to listen on; 0.0.0.0 for every network.", "HOST")] = "127.0.0.1",
    port: Annotated[Integer, option("Port to listen on; 0 for a free one.")] = 8000,
    token: Annotated[
        Text, option("Require this secret from API requests, or set VITRAL_TOKEN.", "TOKEN", env_var="VITRAL_TOKEN")
    ] = None,
    workers: Annotated[Integer, option("Processes per model.")] = 1,
    max_batch: Annotated[Integer, option("Largest number of images per batch.")] = 16,
    max_wait: Annotated[float, option("Milliseconds that an image waits for others.", "MS")] = 2.0,
    max_queue: Annotated[Integer, option("Images that may wait; further ones get status 503.")] = 64,
    max_per_client: Annotated[Integer, option("Images per client; further ones get status 429.")] = 32,
    timeout: Annotated[float, option("Seconds until a waiting request gets status 503.", "S")] = 30.0,
    max_body: Annotated[float, option("Largest request in MiB.", "MIB")] = 10.0,
    reject: Annotated[float, option('Show "none of these" for images at least this unusual.', "N")] = 0.95,
    root_path: Annotated[
        str, option("Path under which a proxy publishes the server.", "PREFIX", show_default=False)
    ] = "",
    trusted_proxy: Annotated[
        Names, option("Trust the X-Forwarded headers of this address.", "IP", negative="", show_default=False)
    ] = (),
    allow_host: Annotated[
        Names, option("Accept this name in the Host header.", "NAME", negative="", show_default=False)
    ] = (),
    allow_origin: Annotated[
        Names, option("Let scripts of this site call the API.", "ORIGIN", negative="", show_default=False)
    ] = (),
    image_size: ImageSize = None,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Annotated[
        str,
        option("torch, compiled, onnxruntime or openvino. auto: the fastest, measured at the first start.", "ENGINE"),
    ] = "auto",
) -> None:
    """Serve a model: a web page for people and an API for programs.

    Prints the address and runs until Ctrl-C or SIGTERM; accepted requests are finished first.
    With the same engine and precision, the page and the API return the probabilities of `vitral predict`.

    Examples
    --------
    vitral serve vit-cifar10
    vitral serve runs/pets-1 --host 0.0.0.0 --token a-long-secret
    vitral serve --model pets=runs/pets-1 --model flowers=runs/flowers-1
    """
    from vitral.serving.server import serve as run
    from vitral.serving.settings import name_sources

    sources = {} if model is None else name_sources(model)
    sources |= parse_models(models, taken=sources)
    if host not in ("127.0.0.1", "localhost", "::1") and token is None:
        print(
            f"vitral: warning: everybody who reaches {printable(host)} can use the API. Pass --token.", file=sys.stderr
        )
    print(f"Loading {', '.join(map(printable, sources.values()))}", file=sys.stderr)
    run(
        sources, host=host, port=port, token=token, workers=workers, max_batch=max_batch, max_wait=max_wait,
        max_queue=max_queue, max_per_client=max_per_client, timeout=timeout, max_body=max_body, reject=reject,
        root_path=root_path, trusted_proxy=trusted_proxy, allow_host=allow_host, allow_origin=allow_origin,
        image_size=image_size, device=device, precision=precision, engine=engine, on_ready=show_address,
    )  # fmt: skip


def parse_models(texts: Names, *, taken: dict[str, str]) -> dict[str, str]:
    """Return the models of --model NAME=MODEL by name. Raise ConfigError for a text without a name, or one twice."""
    sources: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not (equals and name and source):
            raise ConfigError(f"--model must be NAME=MODEL (got {text!r}).", hint="Use --model pets=runs/pets-1.")
        if name in sources or name in taken:
            raise ConfigError(f"Two models have the name {name}.", hint="Pass --model OTHER-NAME=MODEL.")
        sources[name] = source
    return sources


def show_address(url: str) -> None:
    """Print where the page is, on standard output for scripts."""
    print(f"Serving at {url}", flush=True)
    print("Press Ctrl-C to stop.", file=sys.stderr, flush=True)
