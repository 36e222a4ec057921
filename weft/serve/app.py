"""The HTTP interface: what can be asked, and what the answers look like."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from weft.documents import to_json
from weft.serve.body import read_uploads
from weft.serve.guard import Guard, refusal_response
from weft.serve.page import docs_page, front_page, policy
from weft.serve.refusal import Refusal
from weft.serve.samples import Samples
from weft.serve.service import Service
from weft.version import __version__

ModelName = Annotated[str, Query(max_length=300, description="A name of /models; by default the first.")]
Top = Annotated[int, Query(ge=1, le=1000, description="Classes that are named for a picture.")]
Score = Annotated[float, Query(ge=0, le=1, description="Objects that the model is less sure of are left out.")]
ClassName = Annotated[str, Query(max_length=300, description="The class whose Grad-CAM is shown; else the likeliest.")]
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A picture's bytes, or a form with one or many files.",
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"picture": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            },
        },
    }
}
SAID: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}}},
    400: {"description": "No picture, or a form that cannot be read."},
    401: {"description": "No token, or a wrong one."},
    403: {"description": "Without a token: not a local address, or a page of others."},
    404: {"description": "No such model."},
    408: {"description": "The request took too long to arrive."},
    413: {"description": "More bytes, or more pictures, than are taken."},
    415: {"description": "Not a picture in a format that is read."},
    422: {"description": "A damaged picture, too many pixels, or a number out of its range."},
    500: {"description": "Something went wrong here; the server's log has it under the id."},
    503: {"description": "The queue is full; Retry-After says when to come again."},
    504: {"description": "No answer in time; the work was dropped."},
}


def make_app(service: Service, samples: Samples) -> FastAPI:
    """The application around a service, which it starts and stops."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
        except Exception as error:
            app.state.failure = error  # for whoever started all this
            raise
        yield
        await service.stop()

    app = FastAPI(title="Weft", version=__version__, docs_url=None, redoc_url=None, lifespan=life)
    add_answers(app, service)
    add_facts(app, service)
    add_pages(app, samples)
    app.add_exception_handler(HTTPException, _told)
    app.add_exception_handler(RequestValidationError, _told)
    app.add_exception_handler(Refusal, _told)
    paths = {getattr(route, "path", "") for route in app.routes}
    app.add_middleware(
        Guard, settings=service.settings, metrics=service.metrics, admission=service.admission, paths=paths
    )
    return app


def add_answers(app: FastAPI, service: Service) -> None:
    """The requests with pictures."""
    settings = service.settings
    limits: dict[str, Any] = dict(max_bytes=settings.max_bytes, seconds=settings.seconds)

    @app.post("/predict", openapi_extra=BODY, responses=SAID)
    async def predict(request: Request, model: ModelName = "", top: Top = 5, score: Score = 0.5) -> Response:
        """Say what is in pictures, and where."""
        chosen = service.find(model)
        with service.admission.visit() as visit:
            with service.timed("read"):
                uploads = await read_uploads(request, visit, **limits)
            async with _while_wanted(request, settings.seconds):
                asked = (service.answer(chosen, upload, visit, top=top, score=score) for upload in uploads)
                rows = await asyncio.gather(*asked)
        if all("error" in row for row in rows):
            raise _refusal_of_all(rows)
        return _json({"model": chosen.name, "task": chosen.task.name, "pictures": rows})

    @app.post("/explain", openapi_extra=BODY, responses=SAID)
    async def explain(request: Request, model: ModelName = "", of: ClassName = "") -> Response:
        """Show what a model looks at in a picture: Grad-CAM, attention, tokens, as far as the model has them."""
        chosen = service.find(model)
        with service.admission.visit() as visit:
            with service.timed("read"):
                uploads = await read_uploads(request, visit, **limits)
            if len(uploads) > 1:
                raise Refusal(413, "One picture at a time is explained.")
            async with _while_wanted(request, settings.seconds):
                found = await service.explain(chosen, uploads[0], visit, of)
        return _json({"model": chosen.name, "name": uploads[0].name, **found})


def add_facts(app: FastAPI, service: Service) -> None:
    """The requests about the server itself."""

    @app.get("/models")
    async def models() -> Response:
        """List the models, the first of which answers where none is named, and the limits."""
        settings = service.settings
        limits = {"bytes": settings.max_bytes, "pixels": settings.max_pixels, "seconds": settings.seconds}
        return _json({"models": [model.describe() for model in service.models.values()], "limits": limits})

    @app.get("/health")
    async def health() -> Response:
        """Say that the server is alive."""
        return _json({"status": "ok", "version": __version__})

    @app.get("/ready")
    async def ready() -> Response:
        """Say whether pictures are answered."""
        if not service.well:
            raise Refusal(503, "Not ready.", retry_after=1)
        return _json({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_pages(app: FastAPI, samples: Samples) -> None:
    """The pages for people, which need nothing from elsewhere."""
    front, said = front_page(), policy()
    described = cache(lambda: docs_page(app.openapi()))  # once all that can be asked is there

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(front, media_type="text/html", headers={"content-security-policy": said})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(described(), media_type="text/html", headers={"content-security-policy": said})

    @app.get("/samples", include_in_schema=False)
    async def listed() -> Response:
        return _json({"samples": samples.names})

    @app.get("/samples/{number}", include_in_schema=False)
    async def sample(number: int) -> Response:
        if not 0 <= number < len(samples.names):
            raise Refusal(404, "There is no such sample.")
        return Response(samples.pictures[number], media_type="image/png")


@asynccontextmanager
async def _while_wanted(request: Request, seconds: float) -> AsyncIterator[None]:
    """Drops the work inside when its time is up, or when the client, who has sent everything, goes away."""
    gone = False

    async def watch(work: asyncio.Timeout) -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        work.reschedule(0)  # long ago

    try:
        async with asyncio.timeout(seconds) as work:
            watching = asyncio.create_task(watch(work))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if gone:
            raise Refusal(499, "The client went away.") from None
        raise Refusal(504, f"There was no answer within {seconds:g} seconds.") from None


def _refusal_of_all(rows: Sequence[dict[str, Any]]) -> Refusal:
    """The first of several that have no answer; a full house before all, since who comes again may have more."""
    row = min(rows, key=lambda row: row["status"] != 503)
    line = row["error"] if len(rows) == 1 else f"{row['name']}: {row['error']}"
    return Refusal(row["status"], line, retry_after=row.get("retry_after", 0))


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")


async def _told(request: Request, error: Exception) -> Response:
    """Errors of the framework as one line."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = Refusal(422, f"{first['loc'][-1]}: {first['msg']}.")
    elif isinstance(error, HTTPException):
        error = Refusal(error.status_code, f"{error.detail}.")
    return refusal_response(error, request.state.number)
