"""The Parts panel: what it answers is what the network answers under the same intervention."""

import pytest
import torch

import seecause as sc
from seecause.app.panels import parts
from seecause.app.panels.parts import Masked
from seecause.errors import BadOption
from tests.app.conftest import context_of

ON = {"model": "critters-ifam", "picture": "s3"}


@pytest.fixture
def context(state):
    return context_of(state, "critters-ifam")


def agree(answers, logits):
    chances = logits[0].softmax(dim=0)
    for answer in answers:
        assert answer["probability"] == pytest.approx(float(chances[answer["class"]]), abs=1e-5)


@torch.no_grad()
def test_parts_that_are_out_are_not_read(context):
    whole = parts.look(context, Masked(**ON))
    largest = max(whole["parts"], key=lambda part: part["patches"])["part"]
    answer = parts.look(context, Masked(**ON, out=(largest,)))
    with sc.faithful.intervene(context.model, drop_parts=[largest]) as net:
        output = net(context.image("s3"))
    agree(answer["after"], output.logits)
    assert answer["share"] == float(output.mask.double().mean()) < whole["share"]
    assert answer["before"] == whole["after"]
    assert answer["winner"].count(largest) == whole["parts"][largest]["patches"] > 0
    assert not context.model.module.intervention  # the next request begins anew


def test_every_part_out_is_said_to_read_nothing(context):
    answer = parts.look(context, Masked(**ON, out=tuple(range(context.model.module.parts))))
    assert answer["empty"] and answer["share"] == 0


def test_parts_that_are_not_there_are_refused(context):
    with pytest.raises(BadOption):
        parts.look(context, Masked(**ON, out=(99,)))


def test_the_copied_python_gives_the_same_answer(context, capsys):
    request = Masked(**ON, out=(1, 2))
    exec(parts.copy(context, request)["python"], {})
    name, chance = capsys.readouterr().out.splitlines()[0].rsplit(" ", 1)
    leader = next(a for a in parts.look(context, request)["after"] if a["leads"])
    assert (name, float(chance)) == (leader["name"], pytest.approx(leader["probability"], abs=1e-5))
