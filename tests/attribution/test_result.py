"""Results people use: parts, frames, figures, pages, notebooks, several methods, streams."""

import json

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import seecause as sc
from seecause.attribution.result import TENSORS, Attribution
from seecause.data.dataset import SkippedImage
from seecause.errors import BadImage, BadOption, DataMissing
from tests.bad_files import bad_file


@pytest.fixture(scope="module")
def model():
    return sc.load("builtin:critters-vit")


@pytest.fixture(scope="module")
def images(model):
    data = sc.data.open_data("critters:clean:test", limit=8)
    return sc.data.to_batch(model, list(data)).images


@pytest.fixture(scope="module")
def att(model, images):
    return sc.attribute(model, images, method="mosaic", masks=4)


@pytest.mark.parametrize("which", [slice(2, 5), [4, 1], torch.tensor([4, 1]), np.array([4, 1]), -1])
def test_a_part_is_a_result_of_its_own(att, which):
    rows = torch.arange(8)[which if isinstance(which, int | slice) else [4, 1]].reshape(-1)
    part = att[which]
    for name in TENSORS:
        whole, cut = getattr(att, name), getattr(part, name)
        assert (whole is None and cut is None) or torch.equal(whole[rows], cut)
    assert part.labels == [att.labels[row] for row in rows.tolist()]
    assert part.answers == [att.answers[row] for row in rows.tolist()]
    assert part.manifest["rows"] == rows.tolist()
    for key, values in att.manifest["target"].items():
        picked = values and [values[row] for row in rows.tolist()]
        assert part.manifest["target"][key] == picked
    assert part.manifest["images"][0] == len(part) == len(rows)
    assert part[0].manifest["rows"] == [rows.tolist()[0]]
    assert part.pixels().shape == (len(rows), 96, 96)


def test_a_part_without_pictures_has_pixels_of_none(att):
    assert att[:0].pixels().shape == (0, 96, 96)


def test_iteration_goes_through_pictures_and_ends(att):
    assert [one.labels[0] for one in att] == att.labels
    assert torch.equal(torch.cat([one.maps for one in att]), att.maps)
    with pytest.raises(IndexError):
        att[8]
    with pytest.raises(IndexError):
        att[[True, False]]
    assert len(att[torch.arange(8) < 3]) == 3


@pytest.mark.parametrize("method", ["caap", "mosaic", "rise", "sobel"])
def test_probabilities_are_those_of_the_model(model, images, method):
    options = {"masks": 8} if method == "rise" else {}
    for target in (None, 3, (2, 5), lambda logits: logits[:, 0]):
        result = sc.attribute(model, images[:3], target, method, **options)
        expected = model(images[:3]).softmax(dim=-1)
        torch.testing.assert_close(result.probabilities, expected)
        assert result.probabilities.requires_grad is False
        best = [answers[0].name for answers in result.answers]
        assert best == [model.class_name(c) for c in expected.argmax(dim=-1).tolist()]


def test_a_contrast_says_both_classes(model, images):
    att = sc.attribute(model, images[:2], ("mossling", "quillow"))
    assert att.labels == ["mossling against quillow"] * 2
    assert {a.name for a in att.answers[0] if a.explained} == {"mossling", "quillow"}
    assert att.plot().axes[1].get_title().startswith("caap: mossling against quillow\n")
    assert att.rows()[0]["explained"] == "mossling against quillow"


def test_a_frame_has_a_row_for_each_picture(att):
    frame = att.to_pandas()
    assert len(frame) == 8
    row = frame.iloc[3]
    assert row["prediction"] == att.answers[3][0].name and row["explained"] == att.labels[3]
    top = att.maps[3].flatten().argmax()
    assert (row["row of highest"], row["column of highest"]) == (top // 12, top % 12)


def test_a_frame_names_the_files(model, tmp_path):
    paths = [tmp_path / "a.png", str(tmp_path / "b.png")]
    for path in paths:
        Image.new("RGB", (96, 96), "green").save(path)
    pictures = [*paths, Image.open(paths[0]), Image.new("RGB", (96, 96))]
    frame = sc.attribute(model, pictures, method="rollout").to_pandas()
    files = [str(paths[0]), str(paths[1]), str(paths[0]), "image 3"]
    assert list(frame["image"]) == files
    assert sc.attribute(model, paths[0], method="rollout").names == files[:1]


def test_plots_are_figures_with_the_picture_beside_its_map(att):
    figure = att[:2].plot()
    assert len(figure.axes) == 4 and figure.axes[0].get_title().startswith(att.answers[0][0].name)
    assert figure.axes[1].get_title().startswith(f"mosaic: {att.labels[0]}\n")
    assert att._repr_html_().startswith('<img alt="maps" src="data:image/jpeg')


def test_the_page_of_a_result_is_one_file(att, tmp_path):
    file = att[:2].page(tmp_path / "two.html")
    text = file.read_text()
    assert text.count('<article class="card') == 2 and att.labels[0] in text
    assert att[0].page(tmp_path / "folder") == tmp_path / "folder" / "index.html"


def test_explanations_by_several_methods_have_the_same_ways_to_look(model, images):
    options = {"caap": {"score": "logit"}}
    both = sc.explain(model, images[:2], methods=["caap", "rollout"], options=options)
    assert list(both.runs) == ["caap", "rollout"]
    assert both.runs["caap"].manifest["options"]["score"] == "logit"
    assert torch.equal(both.runs["caap"].maps, sc.attribute(model, images[:2], score="logit").maps)
    assert len(both.plot().axes) == 6
    assert len(both.to_pandas()) == 4


def test_everything_survives_being_saved(att, model, images, tmp_path):
    loaded = Attribution.load(att.save(tmp_path / "one"))
    assert loaded.answers == att.answers and loaded.manifest == json.loads(json.dumps(att.manifest))
    assert torch.equal(loaded.probabilities, att.probabilities)
    assert loaded[2:4].labels == att.labels[2:4]
    sc.attribute(model, images[:1], method="sobel").save(tmp_path / "sobel")
    assert Attribution.load(tmp_path / "sobel").native is not None
    sc.attribute(model, images[:2], method="sobel").save(tmp_path / "two")
    (tmp_path / "two" / "manifest.json").replace(tmp_path / "sobel" / "manifest.json")
    with pytest.raises(DataMissing, match="different numbers of images"):
        Attribution.load(tmp_path / "sobel")


def test_attribute_takes_what_people_have(model, images, tmp_path):
    data = sc.data.open_data("critters:clean:test", limit=8)
    files = []
    for place in range(5):
        files.append(tmp_path / f"{place}.png")
        sc.data.to_pil(data[place].image).save(files[-1])
    expected = sc.attribute(model, images[:5], method="center")
    loader = DataLoader(TensorDataset(images[:5], torch.zeros(5)), batch_size=2)
    pictures = [sc.data.to_pil(data[place].image) for place in range(5)]
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    for source in (
        *(images[:5], loader, ({"pixel_values": x} for x, _ in loader), pictures, arrays),
        *(iter(images[:5, None].split(2)), iter([pictures[:3], pictures[3:]])),
        *(((p, 0) for p in pictures), str(tmp_path), str(tmp_path / "*.png"), files),
    ):
        found = sc.attribute(model, source, method="center")
        torch.testing.assert_close(found.maps, expected.maps)
        torch.testing.assert_close(found.images, expected.images, atol=1 / 200, rtol=0)
    assert found.names == [str(file) for file in files]
    assert found.manifest["images"][0] == 5 and len(found.manifest["target"]["class"]) == 5
    found = sc.attribute(model, files, [1, 2, 3, 4, 5], "ixg")
    assert found.manifest["target"]["class"] == [1, 2, 3, 4, 5]


def test_a_bad_file_is_named_and_the_others_go_on(model, tmp_path):
    Image.new("RGB", (90, 60)).save(tmp_path / "good.png")
    bad, good = bad_file(tmp_path, "truncated"), tmp_path / "good.png"
    skipped: list[SkippedImage] = []
    found = sc.attribute(model, [good, bad, good], method="center", skipped=skipped)
    assert found.names == [str(good)] * 2
    assert [hole.name for hole in skipped] == [str(bad)] and "truncated" in skipped[0].reason
    with pytest.raises(BadImage):
        sc.attribute(model, [good, bad], method="center")
    with pytest.raises(BadOption, match="a list of 1"):
        sc.attribute(model, [good, good], [1], "center")
