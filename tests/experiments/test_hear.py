"""HeAr's experiments: which images count, rows against the library, groups of images, layouts."""

import json

import pytest
import torch

import seecause as sc
from seecause.data.dataset import open_data, to_pil
from seecause.errors import BadInput
from seecause.experiments import hear
from seecause.experiments.base import Part
from seecause.files import digest
from tests.data.test_labelled import CAT, DOG, coco as coco, square, thing

MODEL = {"spec": "builtin:critters-llava"}
DATA = "critters:balanced:test"
NAME = "What is the name of this creature?"


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return hear.right_answers(MODEL, DATA, folder, "cpu", samples=6, most=1, question=NAME)


def test_chosen_images_are_right_and_at_most_so_many_of_each_label(chosen, tmp_path):
    lvlm, data = sc.lvlm.load(MODEL["spec"]), open_data(DATA)
    samples = [data[row] for row in chosen["rows"]]
    assert len({sample.label for sample in samples}) == len(samples) == 6
    for sample in samples[:2]:
        said = lvlm.speak(lvlm.prompt(to_pil(sample.image), NAME), 8)
        assert hear.names(lvlm.processor.tokenizer.decode(said), data.classes[sample.label])
    more = {"samples": 4, "most": 2, "least": 2, "question": NAME}
    rows = hear.right_answers(MODEL, DATA, tmp_path, "cpu", **more)["rows"]
    labels = [data[row].label for row in rows]
    assert labels and all(labels.count(label) == 2 for label in labels)
    with pytest.raises(BadInput, match="none of the images"):
        hear.right_answers(
            MODEL, "critters:balanced:test", tmp_path, "cpu", domains="sketch", question=NAME
        )


@pytest.mark.parametrize(
    ("said", "name", "right"),
    [
        ("Dog.", "dog", True),
        (" Dogs", "dog", True),
        ("bear", "teddy bear", True),
        ("Hotdog", "hot dog", True),
        ("aircraft_carrier", "aircraft carrier", True),
        ("cat", "dog", False),
        ("the dog", "dog", False),
        ("", "dog", False),
    ],
)
def test_an_answer_names_a_class_in_its_words(said, name, right):
    assert hear.names(said, name) is right


def test_rows_are_those_of_a_trace(chosen):
    one = Part({**chosen, "rows": chosen["rows"][:1]}, DATA, None, 0, 25, "label", "cpu")
    rows = hear.traced(one, masks=8, calibration=3)
    lvlm, sample = sc.lvlm.load(MODEL["spec"]), open_data(DATA)[chosen["rows"][0]]
    bank = hear._bank(MODEL["spec"], "cpu", DATA, 3)
    engine = sc.lvlm.MaskEngine(lvlm, to_pil(sample.image), NAME, bank)
    trace = sc.lvlm.trace_answer(engine, masks=8, seed=int(digest(sample.id)[:7], 16))
    (fit,) = [row for row in rows if row.get("fit")]
    assert fit["R2"] == pytest.approx(trace.heads.r2) and fit["image"] == sample.id
    counts = {r["ranking"]: (r["enough"], r["needed"]) for r in rows if r.get("ranking")}
    assert counts == trace.counts()
    levels = [row for row in rows if row.get("order") == "hear"]
    assert [row["enough"] for row in levels] == sorted(row["enough"] for row in levels)
    heads = [row for row in rows if row.get("layer")]
    assert len(heads) == 48 and sum(row["used"] for row in heads) == int(trace.chosen.sum())
    singles = [row["causal"] for row in heads]
    torch.testing.assert_close(torch.tensor(singles).double(), trace.causal.flatten())
    assert sum("text" in row for row in rows) == engine.n_text


def test_images_of_one_object_are_near():
    rows = []
    for i in range(8):
        vector = [0.5, 0.0, 0.3, 0.01 * i] if i % 2 else [0.0, 0.5, 0.3, 0.01 * i]
        about = {"image": str(i), "object": "ab"[i % 2], "style": "xy"[i // 4]}
        rows.append(about | {"vector": vector})
    found = hear.groups(rows)
    mean = {
        kind: sum(row["purity"] for row in found if row["grouping"] == kind) / 8
        for kind in ("object", "style")
    }
    assert mean["object"] == pytest.approx(3 / 5) and mean["style"] < 0.5  # three others are alike
    assert found[0]["chance"] == pytest.approx(3 / 7)


def test_photos_of_one_object_alone_have_its_super_category(coco):
    path = coco / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    content["annotations"] = [
        thing(1, CAT, [square(0, 0, 2)], 4),
        thing(2, DOG, [square(0, 0, 2)], 4), thing(2, CAT, [square(3, 0, 2)], 4),
        thing(3, DOG, [square(0, 0, 1)], 1),  # 4 % of the photo
    ]  # fmt: skip
    content["categories"] = [
        {"id": CAT, "name": "cat", "supercategory": "animal"},
        {"id": DOG, "name": "dog", "supercategory": "beast"},
    ]
    path.write_text(json.dumps(content))
    data = open_data(f"coco-main:{coco}")
    assert data.ids == ("000000000001",) and data.places == ("animal", "beast")
    assert data.groups == ((0, 0),) and data[0].label == 0
    assert hear._style(data, data[0]) == "animal"
