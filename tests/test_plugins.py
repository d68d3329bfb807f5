"""Entry points of other packages: modules register when imported, callables are called, and one
that breaks is named and left out."""

import pytest

from seecause.attribution import registry
from seecause.attribution.attention import gae
from seecause.registry import plugins
from tests.plugins import installed, write_package

MODULE = "calls = []\ndef register():\n    calls.append('registered')\ndef scores(model): ...\n"


def test_each_kind_of_plugin_registers_once(tmp_path, monkeypatch):
    points = {
        "seecause.tests:whole": "kinds_beside",
        "seecause.tests:call": "kinds_beside:register",
    }
    points["seecause.tests:decorated"] = "kinds_beside:scores"
    write_package(tmp_path, {"kinds_beside.py": MODULE}, points)
    with installed(tmp_path, monkeypatch):
        plugins("seecause.tests")
        plugins("seecause.tests")
        found = plugins("seecause.tests")
    assert list(found) == ["call", "decorated", "whole"]
    assert found["whole"].calls == ["registered"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("raise RuntimeError('no such luck')", "no such luck"), ("def add():\n    1 / 0", "division")],
)
def test_a_broken_plugin_is_named_and_the_others_load(tmp_path, monkeypatch, text, reason):
    name = f"broken_{reason.split()[0]}"
    files = {f"{name}.py": text, f"whole_{name}.py": "loaded = True"}
    where = f"{name}:add" if "add" in text else name
    points = {"seecause.tests:bad": where, "seecause.tests:good": f"whole_{name}"}
    write_package(tmp_path, files, points)
    with installed(tmp_path, monkeypatch):
        with pytest.warns(UserWarning, match=f"'bad' of seecause.tests .*{reason}"):
            plugins("seecause.tests")
        assert plugins("seecause.tests")["good"].loaded


def test_a_method_of_a_plugin_keeps_its_name(tmp_path, monkeypatch):
    text = (
        "from seecause.attribution.registry import method\n"
        "@method('gae', forwards='1', needs='logits')\n"
        "def other_gae(model, images, target): ...\n"
    )
    write_package(tmp_path, {"gae_beside.py": text}, {"seecause.methods:gae": "gae_beside"})
    registered = registry.METHODS["transformer"].entries
    monkeypatch.setitem(registered, "gae", registry.find("gae"))
    with installed(tmp_path, monkeypatch):
        with pytest.warns(match="method 'gae' is now that of another package"):
            assert registry.find("gae").run.__name__ == "other_gae"
        registry.method("gae", forwards="1", needs="logits")(gae)  # its file, imported later
        assert registry.methods()["gae"].run.__name__ == "other_gae"
