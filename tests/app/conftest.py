"""One server state with the embedded models for all tests of the page, and one browser."""

import os
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from seecause.app.server import create_app
from seecause.app.sessions import Sessions
from seecause.app.state import ActionContext, open_state
from seecause.cli.serve import AUDITED, bound_socket
from seecause.cli.shared import result_folder
from seecause.report import Section, table, write_page

MODELS = [
    "builtin:critters-vit", "builtin:critters-biased", "builtin:critters-ifam",
    "builtin:critters-llava",
]  # fmt: skip
DATA = list(AUDITED)


@pytest.fixture(scope="session")
def state():
    opened = open_state(MODELS, data=DATA)
    yield opened
    opened.close()


def context_of(state, key=None):
    """A context of a model in a fresh session; its progress is not recorded."""
    served = state.models[key] if key else None
    view = served and served.view
    return ActionContext(state, Sessions().open(), served, lambda share, words="": None, view)


@pytest.fixture
def context(state):
    return context_of(state, "critters-vit")


@pytest.fixture
def client(address):
    with httpx.Client(base_url=address, timeout=60) as opened:
        yield opened


@pytest.fixture
def headers(client):
    """Of a session of its own."""
    return {"x-seecause-session": client.post("/api/session").json()["session"]}


@contextmanager
def serving(app):
    """The application on a free port, in a thread; gives its address."""
    listener = bound_socket("127.0.0.1", 0)
    config = uvicorn.Config(app, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=10)


HOSTILE = """<!doctype html><title>hostile</title><p id="read">waiting</p><script>
let parent = "reached";
try { window.parent.document.title; } catch { parent = "no parent"; }
fetch("/api/hello").then(() => "reached", () => "no server").then((server) => {
  document.querySelector("#read").textContent = `${parent}, ${server}, ${window.origin}`;
});
</script>"""


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """A folder of results: a page of ours, one with a script that asks the server, and things that
    are none."""
    folder = tmp_path_factory.mktemp("runs") / "results"
    for name in ("ours", "hostile", "notes"):
        (folder / name).mkdir(parents=True)
    facts = {"command": "lvlm tokens", "model": "builtin:critters-llava", "image": "/home/me/a.png"}
    with result_folder(folder / "ours", facts) as draft:
        sections = [Section("What was found", table([("seven", "7")]))]
        write_page(draft / "index.html", "A page of ours", sections)
    (folder / "hostile" / "report.html").write_text(HOSTILE)
    (folder / "hostile" / "more.html").write_text("<p>more")
    (folder / "notes" / "secret.html").write_text("not a result")
    (folder / "linked").symlink_to(folder / "notes")
    os.utime(folder / "hostile" / "report.html", (1e9 + 1, 1e9 + 1))
    return folder


@pytest.fixture(scope="session")
def address(results):
    """Of a server with models of its own: its workers switch heads off while tests compute."""
    state = open_state(MODELS, data=DATA, runs=[results])
    with serving(create_app(state)) as where:
        yield where
    state.close()


@pytest.fixture
def visit(browser, address):
    """Open the page as a new user: `visit(hash)` gives the page. Afterwards nothing may have gone
    wrong: no message on the console but those with the words of `visit.expected` (a console speaks
    late, so they cannot be cleared by a test), no request to elsewhere."""
    contexts, heard = [], []

    def opened(hash="", **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on(
            "request",
            lambda request: (
                heard.append(request.url)
                if not request.url.startswith((address, "data:", "blob:"))
                else None
            ),
        )
        page.goto(f"{address}/{hash}")
        return page

    opened.heard, opened.expected = heard, None
    yield opened
    for context in contexts:
        context.close()
    assert [words for words in heard if not opened.expected or opened.expected not in words] == []
