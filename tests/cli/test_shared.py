"""What commands share: values of options, folders, JSON, where to listen and compute."""

import socket

import pytest

from seecause.cli.serve import bound_socket
from seecause.cli.shared import (
    by_name,
    counting,
    names,
    pick_device,
    plain,
    value_of,
)
from seecause.errors import BadOption
from tests.cli.calls import invoke


def test_words_become_values():
    words = ("3", "0.5", "1,8", "true", "none", "None", "patched", "a=b")
    values = [3, 0.5, (1, 8), True, "none", None, "patched", "a=b"]
    assert [value_of(word) for word in words] == values
    assert by_name(["a.b.c=1", "d=x"]) == {"a.b": {"c": 1}, "": {"d": "x"}}
    assert names(" a, b,a,,") == ("a", "b")
    with pytest.raises(BadOption, match="KEY=VALUE"):
        by_name(["tail"])


def test_json_holds_no_numbers_that_are_none():
    value = {1: float("nan"), "a": (float("inf"), True, None), "b": ("x",)}
    assert plain(value) == {"1": None, "a": [None, True, None], "b": ["x"]}


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr("seecause.cli.shared.EVERY", 0.0)
    with counting("images", 3) as advance:
        advance(1)
        advance(2)
    assert capsys.readouterr().err.splitlines() == [
        "images: 1 of 3, about 0 s left",
        "images: 3 of 3, about 0 s left",
    ]
    with counting("images", 3, quiet=True) as advance:
        advance(3)
    assert capsys.readouterr().err == ""


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == "cpu"
    with pytest.raises(BadOption, match="--device cpu"):
        pick_device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert pick_device("auto") == "cuda" and pick_device("cpu") == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("auto") == "cuda:3"


def test_a_socket_listens_or_says_why_not():
    with bound_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # it listens
        with pytest.raises(BadOption, match=rf"127.0.0.1:{port}.*in use"):
            bound_socket("127.0.0.1", port)
        done = invoke("serve", "--port", port)  # before models are loaded
        assert done.exit_code == 2 and f"127.0.0.1:{port}" in done.stderr
