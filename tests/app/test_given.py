"""Doubt and Test give the numbers of the library; what is private stays with its session."""

import io
import zipfile

import httpx
import pytest
import torch

import seecause as sc
from seecause.app.given import add_zip
from seecause.app.panels import doubt, test
from seecause.app.panels.doubt import Compare
from seecause.app.panels.test import Place
from seecause.app.server import create_app
from seecause.app.sessions import Sessions
from seecause.app.state import open_state
from seecause.background.images import LabelledImages
from seecause.errors import SeecauseError
from seecause.metrics.pixels import image_scorer
from tests.app.conftest import context_of, serving
from tests.app.test_server import finished, png

ON = {"model": "critters-biased", "picture": "s0"}


@pytest.fixture
def context(state):
    return context_of(state, "critters-biased")


def test_maps_are_scored_by_erasing_their_highest_tenth(context, capsys):
    reply = doubt.compare(context, Compare(**ON))
    model, image = context.model, context.image("s0")
    scorer = image_scorer(model, image)
    for drawn in reply["maps"]:
        cells = sc.attribute(model, image, method=drawn["method"]).maps[0].flatten()
        gone = torch.zeros(144, dtype=torch.bool)
        gone[cells.topk(14).indices] = True
        expected = scorer.plain - scorer.drops(gone.view(1, 1, 12, 12))[0, 0]
        assert drawn["after"] == pytest.approx(float(expected), abs=1e-5)
    assert reply["best"] == min(reply["maps"], key=lambda drawn: drawn["after"])["method"]
    erased = next(bar for bar in reply["erased"]["answers"] if bar["name"] == "quillow")
    best = min(drawn["after"] for drawn in reply["maps"])
    assert erased["probability"] == pytest.approx(best, abs=1e-5)
    exec(doubt.copy(context, Compare(**ON))["python"], {})
    printed = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert printed == pytest.approx([drawn["after"] for drawn in reply["maps"]], abs=1e-5)


def test_dependence_on_the_background_is_bir_and_brushed_objects_replace_the_mask(context):
    reply = test.place(context, Place(**ON))
    data = LabelledImages(context.image("s0"), masks=context.mask("s0"))
    gains = sc.background.information_gains(context.model, data)
    assert reply["dependence"] == pytest.approx(float(gains.bir[0]), abs=1e-5)
    assert reply["truth"] == "quillow" and len(reply["tiles"]) == 8
    every = test.place(context, Place(**ON, brushed=tuple(range(144))))
    assert all(tile["bad"] and tile["answer"] == "quillow" for tile in every["tiles"])


def test_a_result_is_shared_unless_it_names_something_private(client, headers):
    other = {"x-seecause-session": client.post("/api/session").json()["session"]}
    asked = {"model": "critters-biased", "data": "critters:certified:test", "limit": 8}
    first = client.post("/api/run/repair/audit", json=asked, headers=headers).json()
    where = f"/api/results/{first['result']}"
    reply = finished(client, headers, client.get(where, headers=headers))
    again = client.post("/api/run/repair/audit", json=asked, headers=other).json()
    assert (again["result"], again["answer"]) == (first["result"], reply["answer"])
    shown = client.get(where, headers=other).json()
    assert shown["request"] == {**asked, "masks": "data"} and shown["state"] == "done"
    assert client.get("/api/results/0123", headers=headers).status_code == 404


def test_links_to_uploads_work_for_others_only_if_they_are_shared():
    for share in (False, True):
        state = open_state(["builtin:critters-vit"], share=share)
        with serving(create_app(state)) as where, httpx.Client(base_url=where) as client:
            mine, other = (
                {"x-seecause-session": client.post("/api/session").json()["session"]}
                for _ in range(2)
            )
            id = client.post("/api/pictures", content=png(), headers=mine).json()["id"]
            seen = client.get(f"/api/samples/{id}", headers=other).status_code
            assert seen == (200 if share else 404)
        state.close()


def packed(*names):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in names:
            archive.writestr(name, png())
    return content.getvalue()


def test_a_zip_is_a_dataset_of_its_session_and_leaves_with_it():
    own = Sessions().open()
    names = ("top/cat/1.png", "top/dog/1.png", "__MACOSX/top/cat/._1.png", "top/dog/run.sh")
    assert add_zip(own, packed(*names), "pets.zip")["classes"] == ["cat", "dog"]
    (folder,) = own.sessions.folders.values()
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["1.png", "1.png"]
    own.end()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a zip", "cannot be unpacked"),
        (packed("../cat/1.png", "dog/1.png"), "leads out of it"),
        (packed("cat/1.png"), "fewer than two classes"),
        (packed("cat/readme.txt"), "."),
    ],
)
def test_wrong_zips_are_named(content, words):
    with pytest.raises(SeecauseError, match=words):
        add_zip(Sessions().open(), content, "pets.zip")


def test_folders_below_the_root_are_datasets(tmp_path):
    for name in ("pets/cat", "pets/dog", "empty"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "pets")
    state = open_state([], data_root=tmp_path)
    assert state.datasets() == {"pets": f"folder:{tmp_path / 'pets'}"}
    state.close()
