"""Fine-tuning against a plain loop, and continued after a kill."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from seecause.background import LabelledImages
from seecause.background.last_layer import fine_tune, random_crops
from seecause.background.transplant import Versions
from seecause.errors import SeecauseError
from tests.background.repair_toys import numbers, plain_vit, wrapped


def five_versions(labels=(0, 0, 1, 0, 0)):
    labels = torch.tensor(labels)
    images = numbers(0, len(labels), 3, 32, 32)
    place = torch.arange(len(labels))
    none = torch.zeros_like(place)
    return Versions(LabelledImages(images, labels), place, none, none, none.bool())


def scores(*curve):
    """A score function that returns these, one after the other."""
    left = list(curve)
    return lambda view: left.pop(0)


def cropped(image, area, across, down, mirrored):
    """A crop of 35 to 100 % of the area, enlarged pixel by pixel; left for right below a half."""
    share = (0.35 + 0.65 * area) ** 0.5  # of each side
    for axis, (side, place) in enumerate(zip(image.shape[1:], (down, across), strict=True)):
        weights = torch.zeros(side, side, dtype=image.dtype)
        for pixel in range(side):
            at = place * (1 - share) * side + (pixel + 0.5) * share - 0.5  # in the old image
            at = min(max(at, 0.0), side - 1.0)
            below = int(at)
            weights[pixel, below] += 1 - (at - below)
            weights[pixel, min(below + 1, side - 1)] += at - below
        image = (weights @ image.movedim(axis + 1, 1)).movedim(1, axis + 1)
    return image.flip(2) if mirrored < 0.5 else image


def trained_one_by_one(module, versions, *, seed, epochs, of, rate, batch):
    """Each version once an epoch; the rate rises for a twentieth of the way and falls to zero."""
    module = copy.deepcopy(module).requires_grad_(True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.05)
    counts, total = torch.bincount(versions.labels).tolist(), len(versions)
    for epoch in range(epochs):
        draw = torch.Generator().manual_seed(1000 * seed + epoch)
        batches = torch.randperm(total, generator=draw).split(batch)
        for number, rows in enumerate(batches):
            done = (epoch + number / len(batches)) / of
            optimizer.param_groups[0]["lr"] = rate * min(1.0, 20 * done + 0.05) * (1 - done)
            loss = 0.0
            chances = torch.rand(4, len(rows), generator=draw)
            for row, chance in zip(rows.tolist(), chances.T.tolist(), strict=True):
                image, label = versions.data.images[row], versions.labels[row]
                image = cropped(image, *chance)
                nll = F.cross_entropy(module(image[None]), label[None])
                loss = loss + total / (2 * counts[int(label)]) * nll / len(rows)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return module.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_crops_of_images_in_half_precision_are_those_of_whole_numbers(dtype):
    images = numbers(0, 3, 3, 224, 224).to(dtype)
    chances = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    chances[0, 0] = 1  # the whole image
    found, slow = random_crops(images, chances), random_crops(images.double(), chances)
    assert found.dtype == dtype and (found.double() - slow).abs().max() < 0.02
    whole = images[0].flip(2) if chances[3, 0] < 0.5 else images[0]
    assert (found[0].double() - whole.double()).abs().max() < 0.02


def loud_vit():
    """Its gradients are longer than what they are clipped to."""
    module = plain_vit().double().eval()
    with torch.no_grad():
        module.head.weight *= 20
    return module


def test_fine_tuning_is_a_plain_loop_that_keeps_its_first_best_epoch():
    module, versions, told = loud_vit(), five_versions(), []
    before = copy.deepcopy(module.state_dict())
    options = {"rate": 1e-3, "batch": 2, "seed": 2}
    score = scores(0.2, 0.5, 0.5, 0.4, 0.9)
    view, curve = fine_tune(
        wrapped(module), versions, score, epochs=9, progress=told.append, **options
    )
    slow = trained_one_by_one(module, versions, epochs=2, of=9, **options)
    assert_close(view.module.state_dict(), slow.state_dict(), atol=1e-9, rtol=1e-9)
    assert curve == [0.2, 0.5, 0.5, 0.4]  # two epochs after the best it stops
    assert told == [2, 2, 1] * 4
    assert_close(module.state_dict(), before, atol=0, rtol=0)
    assert not any(weight.requires_grad for weight in view.module.parameters())


def test_a_killed_training_continues_as_if_it_had_not_been_killed(tmp_path):
    head = nn.Linear(32, 2).double()
    model = wrapped(plain_vit().double().eval(), head=head, pool="cls")
    versions, file, options = five_versions(), tmp_path / "state.pt", {"rate": 1e-3, "batch": 2}
    whole, curve = fine_tune(model, versions, scores(0.1, 0.3, 0.2), epochs=3, **options)
    with pytest.raises(IndexError):  # killed in the third epoch
        fine_tune(model, versions, scores(0.1, 0.3), epochs=3, checkpoint=file, **options)
    told = []
    resumed, again = fine_tune(
        model, versions, scores(0.2), epochs=3, checkpoint=file, progress=told.append, **options
    )
    assert again == curve and told == [10, 2, 2, 1]
    for one, other in ((resumed.module, whole.module), (resumed.extra, whole.extra)):
        assert_close(one.state_dict(), other.state_dict(), atol=0, rtol=0)
    assert not torch.allclose(resumed.extra.weight, head.weight)


def test_training_that_diverges_is_an_error():
    with pytest.raises(SeecauseError, match="not finite"):
        fine_tune(wrapped(loud_vit()), five_versions(), scores(0.1), epochs=1, batch=1, rate=1e300)
