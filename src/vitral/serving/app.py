"""The routes of the server: the page, the API, health, metrics and documentation."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import vitral
from vitral.serving import schema
from vitral.serving.batching import ModelQueue, Result
from vitral.serving.gate import Gate
from vitral.serving.refusals import RequestError, invalid
from vitral.serving.service import ClientLeftError, Service
from vitral.serving.settings import Limits
from vitral.serving.uploads import FORMATS, ParsedBody

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
Method = Literal["attention", "rollout", "relevance"]
ModelName = Annotated[str | None, Query(description="The name of a model. Default: the first one.", max_length=64)]
COMPUTING_CODES = (404, 408, 413, 415, 422, 429, 501, 503)
ERROR_CODES = {404: "not_found", 405: "method_not_allowed"}


def build_app(service: Service) -> Gate:
    """Return the application of a server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.stop()

    app = FastAPI(
        title="vitral",
        version=vitral.__version__,
        description="Classify images with Vision Transformers.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load their scripts from another server
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    _add_error_handlers(app)
    _add_pages(app)
    _add_computation(app, service)
    _add_attention(app, service)
    _add_models(app, service)
    _add_health(app, service)
    return Gate(app, service)


def _error_response(error: RequestError) -> JSONResponse:
    return JSONResponse(error.content, error.status, headers=error.headers)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def _(request: Request, error: RequestError) -> Response:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        name = str(error.errors()[0]["loc"][-1]) if error.errors() else "parameter"
        return _error_response(invalid("invalid_parameter", f"The parameter {name[:64]} is invalid."))

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        code = ERROR_CODES.get(error.status_code, "bad_request")
        message = {404: "There is no such page.", 405: "This page does not support the method."}
        refusal = RequestError(error.status_code, code, message.get(error.status_code, "The request is invalid."))
        response = _error_response(refusal)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientLeftError)
    async def _(request: Request, error: ClientLeftError) -> Response:
        return Response(status_code=499)  # nobody reads it; the metrics count it


def _add_pages(app: FastAPI) -> None:
    folder = files("vitral.serving") / "page"
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def send_file(name: str) -> Response:
        return Response(contents[name], media_type=CONTENT_TYPES[name.rpartition(".")[2]])

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return send_file("index.html")

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        return send_file("docs.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404)
        return send_file(name)


def _add_health(app: FastAPI, service: Service) -> None:
    plain = {200: {"description": "OK", "content": {"text/plain": {"schema": schema.TEXT}}}}
    ready = schema.responses(schema.TEXT, 503) | plain

    @app.get("/healthz", responses=schema.responses(schema.TEXT) | plain, response_class=Response)
    async def health() -> Response:
        """Return 200 while the process runs."""
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz", responses=ready, response_class=Response)
    async def readiness() -> Response:
        """Return 200 if every model is loaded and the server is not stopping, else 503."""
        if not service.is_ready:
            code = "draining" if service.is_draining else "not_ready"
            raise RequestError(503, code, "The server is not ready.", retry_after=1)
        return Response("ready\n", media_type="text/plain")

    @app.get("/metrics", responses=schema.responses(schema.TEXT, 503) | plain, response_class=Response)
    async def metrics() -> Response:
        """Return counters and histograms for Prometheus."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


def _add_models(app: FastAPI, service: Service) -> None:
    anything = {"type": "object"}

    @app.get("/api/models", responses=schema.responses(anything, 503))
    async def models() -> JSONResponse:
        """List the models of this server; the first one is the default."""
        return JSONResponse({"models": list(service.queues)})

    @app.get("/api/model", responses=schema.responses(anything, 404, 503))
    async def model(model: ModelName = None) -> JSONResponse:
        """Return labels, size, preprocessing and limits of a model."""
        queue = service.queue_of(model)
        limits = describe_limits(service.settings.limits)
        return JSONResponse({**queue.info, "reject": service.settings.reject, "limits": limits})


def describe_limits(limits: Limits) -> dict[str, Any]:
    """Return the limits that clients need to know."""
    return {
        "body_bytes": limits.body,
        "images": limits.images,
        "pixels": limits.pixels,
        "side": limits.side,
        "formats": list(FORMATS),
    }


def _add_computation(app: FastAPI, service: Service) -> None:
    limits = service.settings.limits
    body = schema.image_body(limits)

    @app.post(
        "/api/predict", responses=schema.responses(schema.rows_of("predictions", schema.PREDICTION), *COMPUTING_CODES),
        openapi_extra=body,
    )  # fmt: skip
    async def predict(
        request: Request,
        model: ModelName = None,
        top_k: Annotated[int, Query(ge=1, le=limits.top_k, description="Number of labels per image.")] = 5,
    ) -> Response:
        """Return the most probable labels of each image."""
        queue = service.queue_of(model)
        if queue.info and not queue.info["can_predict"]:
            raise RequestError(501, "no_head", "This model has no classification head. Use /api/features.")
        async with service.receive_images(request) as parsed:
            options = {"top_k": _top_k(parsed, top_k, limits)}
            outcomes = await service.compute(request, queue, "predict", parsed, options)
            return _rows("predictions", queue, parsed, outcomes)

    @app.post(
        "/api/features", responses=schema.responses(schema.rows_of("embeddings", schema.FEATURES), *COMPUTING_CODES),
        openapi_extra=body,
    )  # fmt: skip
    async def features(request: Request, model: ModelName = None) -> Response:
        """Return the embedding of each image: the input of the classification head."""
        queue = service.queue_of(model)
        if queue.info and not queue.info["can_embed"]:
            raise RequestError(
                501, "no_features", "This model has no features. An exported classifier has labels only."
            )
        async with service.receive_images(request) as parsed:
            outcomes = await service.compute(request, queue, "features", parsed, {})
            return _rows("embeddings", queue, parsed, outcomes)


def _add_attention(app: FastAPI, service: Service) -> None:
    @app.post(
        "/api/attention", responses=schema.responses(schema.ATTENTION, *COMPUTING_CODES),
        openapi_extra=schema.image_body(service.settings.limits),
    )  # fmt: skip
    async def attention(
        request: Request,
        model: ModelName = None,
        method: Method = "attention",
        layer: Annotated[int | None, Query(ge=-4096, le=4095, description="One layer. Default: all.")] = None,
        label: Annotated[int | None, Query(ge=0, le=10**6, description="A label's index, for relevance.")] = None,
    ) -> Response:
        """Return where the model looks in one image: a map per layer and head, or one of all layers together."""
        queue = service.queue_of(model)
        if queue.info and method not in queue.info["methods"]:
            raise RequestError(501, "not_available", f"The model or this version of vitral has no {method} maps.")
        async with service.receive_images(request) as parsed:
            if len(parsed.images) != 1:
                raise invalid("too_many_images", "This route takes one image per request.")
            options = {"method": method, "layer": layer} | ({} if label is None else {"label": label})
            (outcome,) = await service.compute(request, queue, "attention", parsed, options)
            if isinstance(outcome, RequestError):
                raise outcome
            head = {"model": queue.source.name, "file": parsed.images[0].name, **outcome.info}
            return Response(_merge(head, outcome.content), media_type="application/json")


def _top_k(parsed: ParsedBody, top_k: int, limits: Limits) -> int:
    value = parsed.fields.get("top_k", top_k)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limits.top_k:
        raise invalid("invalid_parameter", f"top_k must be an integer from 1 to {limits.top_k}.")
    return value


def _rows(name: str, queue: ModelQueue, parsed: ParsedBody, outcomes: Sequence[Result | RequestError]) -> Response:
    """Return a row per image; the error of the first image if none could be used."""
    if all(isinstance(outcome, RequestError) for outcome in outcomes):
        raise next(outcome for outcome in outcomes if isinstance(outcome, RequestError))
    rows = [
        json.dumps({"file": image.name, **outcome.content}).encode()
        if isinstance(outcome, RequestError)
        else _merge({"file": image.name, **outcome.info}, outcome.content)
        for image, outcome in zip(parsed.images, outcomes, strict=True)
    ]
    head = json.dumps({"model": queue.source.name})[:-1].encode()
    content = b'%s, "%s": [%s]}' % (head, name.encode(), b", ".join(rows))
    return Response(content, media_type="application/json")


def _merge(fields: dict[str, Any], content: bytes) -> bytes:
    """Return the fields and those of an encoded object as one object, without decoding it."""
    return json.dumps(fields)[:-1].encode() + b", " + content[1:]
