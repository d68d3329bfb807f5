"""The truth about parts, on the embedded model: true importances score as true, random ones as
random, and each rule is checked by hand."""

import pytest
import torch

import seecause as sc
from seecause import critters
from seecause.critters.world import minimal_sufficient_sets
from seecause.errors import BadOption
from seecause.metrics.parts import (
    REMOVABLE,
    SETS,
    THRESHOLDS,
    PartTruth,
    measure_truth,
    part_completeness,
    part_importances,
    part_truth,
)
from tests.helpers import near
from tests.linear import linear_model

COUNT = 8
SINGLE = torch.eye(4, dtype=torch.bool)


@pytest.fixture(scope="module")
def setting():
    model, latents = sc.load("builtin:critters-vit"), critters.draw("clean", "test", COUNT, seed=5)
    return model, latents, critters.render(latents), measure_truth(model, latents)


def drops(truth, classes):
    whole = truth.removed[torch.arange(COUNT), 0, classes]
    return torch.stack(
        [whole - truth.logit_without(part.expand(COUNT, -1), classes) for part in SINGLE], dim=1
    )


def painted(picture, values):
    """A pixel map whose sum over each part is its value [B, 4]."""
    maps = torch.zeros(picture.parts.shape, dtype=torch.float64)
    for k in range(4):
        part = picture.parts == 2 + k
        maps += part * (values[:, k] / part.sum(dim=(1, 2)))[:, None, None]
    return maps


def test_true_importances_are_those_of_new_pictures(setting):
    model, latents, _, truth = setting
    without = critters.render(latents, do=critters.Do(without=("tail",))).image
    both = critters.render(latents, do=critters.Do(without=("crest", "feet"))).image
    with torch.no_grad():
        tailless, bald = (
            model(model.preprocess.normalise(image)).double() for image in (without, both)
        )
    place = torch.arange(COUNT)
    near(
        truth.drops[:, REMOVABLE.index("tail")],
        (truth.removed[:, 0] - tailless)[place, latents.creature],
        1e-4,
    )
    gone = torch.tensor([True, False, False, True]).expand(COUNT, -1)
    near(truth.logit_without(gone, latents.creature), bald[place, latents.creature], 1e-4)


def test_a_map_that_ignores_the_class_has_no_contrast(setting):
    model, latents, picture, truth = setting
    blind = part_truth(model, latents, lambda *_: painted(picture, truth.drops), truth=truth)
    assert (
        blind["part-contrastivity"].nan_to_num(0).max() == 0
        and blind["part-contrastivity"].isfinite().any()
    )


def test_part_sums_reach_two_pixels_beyond_the_part():
    parts = torch.zeros(1, 12, 12, dtype=torch.uint8)
    parts[0, 5, 5] = 2 + REMOVABLE.index("wings")
    parts[0, 0, :] = 1  # the body is no part of its own
    summed, background, total = part_importances(torch.ones(1, 12, 12, dtype=torch.float64), parts)
    assert (
        summed.tolist() == [[0, 25, 0, 0]]
        and background.item() == 144 - 12 - 1
        and total.item() == 144
    )


def test_the_completeness_block_by_hand(setting):
    """A model that answers class 0 as long as crest and wings are there; only these two lower its
    logit."""
    model, latents, picture, _ = setting
    removed = torch.zeros(1, 16, 8, dtype=torch.float64)
    for place, (crest, wings, _, _) in enumerate(SETS):
        removed[0, place, 0] = 10 - 4 * crest - 4 * wings
        removed[0, place, 1] = 7
    truth = PartTruth(removed, torch.full((1, 3, 8), 10.0, dtype=torch.float64), torch.tensor([0]))
    assert truth.drops.tolist() == [[4, 4, 0, 0]]
    other = removed.clone()
    other[:, 1:, 1] = 20  # the answer is that to the whole creature, whatever less of it is called
    assert PartTruth(other, truth.elsewhere, truth.creature).predicted.tolist() == [0]
    one = latents[:1].replace(creature=torch.tensor([0]))
    far = torch.tensor([[0.5, 0.3, 0.15, 0.05]])  # of the map's sum, all inside the parts

    def explain(images, classes):
        part_map = critters.render(one).parts
        return painted(picture._replace(parts=part_map), far)

    scores = part_truth(model, one, explain, truth=truth)
    at = {bar: int((THRESHOLDS - bar).abs().argmin()) for bar in (0.02, 0.22, 0.45)}
    sufficient = [{REMOVABLE.index(part) for part in parts} for parts in minimal_sufficient_sets(0)]
    declared = {0.02: {0, 1, 2, 3}, 0.22: {0, 1}, 0.45: {0}}
    overlap = {
        bar: max(len(chosen & important) / len(chosen) for chosen in sufficient)
        for bar, important in declared.items()
    }
    for bar, kept, changed, calm in (
        (0.02, 1, 1, 1 / 3),
        (0.22, 1, 1, 1),
        (0.45, 0, 1, 1),
    ):  # idle: tail, feet and the background
        result = [
            values[0, at[bar]].item()
            for values in (
                scores["csdc"],
                scores["preservation"],
                scores["deletion"],
                scores["distractibility"],
            )
        ]
        assert result == pytest.approx([overlap[bar], kept, changed, calm]), bar
    assert (
        part_completeness(scores.details)["completeness"]
        == pytest.approx(((overlap[0.22] + 2) / 3 + 1) / 2)
        and scores["background-independence"].item() == 1
    )


def test_a_wrong_answer_leaves_holes(setting):
    model, latents, picture, truth = setting
    wrong = PartTruth(truth.removed.roll(1, dims=2), truth.elsewhere, truth.creature)
    scores = part_truth(model, latents, lambda *_: painted(picture, truth.drops), truth=wrong)
    assert (
        not scores["right"].any()
        and scores["csdc"].isnan().all()
        and scores["preservation"].isnan().all()
        and scores["part-correctness"].isfinite().all()
    )


def test_only_models_of_critters_are_judged(setting):
    with pytest.raises(BadOption, match="size"):
        measure_truth(linear_model(), setting[1])
