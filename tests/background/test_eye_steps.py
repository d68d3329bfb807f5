"""What an eye looks at, keeps and says, on toys."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import seecause as sc
from seecause.background.objects import EyeMasks, by_patches, look_piece
from tests.background.repair_toys import CLASSES, fitted, plain_vit, scenes, wrapped

steps = importlib.import_module("seecause.background.objects")


@pytest.fixture(scope="module")
def biased():
    return fitted(scenes(64))


def small_vit(side=16, **options):
    module = timm.models.VisionTransformer(
        img_size=side, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=2
    ).eval()
    return sc.wrap(module, **{"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), **options})


def test_another_view_of_the_same_module_is_the_model_itself(biased):
    """However it is wrapped or copied: it warns, and a yes is a perhaps. With other weights it is
    another network."""
    view = wrapped(biased.module)
    twin = wrapped(copy.deepcopy(biased.module), name="another name")
    trained = copy.deepcopy(biased.module)
    with torch.no_grad():
        next(trained.parameters()).add_(0.1)
    assert view is not biased
    assert sc.eye(view, model=biased).kind == sc.eye(twin, model=biased).kind == "own"
    assert sc.eye(wrapped(trained), model=biased).kind == "network"
    seen = sc.eye(view, model=biased, method="rollout").masks(scenes(4).images)
    assert seen.kind == "own" and "shows the background" in seen.notes[0]


@pytest.mark.parametrize(
    ("kind", "verdict"), [("given", "yes"), ("network", "yes"), ("own", "perhaps")]
)
def test_only_a_models_own_masks_make_a_yes_a_perhaps(biased, kind, verdict):
    cases = scenes(40, seed=2)
    result = sc.audit(biased, cases, per_picture=1)
    assert isinstance(result.masks, EyeMasks)
    assert replace(result, masks=replace(result.masks, kind=kind)).verdict == verdict


def test_an_eye_takes_pictures_in_its_own_frame(biased):
    look = sc.eye(small_vit(), model=biased)
    images = 1.5 * scenes(3).images
    raw = (0.5 + 0.5 * images).clamp(0, 1)
    small = F.interpolate(raw, (16, 16), mode="bilinear", antialias=True, align_corners=False)
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    assert_close(look._framed(images), (small - mean) / std)
    same = sc.eye(small_vit(32), model=biased)
    assert_close(same._framed(images), (raw - mean) / std)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_confidence_is_the_chance_of_what_is_seen(monkeypatch, sigmoid):
    maps = torch.tensor([[[0.0, 1.0], [2.0, 3.0]]])
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    asked = []
    monkeypatch.setattr(
        steps,
        "attribute",
        lambda *given, **options: asked.append(options) or SimpleNamespace(maps=maps),
    )
    monkeypatch.setattr(steps, "logits_of", lambda *_: logits)
    network = SimpleNamespace(device=torch.device("cpu"), sigmoid=sigmoid)
    seen = look_piece(network, torch.zeros(1), (1, 2), "gradcam", {"layer": 3})
    assert asked == [{"method": "gradcam", "layer": 3}]
    assert_close(seen["maps"], torch.tensor([[[1.0, 2.0]]]))  # one row of the two
    chance = logits.sigmoid()[0, 1] if sigmoid else logits.softmax(dim=1)[0, 1]
    assert_close(seen["confidence"], chance[None])
    assert look_piece(network, torch.zeros(1), (2, 2), "gradcam", {})["maps"].equal(maps)


def test_maps_are_kept_by_all_that_decides_them(biased, tmp_path):
    network, images = wrapped(plain_vit(1).eval()), scenes(3).images
    look = sc.eye(network, model=biased, cache=tmp_path)
    framed = replace(network.preprocess, crop=0.9)
    reframed = copy.copy(network)
    reframed.preprocess = framed
    lighter = copy.copy(biased)
    lighter.preprocess = replace(biased.preprocess, mean=(0.4, 0.5, 0.5))
    softer = copy.copy(biased)
    softer.preprocess = replace(biased.preprocess, std=(0.4, 0.5, 0.5))
    changed = images.clone()
    changed[2, 0, 31, 31] += 1
    cases = {
        "itself": (look, images, (4, 4)),
        "pixels": (look, changed, (4, 4)),
        "fewer": (look, images[:2], (4, 4)),
        "grid": (look, images, (2, 8)),
        "weights": (replace(look, network=wrapped(plain_vit(2).eval())), images, (4, 4)),
        "dtype": (replace(look, network=wrapped(plain_vit(1).eval().double())), images, (4, 4)),
        "frame": (replace(look, network=reframed), images, (4, 4)),
        "mean": (replace(look, model=lighter), images, (4, 4)),
        "std": (replace(look, model=softer), images, (4, 4)),
        "method": (replace(look, method="rollout"), images, (4, 4)),
        "options": (replace(look, options={"score": "prob"}), images, (4, 4)),
    }
    files = {name: each._file(*given) for name, (each, *given) in cases.items()}
    assert len(set(files.values())) == len(cases), files
    same = sc.eye(wrapped(plain_vit(1).eval()), model=fitted(scenes(32)), cache=tmp_path)
    assert same._file(images, (4, 4)) == files["itself"]  # whatever model is under repair
    assert replace(look, cache=None)._file(images, (4, 4)) is None


def test_only_what_is_not_kept_is_looked_at_again(biased, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "AT_ONCE", 2)
    looked, real = [], steps.look_piece
    monkeypatch.setattr(
        steps,
        "look_piece",
        lambda m, images, **how: looked.append(len(images)) or real(m, images, **how),
    )
    look = sc.eye(wrapped(plain_vit(1).eval()), model=biased, cache=tmp_path, method="rollout")
    images, told = scenes(5).images, []
    first = look.masks(images, progress=told.append)
    assert looked == [2, 2, 1] and told == [0, 2, 2, 1]
    middle = look._file(images[2:4], (4, 4))
    content = middle.read_bytes()
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir() if file != middle}
    middle.unlink()
    looked.clear(), told.clear()
    again = look.masks(images, progress=told.append)
    assert looked == [2] and told == [3, 2]
    assert again.masks.equal(first.masks) and again.confidence.equal(first.confidence)
    assert middle.read_bytes() == content and len(kept) == 2
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())


@pytest.mark.parametrize(
    ("known", "wanted", "strange"),
    [
        (("dark", "other"), CLASSES, False),  # one that both know
        (("this", "that"), CLASSES, True),
        ((), CLASSES, False),  # names that are not known tell nothing
        (("this", "that"), (), False),
    ],
)
def test_an_eye_is_strange_if_it_knows_no_class_of_the_model(known, wanted, strange):
    model, network = wrapped(plain_vit().eval()), wrapped(plain_vit(1).eval())
    model.classes, network.classes = wanted, known
    notes = sc.eye(network, model=model)._notes(torch.tensor([0.25, 0.75]))
    assert bool(notes) is strange
    assert not notes or "confidence in what it sees instead is 0.50" in notes[0]


def test_masks_that_are_given_count_before_those_of_the_data_and_255_is_neither(biased):
    cases = scenes(2)
    by_patch = torch.zeros(2, 4, 4, dtype=torch.uint8)
    by_patch[0, 1, 2], by_patch[0, 0, 0] = 1, 255
    seen = sc.eye(by_patch, model=biased).masks(cases)
    assert seen.masks.nonzero().tolist() == [[0, 1, 2]] and seen.fine is None
    assert seen.cut is seen.masks and seen.confidence.tolist() == [1, 0]
    pixels = torch.zeros(2, 32, 32, dtype=torch.uint8)
    pixels[:, 8:16, 8:16], pixels[:, 0] = 1, 255
    seen = sc.eye(pixels, model=biased).masks(cases)
    assert seen.masks.nonzero().tolist() == [[0, 1, 1], [1, 1, 1]]
    assert seen.fine.equal(pixels == 1) and seen.cut is seen.fine


def test_what_is_not_known_of_a_mask_is_not_held_against_the_eye(biased, monkeypatch):
    truth = torch.zeros(3, 32, 32, dtype=torch.uint8)
    truth[:, :8, :8] = 1  # one patch of sixteen
    truth[1, 8:16], truth[2] = 255, 255
    masks = by_patches(truth, (4, 4))
    assert masks.nonzero().tolist() == [[0, 0, 0], [1, 0, 0]]  # not what nothing is known of
    seen = torch.zeros(3, 4, 4)
    seen[:, 0, :2] = 1.0
    monkeypatch.setattr(steps.Eye, "_maps", lambda *_: (seen, torch.ones(3)))
    overlap = sc.eye(small_vit(), model=biased).masks(replace(scenes(3), truth=truth)).overlap
    assert overlap[:2].tolist() == [0.5, 0.5] and overlap[2].isnan()


def test_options_of_an_eye_arrive(biased, monkeypatch):
    loads = []
    network = wrapped(plain_vit(1).eval())
    monkeypatch.setattr(steps, "load", lambda *a, **k: loads.append((a, k)) or network)
    look = sc.eye("timm:other", model=biased, weights="w.safetensors", stride=2)
    assert loads == [(("timm:other",), {"weights": "w.safetensors", "device": biased.device})]
    assert look.options == {"score": "logit", "stride": 2} and look.network is network
    assert sc.eye(network, model=biased, score="prob").options == {"score": "prob"}
    assert sc.eye(network, model=biased, method="rollout").options == {}
    assert sc.eye(look, model=biased) is look
    wide = scenes(2).images.double()
    assert sc.eye(network, model=biased, method="rollout").masks(wide).masks.shape == (2, 4, 4)
