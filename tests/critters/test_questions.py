"""Questions are answerable from the picture and from nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from seecause import critters
from seecause.critters import questions
from seecause.errors import BadOption, UnknownName


def test_every_answer_is_equally_frequent_for_every_subject_and_wording():
    block = 32 * len(questions.SUBJECTS)
    exam = critters.draw_exam("test", 4 * block)
    counts: dict[str, Counter[str]] = {}
    for question in exam.questions:
        counts.setdefault(question.text, Counter())[question.answer] += 1
    assert len(counts) == 4 * len(questions.SUBJECTS)
    for answers in counts.values():
        assert len(set(answers.values())) == 1 and len(answers) in (4, 8)


def test_answers_follow_the_scene():
    latents = critters.draw("balanced", "test", 32)
    assert questions.answers(latents[0], "creature") == ["mossling"]
    assert questions.answers(latents[0], "tail") == ["jade"]
    swapped = critters.intervene(latents, critters.Do(background=3, swap={"tail": "fin"}))
    assert set(questions.answers(swapped, "background")) == {"starlight"}
    assert set(questions.answers(swapped, "tail")) == {"violet"}


def test_every_word_is_in_the_vocabulary():
    known = set(critters.vocabulary())
    assert len(known) == len(critters.vocabulary()) < 100
    for question in critters.draw_exam("train", 800).questions:
        assert set(questions.words(question.text)) <= known
        assert questions.words(question.answer) == [question.answer] and question.answer in known


def test_an_exam_is_the_same_however_it_is_reached():
    whole, later = critters.draw_exam("val", 40), critters.draw_exam("val", 8, start=32)
    assert later.questions == whole.questions[32:] and later.styles == whole.styles[32:]
    drawn = later.pictures(size=64).image
    for row, style in enumerate(later.styles):
        assert torch.equal(
            drawn[row], critters.render(later.latents[row], size=64, style=style).image[0]
        )
    assert len(set(whole.styles)) == 3


def test_unknown_subjects_are_refused():
    with pytest.raises(UnknownName, match="Did you mean tail"):
        critters.ask(critters.draw("clean", "test", 1), "tial")


def test_what_has_no_true_answer_is_not_asked():
    """A creature of parts drawn by lot has no name, and a part that is gone has no colour."""
    latents = critters.draw("clean", "test", 4)
    mixed = critters.mix_parts(latents, share=1.0)
    with pytest.raises(BadOption, match="creature"):
        questions.ask(mixed, "creature")
    assert len(questions.ask(mixed, "crest")) == 4
    bald = critters.intervene(latents, critters.Do(without=("crest",)))
    with pytest.raises(BadOption, match="crest"):
        questions.ask(bald, "crest")
    assert questions.ask(bald, "tail") == questions.ask(latents, "tail")
