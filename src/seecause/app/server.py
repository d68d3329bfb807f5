"""Routes of `seecause serve`. A request is read, checked and queued here; panels compute.

POST   /api/session                 a new session
POST   /api/pictures                the bytes of an image
POST   /api/run/PANEL/ACTION        run a job: its reply, or its progress
GET    /api/jobs/ID                 the reply or progress of a job
DELETE /api/jobs/ID                 cancel it
GET    /api/files/ID                what a job made for download
GET    /api/results/ID              a result that a link names: its request, its reply or progress
POST   /api/data                    a ZIP with a dataset
GET    /runs/ID                     a page of a result, in a sandbox
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from seecause.app.given import ZIP_BYTES, add_zip
from seecause.app.jobs import Job, Progress, Refused, Reply
from seecause.app.middleware import AccessMiddleware
from seecause.app.panels import Action, PanelRequest, find_panel, panels
from seecause.app.panels.runs import find_pages, find_runs
from seecause.app.sessions import Record, Session, Sessions
from seecause.app.state import (
    UPLOAD_BYTES,
    ActionContext,
    ServerState,
    hide_folders,
    picture_name,
)
from seecause.background.audit import ENOUGH
from seecause.errors import BadImage, SeecauseError, Stopped, UnknownName
from seecause.files import digest_json

log = logging.getLogger(__name__)
REQUEST_BYTES = 1 << 20
WAIT = 0.8  # seconds that a request waits for its job, so that quick ones need one round trip
DECODING = 2  # images that are decoded at once
SESSION, SLOT, NAME = "x-seecause-session", "x-seecause-slot", "x-seecause-name"


def create_app(state: ServerState, *, token: str | None = None, port: int = 0) -> AccessMiddleware:
    """The application with access control."""
    sessions = Sessions(share=state.share)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()
        sessions.close()

    # the pages that FastAPI makes load scripts from elsewhere
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(SeecauseError, _tell_error)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell_error)
    _add_pages(app, state, sessions)
    _add_pictures(app, state, sessions)
    _add_jobs(app, state, sessions)
    return AccessMiddleware(app, token=token, port=port)


def _add_pages(app: FastAPI, state: ServerState, sessions: Sessions) -> None:
    """Routes that are the same for all users: the page, served models, pages of results."""
    # the templates hold the page's style
    folders: list[Any] = [("seecause.app", "static"), ("seecause.report", "templates")]
    app.mount("/static", StaticFiles(packages=folders))
    hello = {
        "panels": [panel.facts() for panel in panels().values()],
        "upload_bytes": UPLOAD_BYTES,
        "share": state.share,
        "enough": ENOUGH,
    }

    @app.get("/")
    async def page() -> Response:
        return FileResponse(Path(__file__).with_name("static") / "index.html")

    @app.get("/runs/{id}")
    async def run_page(id: str) -> Response:
        path = find_pages(find_runs(state.runs)).get(id)
        if path is None or path.is_symlink() or not path.is_file():
            raise HTTPException(404)
        return FileResponse(path, media_type="text/html")

    @app.get("/api/hello")
    async def greet(request: Request) -> Response:
        own = sessions.find(request.headers.get(SESSION, ""))
        models = state.visible(own.id if own else "").values()
        samples = [
            {"id": id, "name": picture_name(text)} for id, text in list(state.samples.items())
        ]
        here = {
            "models": [served.facts() for served in models],
            "data": [*state.datasets(), *(own.data if own else ())],
        }
        return JSONResponse({**hello, **here, "samples": samples})

    @app.get("/api/samples/{id}")
    async def sample(id: str, request: Request) -> Response:
        own = sessions.find(request.headers.get(SESSION, ""))
        uploaded = None if own is None else own.picture(id)
        if uploaded is None and id not in state.samples:
            raise HTTPException(404)
        picture = uploaded or await asyncio.to_thread(state.sample, id)
        return JSONResponse(picture.facts())


def _add_pictures(app: FastAPI, state: ServerState, sessions: Sessions) -> None:
    """Routes of sessions, uploads and downloads."""
    decoding, unpacking = asyncio.Semaphore(DECODING), asyncio.Semaphore(1)

    @app.post("/api/session")
    async def session() -> Response:
        return JSONResponse({"session": sessions.open().id})

    @app.post("/api/pictures")
    async def upload(request: Request) -> Response:
        own = _session(sessions, request)
        content = await _body(request, UPLOAD_BYTES, "your image")
        name = _name_of(request.headers.get(NAME, ""))
        async with decoding:
            picture = await asyncio.to_thread(state.upload, content, name)
        own.add_picture(picture)
        return JSONResponse(picture.facts())

    @app.post("/api/data")
    async def add_data(request: Request) -> Response:
        own = _session(sessions, request)
        name = _name_of(request.headers.get(NAME, ""))
        async with unpacking:
            content = await _body(request, ZIP_BYTES, "your ZIP")
            return JSONResponse(await asyncio.to_thread(add_zip, own, content, name))

    @app.get("/api/files/{id}")
    async def download(id: str, request: Request) -> Response:
        own = _session(sessions, request)
        file = own.file(id)
        if file is None or not file[1].is_file():
            raise HTTPException(404)
        safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", file[0])
        return FileResponse(file[1], media_type="application/octet-stream", filename=safe)


def _add_jobs(app: FastAPI, state: ServerState, sessions: Sessions) -> None:
    """Routes of jobs."""

    @app.post("/api/run/{panel}/{action}")
    async def run(panel: str, action: str, request: Request) -> Response:
        own = _session(sessions, request)
        function, kind = find_panel(panel).find(action)
        asked = kind.read(await _body(request, REQUEST_BYTES, "the request"))
        slot = request.headers.get(SLOT, "")[:64]
        if function not in find_panel(panel).kept:
            return await _state(own, _submit(state, own, function, asked, slot))
        record = _record(state, own, panel, action, asked, slot)
        return await _state(own, record.job, result=record.id)

    @app.get("/api/results/{id}")
    async def result(id: str, request: Request) -> Response:
        own = _session(sessions, request)
        record = own.result(id)
        if record is None or not record.usable:
            raise HTTPException(404)
        facts = {"panel": record.panel, "action": record.action, "request": record.request}
        return await _state(own, record.job, result=id, **facts)

    @app.get("/api/jobs/{id}")
    async def progress(id: str, request: Request) -> Response:
        own = _session(sessions, request)
        return await _state(own, own.job(id)[0])

    @app.delete("/api/jobs/{id}")
    async def cancel(id: str, request: Request) -> Response:
        own = _session(sessions, request)
        job, queue = own.job(id)
        queue.cancel(job)
        return JSONResponse({"job": id, "state": "cancelled"})


def _record(
    state: ServerState, own: Session, panel: str, action: str, asked: PanelRequest, slot: str
) -> Record:
    """The result of a request; it is computed once, however often and by whomever it is asked."""
    request = asked.model_dump(mode="json")
    private = own.owns(request, state.served(request["model"], own.id).owner)
    id = digest_json([panel, action, request, own.id if private else ""])
    record = own.result(id)
    if record is None or not record.usable:
        job = _submit(state, own, find_panel(panel).find(action)[0], asked, slot)
        record = Record(id, panel, action, request, job, time.time())
    own.keep(record, private=private)
    return record


def _submit(state: ServerState, own: Session, action: Action, request: Any, slot: str) -> Job:
    key = getattr(request, "model", None)
    served = None if key is None else state.served(key, own.id)
    queue = state.queue if served is None else served.queue

    def work(progress: Progress) -> Reply:
        with nullcontext() if served is None else served.borrow() as view:
            return action(ActionContext(state, own, cast(Any, served), progress, view), request)

    job = queue.submit(Job(own.id, work, slot=slot))
    own.add_job(job, queue)
    return job


async def _state(own: Session, job: Job, **facts: Any) -> Response:
    """The state of a job, with `facts`, after waiting a moment for its end. A job that was stopped
    is over for the client, though it may still run to its next block."""
    waiting = asyncio.wrap_future(job.future)
    # the failure of a job that ends after this request is reported by the next one, not logged
    waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.wait([waiting], timeout=WAIT)
    if not job.future.done() and not job.stopped:
        state = "running" if job.running else "waiting"
        progress = {"share": job.share, "words": job.words}
        return JSONResponse({"job": job.id, "state": state, **progress, **facts})
    own.jobs.pop(job.id, None)
    failure = job.future.exception() if job.future.done() else Stopped()
    if isinstance(failure, Stopped):
        return JSONResponse({"job": job.id, "state": "cancelled"})
    if failure is not None:
        words, status = error_words(failure)
        return JSONResponse({"job": job.id, "state": "failed", "error": words}, status_code=status)
    done = {"job": job.id, "state": "done", "answer": job.future.result()}
    return JSONResponse({**done, **facts})


def error_words(failure: BaseException) -> tuple[str, int]:
    """The error message for the user and the HTTP status. Details of unexpected errors are logged
    only."""
    if isinstance(failure, SeecauseError):
        words = hide_folders(" ".join(str(failure).split()))[:600]
        usual = 404 if isinstance(failure, UnknownName) else 400
        return words, failure.status if isinstance(failure, Refused) else usual
    reference = secrets.token_hex(4)
    log.error("request failed, reference %s", reference, exc_info=failure)
    return f"something went wrong on the server; its log says what, reference {reference}.", 500


async def _tell_error(_: Request, failure: Exception) -> Response:
    words, status = error_words(failure)
    return JSONResponse({"error": words}, status_code=status)


async def _tell_http(_: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    words = {404: "there is nothing here.", 405: "this cannot be asked that way."}
    text = words.get(failure.status_code, "this cannot be answered.")
    return JSONResponse({"error": text}, status_code=failure.status_code)


def _session(sessions: Sessions, request: Request) -> Session:
    return sessions.get(request.headers.get(SESSION, ""))


async def _body(request: Request, most: int, what: str) -> bytes:
    """The body, if it is not too long."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > most:
            raise BadImage(what, f"more than {most >> 20} MB", "make it smaller and try again")
    return bytes(content)


def _name_of(header: str) -> str:
    """The name of an uploaded file: its last part, printable and short."""
    last = re.split(r"[/\\]", unquote(header))[-1]
    return "".join(letter for letter in last if letter.isprintable())[:80] or "your-image.png"
