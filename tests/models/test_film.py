"""Films: the view equals its native model, CAAP and mosaic their definitions, and files become what
the library's own processor makes of them."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.caap import make_plan, sweep
from seecause.attribution.result import Attribution
from seecause.engine.sweep import selection
from seecause.engine.trace import blank_image
from seecause.errors import BadImage, NotDefined
from seecause.models.preprocess import Film, Preprocess, from_record
from tests.families.film import FRAMES, SIDE, as_frames, videomae, vjepa2
from tests.helpers import noise
from tests.reference import caap as slow_caap
from tests.tiny import scramble


@pytest.fixture(scope="module", params=[videomae, vjepa2])
def each(request):
    """A scrambled model, its view, and two inputs as the view takes them."""
    return made(request.param)


@pytest.fixture(scope="module")
def tiny():
    return made(videomae)


def made(family):
    torch.manual_seed(0)
    native = family()
    scramble(native.module).double().requires_grad_(False)
    model = sc.wrap(native.module, **native.options)
    return native, model, noise(2, len(model.preprocess.mean), *native.size)


def near(cells) -> list[list[int]]:
    """Neighbours of every patch by loops, in time too."""
    places = [tuple(map(int, place)) for place in np.ndindex(*cells)]
    return [
        [i for i, b in enumerate(places) if max(abs(x - y) for x, y in zip(a, b, strict=True)) <= 1]
        for a in places
    ]


def test_a_view_predicts_like_its_native_model(each):
    native, model, images = each
    assert_close(model(images), native.forward(images), atol=1e-10, rtol=0)
    wide = native.size[1]
    assert model.layout.cells == (3, 2, wide // 8)
    inputs = as_frames(images, wide)  # as processors return them
    assert torch.equal(model.prepare(inputs), images)
    assert torch.equal(model.prepare({"pixel_values": inputs}), images)


@pytest.mark.parametrize("tail", ["source", "patched"])
@torch.no_grad()
def test_caap_equals_the_slow_twin(each, tail):
    native, model, images = each
    plan = make_plan(model, model.layout, tail=tail, layers=None)
    blank = blank_image(model, native.size)
    fast = sweep(model, images, blank, selection(model.layout.cells), plan).interventions
    for donor, logits in zip(images.split(1), fast, strict=True):
        slow = slow_caap.caap(
            native.forward, native.blocks, blank, donor, near(model.layout.cells), tail=tail,
            first=plan.start, last=plan.stop, prefix=model.layout.prefix, live=plan.live,
        )  # fmt: skip
        assert_close(logits, slow, atol=1e-10, rtol=0)
        assert (slow.amax(dim=0) - slow.amin(dim=0)).max() > 1e-3
    maps = sc.attribute(model, images, 2, tail=tail, score="logit").maps
    assert_close(maps, fast[..., 2].unflatten(1, model.layout.cells), atol=1e-12, rtol=0)


def test_results_are_saved_drawn_and_measured(tiny, tmp_path):
    _, model, images = tiny
    result = sc.attribute(model, images, 1)
    again = Attribution.load(result.save(tmp_path / "caap"))
    assert torch.equal(again.maps, result.maps)
    image = again.overlay(1)
    assert image.width * 16 == image.height * 72  # frames in a row
    assert "frames in a row" in result.page(tmp_path / "page").read_text()
    assert from_record(again.manifest["preprocessing"]) == model.preprocess
    evidence = sc.evidence(model, images[:1], maps=result.maps[:1])
    assert evidence.enough.patches.ndim == 3
    with pytest.raises(NotDefined):
        sc.background.export(model, [(0, 1)], tmp_path)


def test_a_film_is_what_the_processor_makes_of_it(tmp_path):
    processor = transformers.VideoMAEImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 24}, do_center_crop=True
    )
    frame = Preprocess(SIDE, tuple(processor.image_mean), tuple(processor.image_std), squash=True)
    steps = Film.of_frame(frame, high=SIDE[0], frames=FRAMES, tubelet=2)
    pixels = np.random.default_rng(0).integers(0, 255, (FRAMES, *SIDE, 3), np.uint8)
    expected = processor([list(pixels)], return_tensors="pt")["pixel_values"]
    strip = steps(list(pixels))
    assert_close(steps.unfolded(strip), expected, atol=1e-5, rtol=0)
    folder = tmp_path / "frames"
    folder.mkdir()
    for place, image in enumerate(pixels):  # frame 10 comes after frame 9
        Image.fromarray(image).save(folder / f"f{place + 7}.png")
    frames = [Image.fromarray(image) for image in pixels]
    for film in (folder, frames):
        assert_close(steps(film), strip)
    assert_close(steps.unpacked(frames), strip)
    assert_close(steps(list(np.repeat(pixels, 3, axis=0)))[0, :3, :16], strip[0, :3, :16])
    (tmp_path / "film.mp4").write_bytes(b"x")
    for film, words in ((tmp_path / "film.mp4", "ffmpeg"), (frames[:2], "2 frames")):
        with pytest.raises(BadImage, match=words):
            steps(film)
