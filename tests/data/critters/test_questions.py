"""Questions are answerable from the picture and from nothing else."""

from __future__ import annotations

from collections import Counter

import torch

from seecause.data import critters
from seecause.data.critters import questions


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
    assert torch.equal(later.pictures().image[0], critters.render(whole.latents[32], style=whole.styles[32]).image[0])
    assert len(set(whole.styles)) == 3
