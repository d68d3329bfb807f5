"""Requests: who may ask, what is refused, and that answers say nothing they should not."""

import io
import json
import random

import httpx
import pytest
from PIL import Image

from seecause.app.panels import repair
from seecause.app.server import create_app, error_words
from seecause.app.state import named_data, picture_name, public_spec
from seecause.errors import BadImage
from tests.app.conftest import serving
from tests.app.test_runs import PAGE

ON = {"model": "critters-vit", "picture": "s1"}


def run(client, headers, action="look", panel="explain", **request):
    return client.post(f"/api/run/{panel}/{action}", json={**ON, **request}, headers=headers)


def finished(client, headers, answer):
    """The state of a job when it is over."""
    while answer.json().get("state") in ("waiting", "running"):
        answer = client.get(f"/api/jobs/{answer.json()['job']}", headers=headers)
    return answer.json()


def png(size=(120, 90), color=(200, 40, 10)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def test_a_job_gives_its_answer(client, headers):
    answer = finished(client, headers, run(client, headers))
    assert answer["state"] == "done" and answer["answer"]["name"] == "critters:clean:test#1"


def test_a_brush_is_answered_while_an_audit_runs(client, headers, monkeypatch):
    def endless(model, pictures, **_):
        while True:
            model(pictures.images)

    monkeypatch.setattr(repair, "audit_background", endless)
    other = {"x-seecause-session": client.post("/api/session").json()["session"]}
    request = {"model": "critters-vit", "data": "critters:certified:test", "limit": 8}
    long = client.post("/api/run/repair/audit", json=request, headers=other).json()["job"]
    for patches in ([52], [52, 53], []):
        answer = finished(client, headers, run(client, headers, "brush", patches=patches))
        assert answer["state"] == "done" and answer["answer"]["patches"] == len(patches)
    assert client.get(f"/api/jobs/{long}", headers=other).json()["state"] == "running"
    assert client.delete(f"/api/jobs/{long}", headers=other).json()["state"] == "cancelled"
    ended = client.get(f"/api/jobs/{long}", headers=other)
    assert finished(client, other, ended)["state"] == "cancelled"


def test_the_page_may_load_nothing_from_elsewhere(client):
    page = client.get("/")
    assert (
        page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    )
    assert "http" not in page.text.replace("http-equiv", "")
    assert client.get("/openapi.json").status_code == 404
    assert client.get("/docs").status_code == 404


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("host", "evil.example", 421),
        ("host", "127.0.0.1.evil.example:8321", 421),
        ("origin", "http://evil.example", 403),
        ("origin", "null", 403),
        ("origin", "http://[bad", 403),
        ("sec-fetch-site", "cross-site", 403),
    ],
)
def test_pages_of_other_sites_are_refused(client, headers, header, value, status):
    answer = client.post("/api/run/explain/look", json=ON, headers={**headers, header: value})
    assert answer.status_code == status and "error" in answer.json()


def test_beyond_this_machine_a_token_is_needed(state):
    own = {"host": "box.example:9"}
    with (
        serving(create_app(state, token="secret", port=9)) as where,
        httpx.Client(base_url=where, headers=own) as client,
    ):
        _check_token(client)


def _check_token(client):
    assert client.get("/").status_code == client.get("/api/hello").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/?token=%ff").status_code == 401
    first = client.get("/?token=secret")
    assert first.status_code == 303 and first.headers["location"] == "/"
    assert "httponly" in first.headers["set-cookie"].lower()
    assert "samesite=lax" in first.headers["set-cookie"].lower()
    assert client.get("/api/hello").status_code == 200
    client.cookies.clear()
    others = {"cookie": 'other={"a": [1, 2]}; b@d=ü; seecause-9=secret'.encode()}
    assert client.get("/api/hello", headers=others).status_code == 200
    assert client.get("/api/hello", headers={"cookie": "x-seecause-9=secret"}).status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.2:8321", "localhost:8321", "[::1]:8321", "LOCALHOST"])
def test_every_address_of_this_machine_may_be_asked(client, host):
    assert client.get("/api/hello", headers={"host": host}).status_code == 200


def test_a_session_is_needed(client):
    assert run(client, {}).status_code == 440
    assert run(client, {"x-seecause-session": "guess"}).status_code == 440


def test_two_users_do_not_see_each_others_pictures_or_jobs(client, headers):
    other = {"x-seecause-session": client.post("/api/session").json()["session"]}
    mine = client.post("/api/pictures", content=png(), headers=headers).json()
    assert finished(client, headers, run(client, headers, picture=mine["id"]))["state"] == "done"
    theirs = finished(client, other, run(client, other, picture=mine["id"]))
    assert theirs["state"] == "failed" and "no longer here" in theirs["error"]
    job = run(client, headers, "evidence").json()["job"]
    assert client.get(f"/api/jobs/{job}", headers=other).status_code == 404
    assert client.delete(f"/api/jobs/{job}", headers=other).status_code == 404


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"no picture at all", "not an image"),
        (png()[:60], "damaged"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image"),
        (png((1, 1)), "too small"),
        (png((3, 900)), "too long and thin"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * (21 << 20), "more than 20 MB"),
    ],
)
def test_a_wrong_file_gives_a_message(client, headers, content, words):
    answer = client.post("/api/pictures", content=content, headers=headers)
    assert answer.status_code == 400 and words in answer.json()["error"]


def test_a_huge_picture_is_refused_by_its_header(client, headers):
    file = io.BytesIO()
    Image.new("1", (8000, 6000)).save(file, "PNG")
    answer = client.post("/api/pictures", content=file.getvalue(), headers=headers)
    assert answer.status_code == 400 and "million pixels" in answer.json()["error"]


def test_names_of_files_lose_their_folders(client, headers):
    named = {**headers, "x-seecause-name": "..%2F..%2Fetc%2Fpasswd%0A.png"}
    assert client.post("/api/pictures", content=png(), headers=named).json()["name"] == "passwd.png"


def test_words_of_errors_hold_no_path():
    words, status = error_words(BadImage("/home/me/secret/cat.png", "no such file"))
    assert status == 400 and words.startswith("cat.png: no such file") and "/home" not in words
    words, status = error_words(RuntimeError("at /home/me/x.py line 3"))
    assert status == 500 and "/home" not in words and "RuntimeError" not in words


def test_data_is_named_without_folders(tmp_path):
    last, clean = tmp_path.name, "critters:clean:test"
    specs = [f"folder:{tmp_path}", f"pairs:{tmp_path}:{tmp_path}", clean, f"folder:{tmp_path}"]
    names = named_data(specs)
    assert list(names) == [f"folder:{last}", f"pairs:{last}:{last}", clean, f"folder:{last}-2"]
    assert list(names.values()) == specs


def test_models_and_pictures_are_named_without_folders(tmp_path):
    assert picture_name("pets:/home/me/pets#3") == "pets:pets#3"
    assert picture_name("/home/me/cat.png") == "cat.png"
    assert picture_name("critters:clean:test#3") == "critters:clean:test#3"
    assert public_spec(str(tmp_path)) == tmp_path.name
    assert public_spec(f"hf:{tmp_path}") == f"hf:{tmp_path.name}"
    assert public_spec("hf:google/vit-base-patch16-224") == "hf:google/vit-base-patch16-224"


def bad_requests(count, seed=0):
    """Requests that are wrong in every way that came to mind: method, path, headers, body."""
    draw = random.Random(seed)
    paths = [
        "/", "/static/main.js", "/static/../server.py", "/static/%2e%2e/%2e%2e/pyproject.toml",
        "/static/..%5c..%5cserver.py", "/api/samples/../../etc/passwd", "/api/samples/s99",
        "/api/files/../../etc/passwd", "/api/jobs/x", "/api/run/explain/look",
        "/api/run/explain/brush", "/api/run/explain/pair", "/api/run/explain/__class__",
        "/api/run/registry/look", "/api/run/../look", "/api/pictures", "/api/session",
        "/etc/passwd", "//etc/passwd", "/api/run/explain/copy", "/api/run/explain/pair",
        "/api/hello/..", "/api/run/swap/exchange", "/api/run/swap/copy", "/api/run/heads/switch",
        "/api/run/heads/export", "/api/run/repair/audit", "/api/run/repair/export",
        "/api/run/parts/look", "/api/run/ask/hear", "/api/run/runs/copy", "/runs/r0p0",
        "/runs/../../etc/passwd", "/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    ]  # fmt: skip
    values = [
        None, "", "s1", "../../etc/passwd", "/etc/passwd", -1, 10**30, 1.5, True, [], [[]], {},
        [10**9], [-1], "caap", "__import__('os')", "\u0000", "é" * 200, float("nan"),
        list(range(300)),
    ]  # fmt: skip
    fields = ["model", "picture", "patches", "method", "target", "blank", "tail", "first", "last"]
    fields += ["methods", "one", "other", "extra", "__proto__", "a", "b", "down", "off", "operator"]
    fields += ["data", "masks", "limit", "remedy", "out", "question", "blind", "run"]
    for _ in range(count):
        request = {**ON, **{draw.choice(fields): draw.choice(values) for _ in range(3)}}
        body = json.dumps(request).encode()
        damaged = bytes(draw.randrange(256) for _ in range(draw.randrange(80)))
        content = draw.choice(
            [body, body, body, body[: draw.randrange(len(body))], damaged, b"[" * 9999]
        )
        yield (
            draw.choice(["POST", "POST", "POST", "GET", "PUT", "DELETE"]),
            draw.choice(paths),
            content,
        )


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_bad_requests_are_answered_in_words(client, headers, count):
    """Benchmarks/app_load.py sends as many to a server of its own."""
    for method, path, content in bad_requests(count, seed=count):
        answer = client.request(method, path, content=content, headers=headers)
        assert answer.status_code < 500, (method, path, content, answer.text)
        assert "Traceback" not in answer.text and "root:" not in answer.text
        assert "/src/seecause" not in answer.text
    assert finished(client, headers, run(client, headers))["state"] == "done"


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/samples/s0", f"/runs/{PAGE}"])
def test_a_browser_asks_again_for_what_another_server_names_alike(client, path):
    """The next server at this address has other samples and pages under these names."""
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers.get_list("cache-control") == ["no-cache"]
