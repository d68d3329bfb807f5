"""critters-llava: packed questions equal separate ones, what is written is plain transformers, and
planted heads are the only readers."""

import csv
import dataclasses

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoProcessor, LlavaForConditionalGeneration

from seecause import critters
from tools.critters import card, train
from tools.critters.llava import answer, evaluate
from tools.critters.llava_model import (
    RECIPES,
    TEMPLATE,
    LlavaRecipe,
    Teacher,
    answer_logits,
    build_llava,
    make_words,
)
from tools.critters.questions import SUBJECTS

TOWER = {"size": 32, "patch": 8, "tower_width": 32, "tower_depth": 2, "tower_heads": 2}
SMALL = TOWER | {"width": 32, "depth": 3, "heads": 4, "hidden": 64}
READERS = ((0, 1), (1, 3))


def small(**changes) -> LlavaRecipe:
    return dataclasses.replace(
        RECIPES["critters-llava"], **SMALL, **({"samples": 96, "batch": 12} | changes)
    )


def model_and_batch(**changes):
    recipe = small(**changes)
    words = make_words()
    teacher = Teacher(words, "cpu")
    batch = teacher.batch(critters.draw("balanced", "train", 5), recipe.preprocess)
    return (
        build_llava(recipe, words).double().eval(),
        teacher,
        dataclasses.replace(batch, image=batch.image.double()),
    )


@pytest.mark.parametrize("readers", [(), READERS])
def test_packed_questions_equal_the_native_model_one_by_one(readers):
    model, teacher, batch = model_and_batch(readers=readers)
    packed = answer_logits(model, teacher, batch)
    for row in range(5):
        for place in range(len(SUBJECTS)):
            question = batch.tokens[row, place, : batch.last[row, place] + 1].tolist()
            for step, ids in enumerate((question, [*question, int(batch.answer[row, place])])):
                assert_close(
                    packed[row, place, step].float(),
                    answer(model, teacher, batch.image[row : row + 1], ids)[0],
                    atol=1e-6,
                    rtol=0,
                )


def test_what_is_written_loads_in_plain_transformers(tmp_path):
    recipe = small()
    evaluation = train(recipe, out=tmp_path, test_samples=24)
    folder = tmp_path / "critters-llava"
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    words = make_words()
    assert (
        evaluate(model, Teacher(words, "cpu"), preprocess=recipe.preprocess, samples=24)
        == evaluation
    )
    metadata = card(tmp_path, "critters-llava")
    assert metadata["evaluation"] == evaluation and metadata["recipe"]["mixed"] == 0.5
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    assert [row["phase"] for row in rows] == ["seeing"] * 2 + ["answering"] * 6

    processor = AutoProcessor.from_pretrained(folder)
    sample = next(critters.samples("balanced", "test", 1, size=32))
    inputs = processor(
        images=sample.image,
        text=TEMPLATE.format(question="What colour is the tail?"),
        do_rescale=False,
        return_tensors="pt",
    )
    assert_close(inputs["pixel_values"], recipe.preprocess.normalise(sample.image[None]))
    native = model(**inputs).logits[:, -1]
    teacher = Teacher(words, "cpu")
    assert_close(
        native,
        answer(model, teacher, inputs["pixel_values"], words.prompt("What colour is the tail?")[1]),
        atol=1e-5,
        rtol=0,
    )
    assert (
        model.generate(**inputs, max_new_tokens=2, do_sample=False).shape[1]
        <= inputs["input_ids"].shape[1] + 2
    )
