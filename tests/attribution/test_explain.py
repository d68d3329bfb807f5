"""The explain job gives the same result however the pictures are batched."""

import pytest
import torch
from PIL import Image

import seecause as sc
from seecause.attribution.attribute import (
    ImageBatch,
    _outside,
    default_methods,
    explain_batches,
    top_answers,
)
from seecause.attribution.result import Attribution, AttributionWriter
from seecause.data.dataset import IGNORE, SkippedImage
from seecause.errors import BadOption, DataMissing
from tests.families.conv import tiny_conv
from tests.helpers import view
from tests.tiny import pictures, tiny


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return sc.load("timm:test_vit", weights="random")


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 160, 160, generator=torch.Generator().manual_seed(0))


def test_a_batch_is_asked_about_the_rows_of_its_own_images():
    part = ImageBatch(torch.zeros(2, 3, 4, 4), [1, 3], ["b", "d"], [])
    assert part.targets(["box:0", "box:1", "box:2", "box:3"]) == ["box:1", "box:3"]
    assert part.targets(torch.tensor([4, 5, 6, 7])) == [5, 7] and part.targets((1, 2)) == (1, 2)
    with pytest.raises(BadOption, match="a list of 2"):
        part.targets(["box:0", "box:1"])


def test_what_cannot_be_one_result_is_refused_in_words():
    native = tiny("timm_dynamic", torch.float32)
    model, picture = view(native), pictures(native, batch=1)[0]
    with pytest.raises(BadOption, match=r"methods=.*at least one method"):
        sc.explain(model, picture, methods=[])
    both = [picture, torch.cat([picture, picture], dim=2)]
    with pytest.raises(BadOption, match=r"images=.*one size"):
        sc.explain(model, both, methods=["rollout"])


def test_pixels_that_are_neither_object_nor_background_have_no_area():
    mask = torch.tensor([[1, 0, IGNORE, IGNORE]])
    run = Attribution(torch.ones(1, 1, 4), images=torch.zeros(1, 3, 1, 4), manifest={})
    assert _outside(run, 0, mask)[1] == 0.5
    assert _outside(run, 0, torch.full_like(mask, IGNORE)) == (None, None)


@pytest.mark.parametrize("method", ["caap", "simple-insertion", "simple-deletion"])
def test_every_method_with_a_blank_takes_another_version_of_each_picture(model, images, method):
    others = images.flip(-1)
    both = sc.explain(model, images[:2], methods=[method], target=1, others=others[:2]).first
    alone = sc.explain(model, images[1], methods=[method], target=1, others=others[1]).first
    torch.testing.assert_close(both.maps[1:], alone.maps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("target", [None, 7])
def test_batches_are_parts_of_the_one_result(model, images, target):
    options = {"caap": {"classes": [1, 2]}}
    parts = list(
        explain_batches(
            model, images, methods=("caap", "sobel"), target=target, options=options, batch=2
        )
    )
    whole = sc.explain(model, images, methods=("caap", "sobel"), target=target, options=options)
    assert [part.places for part in parts] == [[0, 1], [2]] and whole.places == [0, 1, 2]
    assert whole.names == ["image 0", "image 1", "image 2"]
    assert parts[-1].fingerprint == whole.fingerprint
    for method, run in whole.runs.items():
        joined = Attribution.join([part.runs[method] for part in parts], whole.fingerprint)
        torch.testing.assert_close(joined.maps, run.maps, rtol=1e-4, atol=1e-8)
        assert joined.labels == run.labels and joined.names == run.names == whole.names
        own = ({**one.manifest, "memory_halvings": []} for one in (joined, run))
        assert next(own) == next(own)
    assert whole.runs["caap"].class_maps.shape[-1] == 2
    assert whole.runs["sobel"].native.shape == (3, 160, 160)
    classes = [[answer.name for answer in row] for part in parts for row in part.answers]
    assert classes == [[answer.name for answer in row] for row in whole.answers]


def test_pictures_of_which_none_can_be_read_are_refused_in_words(model, tmp_path):
    holes: list[SkippedImage] = []
    with pytest.raises(DataMissing, match="none can be read"):
        sc.explain(model, [str(tmp_path / "missing.png")], methods=("center",), skipped=holes)
    assert [hole.name for hole in holes] == [str(tmp_path / "missing.png")]


def test_evidence_and_interactions_stand_beside_maps_where_asked_for(model, images):
    found = sc.explain(
        model, images[:2], methods=("sobel",), also=("evidence", "interactions"), target=1
    )
    alone = sc.evidence(model, images[:2], 1, maps=found.first.maps)
    assert torch.equal(found.evidence.enough.patches, alone.enough.patches)
    joint = sc.interactions(model, images[:2], 1).joint
    torch.testing.assert_close(found.interactions.joint, joint)
    with pytest.raises(BadOption, match="also="):
        sc.explain(model, images, also=("miracles",))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batches_written_one_by_one_are_what_save_writes(images, tmp_path, dtype):
    torch.manual_seed(0)
    model = sc.load("timm:test_vit", weights="random", dtype=dtype)
    options = {"caap": {"classes": [1, 2]}}
    asked = dict(methods=("caap", "sobel"), options=options)
    whole = sc.explain(model, images, **asked)
    for method in whole.runs:
        writer = AttributionWriter(tmp_path / method)
        for part in explain_batches(model, images, **asked, batch=2):
            writer.add(part.runs[method])
        writer.close(part.fingerprint)
        whole.runs[method].save(tmp_path / "whole")
        mine, other = (Attribution.load(tmp_path / name) for name in (method, "whole"))
        assert mine.manifest == other.manifest and mine.labels == other.labels
        for name in ("maps", "images", "native", "class_maps"):
            first, second = getattr(mine, name), getattr(other, name)
            assert (first is None) == (second is None)
            if first is not None:
                torch.testing.assert_close(first, second)
        written = sorted(file.name for file in (tmp_path / method).iterdir())
        assert written == ["manifest.json", "maps-00001.safetensors", "maps.safetensors"]


def test_pictures_are_read_one_batch_ahead_at_most(model):
    read = []

    def pictures():
        for place in range(5):
            read.append(place)
            yield Image.new("RGB", (90, 60), (place * 40, 0, 0))

    parts = explain_batches(model, pictures(), methods=("center",), batch=2)
    first = next(parts)
    assert len(read) == 2 and first.names == ["image 0", "image 1"]
    assert [len(part.names) for part in parts] == [2, 1]


def test_the_explained_class_is_always_among_the_answers(model, images):
    unlikely = int(model(images[:1]).argmin())
    (answers,) = sc.attribute(model, images[:1], unlikely, "center").answers
    assert (
        len(answers) == 4
        and answers[-1].explained
        and answers[-1].name == model.class_name(unlikely)
    )
    assert [a.probability for a in answers] == sorted(
        (a.probability for a in answers), reverse=True
    )
    assert top_answers(model, images[:1])[0][0].explained


def test_without_methods_mosaic_stands_beside_caap_where_it_does_good():
    images = pictures(tiny("timm_deit3"), batch=1)
    assert list(sc.explain(view(tiny("timm_deit3")), images).runs) == ["caap", "mosaic"]
    assert default_methods(view(tiny("timm_mean"))) == ("caap",)  # no class token is read
    cut = tiny("timm_deit3")
    layer = cut.module.blocks[1].mlp.fc2
    layer.register_forward_hook(lambda module, args, out: out.detach())  # as quantised layers do
    assert default_methods(view(cut, check=False)) == ("caap",)
    assert default_methods(view(tiny_conv("timm_resnet"), check=False)) == ("caap", "mosaic")
