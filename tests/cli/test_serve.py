"""`seecause serve`: what it opens, refuses, and where it listens."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from seecause.cli import app, serve
from seecause.errors import BadOption
from tests.cli.spies import Reached, reach


def invoke(line: str):
    return CliRunner().invoke(app, line.split())


@pytest.fixture
def served(opened, monkeypatch):
    """Up to the place where `serve` listens: what the state was opened with."""
    shops = []
    monkeypatch.setattr("seecause.app.state.open_state", lambda m, **o: shops.append((m, o)))
    monkeypatch.setattr(serve, "_listen", reach)

    def call(line):
        done = invoke(f"{line} --port 0")
        assert isinstance(done.exception, Reached), done.output
        return shops.pop()

    return call


def test_serve_offers_data_where_embedded_models_are(served, monkeypatch):
    assert served("serve --model timm:x")[1]["data"] == {}
    audited = list(serve.AUDITED)
    both = served("serve --model timm:x --model builtin:critters-vit")
    assert both[0] == ["timm:x", "builtin:critters-vit"] and list(both[1]["data"]) == audited
    models, options = served("serve")
    assert models == list(serve.EMBEDDED) and options["samples"] == []
    assert (options["weights"], options["reading"], options["runs"]) == (None, {}, {})
    monkeypatch.setattr("seecause.lvlm.load", lambda name, **options: (name, options))
    loaded = served("serve --device cpu --dtype float64")[1]["load_lvlm"]("hf:y")
    assert loaded == ("hf:y", {"device": "cpu", "dtype": "float64"})


def test_serve_leaves_one_thread_to_talk_where_there_are_several(served, monkeypatch):
    threads = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    for count, expected in ((1, []), (2, [1]), (8, [1, 7])):
        monkeypatch.setattr("torch.get_num_threads", lambda count=count: count)
        served("serve")
        assert threads == expected


def test_serve_refuses_what_it_cannot_use(opened, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    for line, words in (
        (f"--runs {tmp_path}/here --runs {tmp_path}/file", f"{tmp_path}/file"),
        ("--model timm:x --model timm:y --weights w", "--weights='w'"),
        ("--weights w", "one --model beside it"),
        ("--model timm:x --model timm:y --mean 0.5", "--mean=(0.5"),
    ):
        done = invoke(f"serve {line}")
        assert done.exit_code == 2 and words in done.output, done.output


def test_a_port_that_is_taken_is_named_before_models_are_loaded(monkeypatch):
    monkeypatch.setattr("seecause.app.state.open_state", reach)
    with serve.bound_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        done = invoke(f"serve --port {port}")
    assert done.exit_code == 2 and f"127.0.0.1:{port}" in done.output, done.output


def test_a_socket_listens_or_says_why_not():
    with serve.bound_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert listener.family == socket.AF_INET
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        socket.create_connection(("127.0.0.1", port)).close()  # it listens
        with pytest.raises(BadOption, match=rf"127.0.0.1:{port}.*in use"):
            serve.bound_socket("127.0.0.1", port)
    with pytest.raises(BadOption, match="0-65535"):
        serve.bound_socket("127.0.0.1", 70000)
    families = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket", lambda family: families.append(family) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            serve.bound_socket("::1", 0)
    assert families == [socket.AF_INET6]
