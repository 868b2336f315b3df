"""The service over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from scrlearn import __version__
from scrlearn.devices import cores
from scrlearn.service import docs_page
from scrlearn.service.answers import Reply, Source
from scrlearn.service.core import Service
from scrlearn.service.demo import Demo, DemoState
from scrlearn.service.guard import Access, Guard
from scrlearn.service.images_in import decode_images
from scrlearn.service.metrics import CONTENT_TYPE, Metrics
from scrlearn.service.model import Answer
from scrlearn.service.page import INDEX, PageFile, read_page
from scrlearn.service.pictures import picture
from scrlearn.service.problems import Problem
from scrlearn.service.requests_in import Upload, read_upload
from scrlearn.service.schemas import (
    Classes,
    ClassNear,
    Forgotten,
    Health,
    KnownClass,
    Learned,
    MemoryMap,
    MemoryPage,
    NeighbourImage,
    Point,
    Prediction,
    Predictions,
    ProblemDocument,
    State,
    StoredImage,
)

T = TypeVar("T")
LONGEST_WAIT = 60
ABOUT = (
    "Teach it images with labels, ask it about others, at the same time. What is accepted is on disk before it is "
    "acknowledged. Errors are problem documents (RFC 9457)."
)
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="A name of your choice for this request: sent again with the same name, it is done only once.",
    ),
]
Wait = Annotated[
    float,
    Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for the images to be learned before answering."),
]
Neighbours = Annotated[int, Query(alias="k", ge=1, le=50, description="Stored images to show for each.")]
Offset = Annotated[int, Query(ge=0, le=10**9, description="How many to leave out.")]
Limit = Annotated[int, Query(ge=1, le=200, description="How many to show.")]
OfLabel = Annotated[str | None, Query(description="Only images of this label.")]
WithDigest = Annotated[bool, Query(description="Compute the fingerprint of the model that answers, too.")]

_LIST = {"type": "array", "items": {"type": "string"}}


def _body(with_labels: bool) -> dict[str, Any]:
    """The body of a request with images, for the OpenAPI description."""
    files = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
    encoded = {"type": "array", "minItems": 1, "items": {"type": "string", "contentEncoding": "base64"}}
    labels = {"labels": _LIST | {"minItems": 1, "description": "One for each image, in order; or one for all."}}
    more = labels if with_labels else {}
    required = ["images", "labels"] if with_labels else ["images"]

    def schema(images: dict[str, Any]) -> dict[str, Any]:
        about = "PNG, JPEG, WebP or BMP: files in a form, base64 in JSON."
        properties = {"images": images | {"description": about}, **more}
        return {
            "schema": {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        }

    content = {"multipart/form-data": schema(files), "application/json": schema(encoded)}
    return {"requestBody": {"required": True, "content": content}}


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    names = {
        400: "cannot be read",
        401: "a token is needed",
        403: "not from here",
        404: "no such class",
        408: "took too long to arrive",
        413: "too large",
        415: "unsupported media type",
        422: "invalid",
        429: "too busy: try again after Retry-After seconds",
        503: "cannot be done now",
        507: "no space left; nothing was accepted",
    }
    media = {"application/problem+json": {"schema": ProblemDocument.model_json_schema()}}
    seconds = {"description": "Seconds after which trying again makes sense.", "schema": {"type": "integer"}}
    documents: dict[int | str, dict[str, Any]] = {
        s: {"description": names[s], "content": media} for s in (401, 403, 422, 429, *statuses)
    }
    documents[429]["headers"] = {"Retry-After": seconds}
    return documents


class Gate:
    """Where requests with images come in: at most so many bytes at once, decoded by a few threads.

    Parameters
    ----------
    service
        The service; its limits count.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._bytes = 0
        self._decoders = ThreadPoolExecutor(max(2, cores()), thread_name_prefix="scr-decode")

    async def images(self, request: Request) -> tuple[Tensor, Upload]:
        """The images of a request, decoded, and what was sent."""
        async with self._read(request) as body:
            content_type = request.headers.get("content-type", "")
            upload = await self._in_thread(lambda: read_upload(content_type, body, self.service.limits))
            shape, pixels = self.service.config.image_shape, self.service.limits.pixels
            return await self._in_thread(lambda: decode_images(upload.images, shape, pixels)), upload

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, work)

    @asynccontextmanager
    async def _read(self, request: Request) -> AsyncIterator[bytes]:
        body = bytearray()
        limits = self.service.limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for chunk in request.stream():
                    body += chunk
                    self._bytes += len(chunk)
                    if len(body) > limits.body_bytes:
                        raise Problem("too-large", f"The body is larger than {limits.body_bytes:,} bytes.")
                    if self._bytes > limits.bytes_in_flight:
                        raise Problem("busy", "Too much is being sent at once.", retry_after=1)
            yield bytes(body)
        except TimeoutError:
            raise Problem("too-slow", f"The body took longer than {limits.body_seconds:g} seconds.") from None
        except ClientDisconnect:
            raise Problem("malformed", "The request was not sent to its end.") from None
        finally:
            self._bytes -= len(body)


def create_app(service: Service, access: Access | None = None) -> FastAPI:
    """The application around a running service.

    Parameters
    ----------
    service
        The service; whoever made it closes it.
    access
        Who may ask; None: programs on this machine.
    """
    app = FastAPI(
        title="scrlearn",
        description=ABOUT,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    metrics = Metrics(service)
    app.state.service, app.state.demo = service, Demo()
    app.include_router(learning_routes(service))
    app.include_router(looking_routes(service))
    app.include_router(demo_routes(app.state.demo))
    app.include_router(tending_routes(service, metrics))
    app.include_router(page_routes(read_page(), app))
    app.add_exception_handler(Problem, _answer_problem)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    access = access or Access()
    app.add_middleware(Guard, access=access, limits=service.limits, metrics=metrics)
    _describe_token(app, access)
    return app


# -------------------------------------------------------------------- learning and asking


def learning_routes(service: Service) -> APIRouter:
    """Teach, ask, forget."""
    router = APIRouter(prefix="/v1")
    gate = Gate(service)

    @router.post("/learn", openapi_extra=_body(True), responses=_problems(400, 408, 413, 415, 503, 507))
    async def learn(request: Request, idempotency_key: Key = None, wait: Wait = 0) -> Learned:
        """Teach images. The answer means that they are on disk; they are learned soon after, or within `wait`."""
        images, upload = await gate.images(request)
        receipt = await asyncio.wrap_future(service.learn(images, upload.labels_for_each(), idempotency_key))
        learned = await _within(service.when_answering(receipt.last), wait)
        return Learned(accepted=len(images), learned=learned, **receipt._asdict())

    @router.post("/predict", openapi_extra=_body(False), responses=_problems(400, 408, 413, 415, 503))
    async def predict(request: Request) -> Predictions:
        """Ask what is on images."""
        images, _ = await gate.images(request)
        return _predictions(await asyncio.wrap_future(service.ask(images)))

    @router.post("/nearest", openapi_extra=_body(False), responses=_problems(400, 408, 413, 415, 503))
    async def nearest(request: Request, k: Neighbours = 5) -> Predictions:
        """Ask what is on images, and see the stored images that are nearest to each."""
        images, _ = await gate.images(request)
        return _predictions(await asyncio.wrap_future(service.ask(images, neighbours=k)))

    @router.delete("/classes/{label:path}", responses=_problems(404, 503, 507))
    async def forget(label: str, idempotency_key: Key = None, wait: Wait = 30) -> Forgotten:
        """Forget a class: its images in memory, in the journal and in snapshots, and its prototype."""
        receipt = await asyncio.wrap_future(service.forget(label, idempotency_key))
        erased = await _within(service.worker.when_erased(receipt.last), wait)
        name = service.check_label(label)
        return Forgotten(label=name, sequence=receipt.last, erased=erased, repeated=receipt.repeated)

    return router


async def _within(future: Future[bool], seconds: float) -> bool:
    if seconds == 0 and not future.done():
        future.cancel()
        return False
    try:
        async with asyncio.timeout(seconds or None):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        return False


def _predictions(reply: Reply) -> Predictions:
    found = [_prediction(answer, reply.replica) for answer in reply.answers]
    return Predictions(model=reply.replica.sequence, predictions=found)


def _prediction(answer: Answer, replica: Source) -> Prediction:
    return Prediction(
        label=answer.label,
        unknown=answer.label is None,
        confidence=answer.confidence,
        classes=[ClassNear(**vars(near)) for near in answer.classes],
        neighbours=[NeighbourImage(**vars(n), image=picture(replica.images[n.slot])) for n in answer.neighbours],
    )


# -------------------------------------------------------------------- looking


def looking_routes(service: Service) -> APIRouter:
    """See what was learned."""
    router = APIRouter(prefix="/v1")

    @router.get("/classes", responses=_problems())
    def classes() -> Classes:
        """The classes, in the order of their first appearance."""
        return Classes(model=service.replica.sequence, classes=[KnownClass(**known) for known in service.classes()])

    @router.get("/memory", responses=_problems())
    def memory(offset: Offset = 0, limit: Limit = 50, label: OfLabel = None) -> MemoryPage:
        """The images in memory, a page at a time."""
        replica = service.replica
        wanted = None if label is None else service.check_label(label)
        slots = [slot for slot in range(len(replica.stored)) if wanted is None or replica.name(slot) == wanted]
        shown = slots[offset : offset + limit]
        images = [StoredImage(slot=s, label=replica.name(s), image=picture(replica.images[s])) for s in shown]
        return MemoryPage(model=replica.sequence, total=len(slots), offset=offset, images=images)

    @router.get("/map", responses=_problems())
    def memory_map() -> MemoryMap:
        """The images in memory as points of a plane: near each other where their features are."""
        sequence, drawn = service.map()
        points = [
            Point(slot=slot, label=label, x=x, y=y)
            for slot, label, (x, y) in zip(drawn.slots, drawn.labels, drawn.points.tolist(), strict=True)
        ]
        return MemoryMap(model=sequence, explained=drawn.explained, points=points)

    @router.get("/state", responses=_problems())
    def state(digest: WithDigest = False) -> State:
        """How things stand: what was learned, what waits, what is wrong."""
        return State(**service.state(digest))

    return router


def demo_routes(demo: Demo) -> APIRouter:
    """See forgetting, and SCR beating it; the model that is served is no part of it."""
    router = APIRouter(prefix="/v1")

    @router.post("/demo", responses=_problems(503))
    def start_demo() -> DemoState:
        """Start the demonstration: digits, class by class, learned by SCR and by fine-tuning. One runs at a time."""
        return demo.start()

    @router.get("/demo", responses=_problems())
    def show_demo() -> DemoState:
        """How far the demonstration has come."""
        return demo.state()

    @router.delete("/demo", responses=_problems())
    def stop_demo() -> DemoState:
        """Stop the demonstration; what it has shown so far stays until the next start."""
        return demo.stop()

    return router


def tending_routes(service: Service, metrics: Metrics) -> APIRouter:
    """For whoever keeps it running."""
    router = APIRouter()

    answers: dict[int | str, dict[str, Any]] = {
        403: _problems()[403],
        503: {"description": "learning has stopped", "model": Health},
    }

    # no token is asked for here, whatever the description says of the rest
    @router.head("/healthz", include_in_schema=False)  # as some monitors ask
    @router.get("/healthz", responses=answers, openapi_extra={"security": []})
    async def healthz(response: Response) -> Health:
        """Whether the service works: 200, or 503 when learning has stopped."""
        response.status_code = 503 if service.worker.failed else 200
        return Health(status=service.status)

    @router.get("/metrics", response_class=Response, responses=_problems())
    def prometheus() -> Response:
        """Figures for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return router


def page_routes(files: dict[str, PageFile], app: FastAPI) -> APIRouter:
    """The page, and the description of the interface."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index(request: Request) -> Response:
        if INDEX in files:
            return _file(files[INDEX], request)
        return HTMLResponse(
            '<!doctype html><html lang="en"><title>scrlearn</title><p>The service is running. '
            '<a href="/docs">What it can be asked</a></p></html>'
        )

    @router.get("/page/{name}")
    async def page_file(name: str, request: Request) -> Response:
        if name not in files:
            raise Problem("not-found", "There is no such file.")
        return _file(files[name], request)

    @router.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(docs_page.render(app.openapi()), headers={"content-security-policy": docs_page.POLICY})

    return router


def _file(file: PageFile, request: Request) -> Response:
    headers = {"etag": file.etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


# -------------------------------------------------------------------- errors


def _document(problem: Problem) -> JSONResponse:
    return JSONResponse(
        problem.document(), problem.status, headers=problem.headers(), media_type="application/problem+json"
    )


async def _answer_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _document(error)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not-found", 405: "method-not-allowed"}
    problem = Problem(
        codes.get(error.status_code, "malformed"), f"{request.method} {request.url.path}: {error.detail}."
    )
    response = _document(problem)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [{"where": ".".join(map(str, e["loc"])), "message": e["msg"]} for e in error.errors()]
    first = f"{found[0]['where']}: {found[0]['message']}." if found else "The request is not valid."
    return _document(Problem("invalid", first, errors=found))


def _describe_token(app: FastAPI, access: Access) -> None:
    """Say in the OpenAPI description that a token is needed."""
    if access.token is None:
        return
    document = app.openapi()
    document.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
