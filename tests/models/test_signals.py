"""Sound and film: views equal their native models, CAAP and mosaic their definitions, and files
become what the libraries' own processors make of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from scipy.io import wavfile
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.caap import make_plan, sweep
from seecause.engine.blanks import blank_image
from seecause.engine.mixture import Mixture, slopes
from seecause.engine.token_sets import interpolate, selection
from seecause.engine.trace import record
from seecause.engine.verify import verify
from seecause.errors import BadImage, NotDefined, UnsupportedModel, ViewMismatch
from seecause.models.preprocess import Preprocess, from_record
from seecause.models.signals import Film, Spectrogram
from tests.families.signals import FRAMES, SIDE, SIGNALS, SOUND, as_frames
from tests.helpers import noise
from tests.reference import caap as slow_caap, mosaic as slow_mosaic
from tests.tiny import scramble


@pytest.fixture(scope="module", params=SIGNALS)
def tiny(request):
    """A scrambled model, its view, and two inputs as the view takes them."""
    torch.manual_seed(0)
    native = SIGNALS[request.param]()
    scramble(native.module).double().requires_grad_(False)
    model = sc.wrap(native.module, **native.options)
    return request.param, native, model, noise(2, len(model.preprocess.mean), *native.size)


def near(family: str) -> list[list[int]]:
    """Neighbours of every patch, in the native order of tokens, by loops."""
    sides = {"ast": (6, 3), "videomae": (3, 2, 3)}[family]
    places = [tuple(map(int, place)) for place in np.ndindex(*sides)]

    def token(place: tuple[int, ...]) -> int:
        if family == "ast":  # by frequency first
            return place[1] * sides[0] + place[0]
        return (place[0] * sides[1] + place[1]) * sides[2] + place[2]

    return [
        [token(b) for b in places if max(abs(i - j) for i, j in zip(a, b, strict=True)) <= 1]
        for a in places
    ]


def test_a_view_answers_like_its_native_model(tiny):
    family, native, model, images = tiny
    assert_close(model(images), native.forward(images), atol=1e-10, rtol=0)
    assert model.layout.cells == {"ast": (6, 3), "videomae": (3, 2, 3)}[family]
    inputs = images[:, 0] if family == "ast" else as_frames(images)  # as processors have them
    assert torch.equal(model.prepare(inputs), images)
    key = "input_values" if family == "ast" else "pixel_values"
    assert torch.equal(model.prepare({key: inputs}), images)


@pytest.mark.parametrize("tail", ["source", "patched"])
@torch.no_grad()
def test_caap_equals_the_slow_twin(tiny, tail):
    family, native, model, images = tiny
    plan = make_plan(model, model.layout, tail=tail, layers=None)
    blank = blank_image(model, native.size)
    fast = sweep(model, images, blank, selection(model.layout.cells), plan).interventions
    for donor, logits in zip(images.split(1), fast, strict=True):
        slow = slow_caap.caap(
            native.forward, native.blocks, blank, donor, near(family), tail=tail,
            first=plan.start, last=plan.stop, prefix=model.layout.prefix, live=plan.live,
        )  # fmt: skip
        assert_close(logits, slow, atol=1e-10, rtol=0)
        assert (slow.amax(dim=0) - slow.amin(dim=0)).max() > 1e-3
    maps = sc.attribute(model, images, 2, tail=tail, blank="white", score="logit").maps
    assert_close(maps, fast[..., 2].unflatten(1, model.layout.cells), atol=1e-12, rtol=0)


def test_mosaic_equals_the_slow_twin(tiny):
    family, native, model, images = tiny
    blank, every = blank_image(model, native.size), range(model.n_layers + 1)
    with torch.no_grad():
        runs = [record(model, x, states=every, kv=every) for x in (blank, images)]
    run = Mixture(model, *runs, "source", 0)
    masks = 0.05 + 0.9 * torch.rand(
        1, model.layout.n_patches, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    fast = slopes(run, masks, lambda logits: logits[..., 1], together=1)[1, 0]
    grid = (6, 3)
    own = masks[0] if family == "videomae" else masks[0].view(grid).T.flatten()
    leaf = own.clone().requires_grad_()
    norm = None if family == "ast" else native.blocks[-1]  # what is averaged
    logits = slow_mosaic.mixed_logits(
        native.forward, leaf, blank, images[1:], prefix=model.layout.prefix, norm=norm
    )
    (slow,) = torch.autograd.grad(logits[1], leaf)
    slow = slow if family == "videomae" else slow.view(grid[::-1]).T.flatten()
    assert_close(fast, slow, atol=1e-10, rtol=0)
    assert slow.abs().max() > 1e-3


def test_what_is_planted_wrong_is_refused(tiny):
    family, native, model, _ = tiny
    wrong = replace(model, memo={}, native=lambda x: 2 * native.forward(x))
    with pytest.raises(ViewMismatch, match="logits"):
        verify(wrong)
    swapped = replace(model.layout, grid=model.layout.grid[::-1])
    wrong = replace(model, memo={}, layout_at=lambda high, wide: swapped)
    with pytest.raises(ViewMismatch, match="locality"):
        verify(wrong)
    block = replace(model.blocks[1], scale=2 * model.blocks[1].scale)
    with pytest.raises(ViewMismatch, match=r"blocks\.1"):
        verify(replace(model, memo={}, blocks=[model.blocks[0], block]))
    if family == "ast":  # in the native order, by frequency
        plain = native.module.audio_spectrogram_transformer.embeddings
        wrong = replace(model, memo={}, embed=lambda x: plain(x[:, 0]))
        with pytest.raises(ViewMismatch):
            verify(wrong)


def test_a_blank_makes_sense(tiny):
    family, _, model, images = tiny
    options = sc.attribute(model, images, 1).manifest["options"]
    assert options["blank"] == {"ast": "mean", "videomae": "white"}[family]
    white = blank_image(model, images.shape[-2:])
    assert (white > 0).all() and (blank_image(model, images.shape[-2:], "black") < -0.9).all()
    given = sc.attribute(model, images, 1, blank="black").manifest["options"]
    assert given["blank"] == "black"
    pairs = [sc.interactions(model, images, 1, regions=2, blank=b) for b in (None, "mean", "white")]
    assert torch.equal(pairs[0].joint, pairs[1 if family == "ast" else 2].joint)
    assert pairs[0].manifest["options"]["blank"] == options["blank"]
    assert not torch.equal(pairs[1].joint, pairs[2].joint)


def test_results_are_saved_drawn_and_measured(tiny, tmp_path):
    family, _, model, images = tiny
    result = sc.attribute(model, images, 1, method=["caap", "smoothgrad"], samples=2)
    result.save(tmp_path)
    again = sc.Attribution.load(tmp_path / "caap")
    assert torch.equal(again.maps, result["caap"].maps)
    high, wide = {"ast": (24, 40), "videomae": (16, 72)}[family]  # as it is looked at
    picture = again.overlay(1)
    assert picture.width * high == picture.height * wide
    assert again.pixels().shape == (2, *images.shape[-2:])
    place = again.maps[0].flatten().argmax()
    expected = [int(i) for i in torch.unravel_index(place, again.maps.shape[1:])]
    names = ("time of highest", "row of highest", "column of highest")[-len(expected) :]
    assert [again.rows()[0][name] for name in names] == expected
    page = result.page(tmp_path / "page").read_text()
    assert ("frames in a row" if family == "videomae" else "time runs to the right") in page
    assert result.plot() is not None and "<img" in result._repr_html_()
    curves = sc.metrics.insertion_deletion(model, images, result["caap"].maps, 1)
    assert torch.isfinite(curves.insertion).all()
    steps = from_record(again.manifest["preprocessing"])
    assert steps == model.preprocess
    assert sc.evidence(model, images[:1], maps=result["caap"].maps[:1]).enough.patches.ndim == 3


def test_strides_interpolate_in_time_too():
    sides = (5, 4, 3)
    ramp = torch.stack(torch.meshgrid(*map(torch.arange, sides), indexing="ij")).double().sum(dim=0)
    kept = selection(sides, "none", stride=2).double() @ ramp.flatten()
    values = interpolate(kept[None], sides, 2).view(sides)
    inside = (slice(0, 5), slice(0, 3), slice(0, 3))  # beyond the last place values stay
    assert_close(values[inside], ramp[inside])


def test_a_sound_is_what_the_extractor_makes_of_it(tmp_path):
    steps = Spectrogram.of_extractor({"max_length": 64, "num_mel_bins": 24})
    extractor = transformers.ASTFeatureExtractor(num_mel_bins=24, max_length=64)
    wave = np.random.default_rng(0).normal(0, 0.2, 8000).clip(-1, 1).astype(np.float32)
    wavfile.write(tmp_path / "mono.wav", 16000, wave)
    expected = extractor(wave, sampling_rate=16000, return_tensors="pt")["input_values"]
    assert_close(steps(tmp_path / "mono.wav")[:, 0], expected)
    assert_close(steps.unpacked(wave)[:, 0], expected)
    whole = (wave * 32767).astype(np.int16)
    wavfile.write(tmp_path / "stereo.wav", 16000, np.stack([whole, whole], axis=1))
    assert_close(steps(tmp_path / "stereo.wav")[:, 0], expected, atol=0.02, rtol=0)
    tone = steps.unpacked(np.sin(np.arange(8000) / 8) / 2)[0, 0, 5:40].mean(dim=0)
    wavfile.write(tmp_path / "slow.wav", 8000, np.sin(np.arange(4000) / 4).astype(np.float32) / 2)
    assert int(steps(tmp_path / "slow.wav")[0, 0, 5:40].mean(dim=0).argmax()) == int(tone.argmax())
    for name, content in (("text.wav", b"no sound"), ("empty.wav", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadImage, match=name):
            steps(tmp_path / name)
    with pytest.raises(BadImage, match="expected sound"):
        steps(Image.new("RGB", (20, 20)))
    wavfile.write(tmp_path / "brief.wav", 8000, wave[:300])  # 37 ms
    assert steps(tmp_path / "brief.wav").shape == (1, 1, 64, 24)
    wavfile.write(tmp_path / "high.wav", 48000, wave[:900])  # 19 ms
    with pytest.raises(BadImage, match="300 samples at 16000 Hz"):
        steps(tmp_path / "high.wav")
    with pytest.raises(BadImage, match="samples of int64"):  # on that scale they would be silence
        steps(whole.astype(np.int64))


def test_a_film_is_what_the_processor_makes_of_it(tmp_path):
    processor = transformers.VideoMAEImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 24}, do_center_crop=True
    )
    frame = Preprocess(SIDE, tuple(processor.image_mean), tuple(processor.image_std), squash=True)
    steps = Film.of_frame(frame, high=SIDE[0], frames=FRAMES, tubelet=2)
    pixels = np.random.default_rng(0).integers(0, 255, (FRAMES, *SIDE, 3), np.uint8)
    expected = processor([list(pixels)], return_tensors="pt")["pixel_values"]
    strip = steps(pixels)
    assert_close(steps.unfolded(strip), expected, atol=1e-5, rtol=0)
    folder = tmp_path / "frames"
    folder.mkdir()
    for place, picture in enumerate(pixels):  # frame 10 behind frame 9
        Image.fromarray(picture).save(folder / f"f{place + 7}.png")
    np.save(tmp_path / "film.npy", pixels)
    frames = [Image.fromarray(picture) for picture in pixels]
    frames[0].save(
        tmp_path / "film.webp", save_all=True, append_images=frames[1:], lossless=True, duration=40
    )
    for film in (folder, tmp_path / "film.npy", tmp_path / "film.webp", frames, list(pixels)):
        assert_close(steps(film), strip)
    assert_close(steps.unpacked(frames), strip)
    assert_close(steps(np.repeat(pixels, 3, axis=0))[0, :3, :16], strip[0, :3, :16])
    (tmp_path / "film.mp4").write_bytes(b"x")
    for film, words in ((tmp_path / "film.mp4", "ffmpeg"), (pixels[:2], "2 frames"), (3, "a film")):
        with pytest.raises(BadImage, match=words):
            steps(film)


def test_a_first_tubelet_alone_is_refused_by_name():
    config = transformers.VideoMAEConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        patch_size=8, image_size=16, num_frames=2, use_mean_pooling=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="first tubelet"):
        sc.wrap(transformers.VideoMAEForVideoClassification(config), mean=(0.5,), std=(0.5,))


def test_an_export_is_refused_in_words(tiny, tmp_path):
    with pytest.raises(NotDefined, match="Use heads"):
        sc.background.export(tiny[2], [(0, 1)], tmp_path)


def test_sound_of_another_size_is_refused(tiny):
    family, _, model, _ = tiny
    if family == "ast":
        with pytest.raises(BadImage, match="shape"):
            model.prepare(torch.zeros(2, SOUND[0] + 1, SOUND[1]))


def test_sound_that_is_too_long_is_cut_and_said_so(caplog):
    steps = Spectrogram.of_extractor({"max_length": 50, "num_mel_bins": 16})
    wave = noise(16_000).float().numpy()
    steps(wave)
    assert caplog.messages == ["only the first 0.5 of 1 s are heard"]
    steps(wave[:8_000])
    assert len(caplog.messages) == 1
