"""The regimes have the law they claim, splits never meet, and one cue does not leak into the pixels
of the other."""

import itertools

import pytest
import torch

from seecause import critters
from seecause.critters.rendering import intervene
from seecause.critters.world import (
    BACKGROUNDS,
    CLASSES,
    CODEWORDS,
    PARTS,
    SPLITS,
    Regime,
    joint,
    minimal_sufficient_sets,
)
from seecause.errors import UnknownName
from tools.critters import drop_parts, mix_parts
from tools.critters.questions import SUBJECTS, answer_codes, choices, vocabulary, wordings, words


def test_classes_differ_in_two_parts_and_no_variant_is_unique():
    for one, other in itertools.combinations(CODEWORDS, 2):
        assert sum(a != b for a, b in zip(one, other, strict=True)) >= 2
    for part in range(len(PARTS) - 1):
        variants = [word[part] for word in CODEWORDS]
        assert all(variants.count(variant) == 2 for variant in variants)


def test_minimal_sufficient_sets_are_sufficient_and_minimal():
    latents = critters.draw("balanced", "test", len(CLASSES))
    for creature in range(len(CLASSES)):
        for chosen in minimal_sufficient_sets(creature):
            assert _possible(latents[creature], chosen) == 1
            assert all(
                _possible(latents[creature], tuple(set(chosen) - {part})) > 1 for part in chosen
            )


def _possible(latents, parts) -> int:
    """How many classes remain when only these parts are visible."""
    hidden = critters.Do(without=tuple(part for part in PARTS[1:] if part not in parts))
    return int(compatible_classes(intervene(latents, hidden)).sum())


def compatible_classes(latents):
    """[B, C] bool: the classes whose codeword agrees with every part still visible."""
    agrees = latents.variants[:, None] == torch.tensor(CODEWORDS)
    return (agrees | ~latents.present[:, None, 1:]).all(dim=-1)


def test_certified_bounds_are_exact():
    proof = critters.certificate("certified", accuracy=0.76, samples=2000)
    assert proof.bayes == pytest.approx(0.787, abs=5e-4)
    assert proof.creature_only == pytest.approx(0.70)
    assert proof.background_only == pytest.approx(0.475)
    assert proof.margin == pytest.approx(0.0274, abs=1e-4)
    assert proof.uses_background and proof.uses_creature
    assert not critters.certificate("certified", accuracy=0.72, samples=2000).uses_background
    assert critters.certificate("certified", accuracy=0.72, samples=20_000).uses_background
    assert not critters.certificate("certified", accuracy=0.48, samples=2000).uses_creature
    assert not critters.certificate("clean", accuracy=1.0, samples=10**6).uses_background


@pytest.mark.parametrize("name", ["clean", "certified", "simplicity"])
def test_draws_follow_the_joint_law(name):
    latents = critters.draw(name, "test", 40_000)
    cell = (latents.label * len(CLASSES) + latents.creature) * len(BACKGROUNDS) + latents.background
    law = joint(name).flatten()
    seen = torch.bincount(cell, minlength=len(law)) / len(latents)
    assert law.sum().item() == pytest.approx(1)
    assert (seen - law).abs().max() < 5 * (law.max() / len(latents)).sqrt()
    assert (seen[law == 0] == 0).all()


def test_balanced_draws_hold_every_group_equally_often():
    latents = critters.draw("balanced", "test", 96)
    cell = latents.creature * len(BACKGROUNDS) + latents.background
    assert (torch.bincount(cell) == 3).all()
    assert torch.equal(latents.label, latents.creature)


def test_splits_seeds_and_batches_never_share_or_change_a_sample():
    drawn = {
        (split, seed): critters.draw("clean", split, 500, seed=seed).seed
        for split in SPLITS
        for seed in (0, 1)
    }
    assert len(torch.cat(list(drawn.values())).unique()) == 500 * len(drawn)
    later = critters.draw("clean", "val", 10, seed=1, start=300)
    assert torch.equal(later.seed, drawn["val", 1][300:310])


def test_the_simplicity_pool_is_finite_for_training_only():
    again = critters.draw("simplicity", "train", 8, start=4096)
    assert torch.equal(again.seed, critters.draw("simplicity", "train", 8).seed)
    assert len(critters.draw("simplicity", "test", 5000).seed.unique()) == 5000
    stronger = Regime("simplicity-99", background_reliability=0.99, train_pool=4096)
    assert critters.certificate(stronger, accuracy=1, samples=1).background_only == pytest.approx(
        0.495
    )


def test_dropped_parts_leave_the_body_and_half_of_the_images():
    latents = drop_parts(critters.draw("clean", "train", 4000), share=0.5)
    assert latents.present[:, 0].all()
    touched = ~latents.present.all(dim=1)
    assert 0.38 < touched.float().mean() < 0.50  # half, less those where no part came up
    assert compatible_classes(latents)[torch.arange(4000), latents.creature].all()


def test_unknown_names_are_refused():
    with pytest.raises(UnknownName, match="certified"):
        critters.draw("certifed", "test", 1)
    with pytest.raises(UnknownName, match="train"):
        critters.draw("clean", "trian", 1)


def test_a_batch_of_latents_ends():
    latents = critters.draw("clean", "test", 3)
    assert len([row for row, _ in zip(latents, range(9), strict=False)]) == 3
    assert int(latents[-1].seed) == int(latents.seed[2])
    for outside in (3, -4):
        with pytest.raises(IndexError):
            latents[outside]


def test_samples_carry_everything_that_is_known():
    first, *_, last = critters.samples("certified", "test", 70, size=64)
    latents = critters.draw("certified", "test", 70)
    assert first.image.shape == (3, 64, 64)
    assert (first.mask.dtype, first.parts.dtype) == (torch.bool, torch.uint8)
    assert last.group == (int(latents.creature[69]), int(latents.background[69]))
    assert last.label == int(latents.label[69]) and last.id == "certified-test-69"


def test_every_answer_is_equally_frequent_and_follows_the_scene():
    latents = critters.draw("balanced", "test", 32)
    codes = answer_codes(latents)
    for place, subject in enumerate(SUBJECTS):
        counts = torch.bincount(codes[:, place])
        assert set(counts[counts > 0].tolist()) == {32 // int((counts > 0).sum())}
        assert len(wordings(subject)) == 4
    tail = SUBJECTS.index("tail")
    assert choices("creature")[codes[0, 0]] == "mossling"
    assert choices("tail")[codes[0, tail]] == "jade"
    swapped = answer_codes(intervene(latents, critters.Do(background=3, swap={"tail": "fin"})))
    assert {choices("background")[code] for code in swapped[:, 1]} == {"starlight"}
    assert {choices("tail")[code] for code in swapped[:, tail]} == {"violet"}
    mixed = mix_parts(latents, share=1.0)  # has no name
    assert (answer_codes(mixed)[:, 0] == -1).all() and (answer_codes(mixed)[:, tail] >= 0).all()


def test_every_word_is_in_the_vocabulary():
    known = set(vocabulary())
    assert len(known) == len(vocabulary()) < 100
    for subject in SUBJECTS:
        assert all(set(words(text)) <= known for text in wordings(subject))
        assert all(words(answer) == [answer] for answer in choices(subject))
