"""The store on any path that fsspec knows: the same bytes, checks and failures."""

from __future__ import annotations

import logging
import uuid

import pytest
import torch

from seecause import files
from seecause.bench.plan import Store
from seecause.bench.runner import run, status
from seecause.bench.store import ShardStore
from seecause.errors import BadOption, MissingExtra
from seecause.files import is_local, place
from tests.bench.toy import worker

pytest.importorskip("upath", reason="universal-pathlib is not installed")
QUICK = {"methods": {"sobel": {}}, "metrics": ("aupr1",), "measures": {}}


@pytest.fixture(scope="module")
def bucket():
    """The URL of a bucket of a local S3 server."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel("ERROR")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    keys = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    keys["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("runs")
        yield "s3://runs"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request, tmp_path):
    name = uuid.uuid4().hex
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{name}"
    return f"file://{tmp_path}/{name}" if request.param == "file" else f"memory://{name}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_damage_and_failures_are_noticed_anywhere(url, monkeypatch):
    work = worker(**QUICK)
    store = Store(place(url))
    assert run(store, work).complete
    first, second, third = work.plan.shards
    file = store.file(first.id, "parquet")
    file.write_bytes(file.read_bytes()[:-3])
    store.file(second.id, "safetensors").unlink()
    state = status(url)
    assert state.done == 1 and set(state.damaged) == {first.id, second.id}
    store.file(third.id, "json").unlink()

    def broken(worker, shard):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr("seecause.bench.runner.run_shard", broken)
        assert set(run(store, work).failed.values()) == {"none left"}
    assert set(status(url).failed) == {shard.id for shard in work.plan.shards}
    assert run(store, work).complete and status(url).failed == {}


def test_a_folder_is_a_path_whatever_it_is_called(tmp_path):
    assert is_local(place(f"file://{tmp_path}")) and place(str(tmp_path)) == tmp_path
    assert is_local(place("s3/run")) and not is_local(place("memory://x"))


@pytest.mark.parametrize("url", ["nosuch://bucket/run", "gs://bucket/run"])
def test_a_place_that_cannot_be_opened_says_what_to_install_or_give(url, monkeypatch):
    with pytest.raises(BadOption, match="fsspec can open"):
        place(url)
    monkeypatch.setitem(__import__("sys").modules, "upath", None)
    with pytest.raises(MissingExtra, match=r"seecause\[cluster\]"):
        place(url)
    assert files.place("plain") is not None


class StrangeError(Exception):
    """As botocore's: of no kind that Python knows."""


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/run", "zip://x/run", "file://tmp/run"])
def test_a_place_that_cannot_be_written_is_refused(url):
    with pytest.raises(BadOption, match="URL"):
        place(url)


def test_a_file_url_is_decoded(tmp_path):
    assert place(f"file://{tmp_path}/a%20b") == tmp_path / "a b"


def test_errors_of_a_store_are_told_in_words_and_are_not_unfinished_work(monkeypatch):
    url = f"memory://{uuid.uuid4().hex}"
    store = ShardStore(place(url), "toy")
    store.save("a", tensors={"x": torch.ones(2)})
    kind = type(store.folder.fs)
    assert store.read("b") is None

    def broken(self, *_, **__):
        raise StrangeError("Unable to locate credentials")

    def returned(self, paths, **_):
        return dict.fromkeys(paths, StrangeError("Could not connect"))

    with monkeypatch.context() as patch:
        patch.setattr(kind, "cat", returned)
        with pytest.raises(OSError, match="StrangeError: Could not connect"):
            store.condition(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(kind, "pipe_file", broken)
        patch.setattr(kind, "open", broken)
        with pytest.raises(OSError, match="StrangeError: Unable to locate"):
            store.save("c", tensors={"x": torch.ones(2)})
    with monkeypatch.context() as patch:
        patch.setattr(kind, "info", broken)
        patch.setattr(kind, "exists", broken)
        with pytest.raises(BadOption, match="StrangeError: Unable to locate credentials"):
            place(url)


def test_one_shard_is_read_without_listing_all(monkeypatch):
    store = ShardStore(place(f"memory://{uuid.uuid4().hex}"), "toy")
    for name in "abcdefgh":
        store.save(name, tensors={"x": torch.ones(2)})
    listed = []
    kind = type(store.folder.fs)
    plain = kind.ls
    monkeypatch.setattr(kind, "ls", lambda *a, **k: listed.append(a) or plain(*a, **k))
    assert store.read("c") is not None and store.read("z") is None
    assert listed == []
    assert len(store.condition("abcdefgh").metadata) == 8 and listed
