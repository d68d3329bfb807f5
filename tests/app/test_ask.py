"""The Ask panel: its numbers are those of `sc.lvlm`."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import seecause as sc
from seecause.app.panels import ask
from seecause.app.panels.ask import Asked
from seecause.errors import BadOption, SeecauseError
from tests.app.conftest import context_of

QUESTION = "Which critter is this?"
ON = {"model": "critters-llava", "picture": "s3", "question": QUESTION}


@pytest.fixture
def heard():
    return []


@pytest.fixture
def context(state, heard):
    context = context_of(state, "critters-llava")
    context.progress = lambda share, words="": heard.append((share, words))
    return context


@pytest.fixture
def bank(context):
    return ask._bank(context)


def test_the_answer_is_the_models_own(context):
    answer, lvlm = ask.answer(context, Asked(**ON)), context.lvlm
    ids = lvlm.speak(lvlm.prompt(context.picture("s3").shown, QUESTION), 24)
    assert answer["words"] == list(lvlm.pieces(torch.tensor(ids)))
    assert answer["grid"] == [12, 12] and answer["unknown"] == []
    assert ask.answer(context, Asked(**{**ON, "question": "Which zyzzyva?"}))["unknown"]


def test_heads_and_tokens_are_those_of_a_traced_answer(context, bank, heard):
    heard.clear()
    answer = ask.behind(context, Asked(**ON))
    engine = sc.lvlm.MaskEngine(context.lvlm, context.picture("s3").shown, QUESTION, bank)
    trace = sc.lvlm.trace_answer(engine)
    assert answer["word"] == engine.answer
    heads = trace.heads
    expected = heads.coefficients.flatten().tolist()
    assert [value for row in answer["heads"] for value in row] == pytest.approx(
        expected, rel=1e-3, abs=1e-6
    )
    assert answer["enough"] == trace.chosen.nonzero()[:, 0].tolist()
    assert [(top["layer"], top["head"]) for top in answer["top"]] == heads.top(8)
    first = answer["top"][0]
    assert first["error"] == float(heads.standard_error[first["layer"], first["head"]]) > 0
    tokens = trace.tokens.attribution.coefficients.tolist()
    assert answer["tokens"]["values"] == pytest.approx(tokens, rel=1e-3, abs=1e-6)
    shares = [share for share, _ in heard]
    assert shares == sorted(shares) and len(shares) >= 3


def test_blind_heads_change_the_words_as_masks_change_the_logit(context, bank):
    enough = ask.behind(context, Asked(**ON))["enough"]
    answer = ask.hear(context, Asked(**ON, blind=tuple(enough)))
    picture = context.picture("s3").shown
    engine = sc.lvlm.MaskEngine(context.lvlm, picture, QUESTION, bank)
    mask = torch.ones(engine.n_components, dtype=torch.bool)
    mask[enough] = False
    heads = [divmod(place, context.lvlm.n_heads) for place in enough]
    words = sc.lvlm.AnswerEngine(context.lvlm, picture, QUESTION, bank, answer=[engine.target])
    chances = words.logits(mask[None])[0, 0].softmax(dim=0)
    for word in answer["after"]:
        assert word["probability"] == pytest.approx(float(chances[word["class"]]), abs=1e-5)
    with sc.lvlm.edited_heads(context.lvlm, heads, blind=bank, image=picture):
        ids = context.lvlm.speak(context.lvlm.prompt(picture, QUESTION), 24)
    assert answer["words"] == list(context.lvlm.pieces(torch.tensor(ids)))
    before = {word["class"]: word["probability"] for word in answer["before"]}
    assert float(chances[engine.target]) < before[engine.target]


def test_with_no_head_blind_the_answer_stays(context, bank):
    answer = ask.hear(context, Asked(**ON))
    assert answer["same"] and answer["before"] == answer["after"]


def test_what_is_not_there_is_refused_in_words(context, bank):
    with pytest.raises(BadOption, match="tokens of the answer"):
        ask.behind(context, Asked(**ON, position=20))
    with pytest.raises(BadOption, match="heads 0-47"):
        ask.hear(context, Asked(**ON, blind=(48,)))
    reader = ask.PANEL.find("answer")[1]
    for question in ("", "x" * 301):
        body = f'{{"model": "critters-llava", "picture": "s3", "question": "{question}"}}'
        with pytest.raises(SeecauseError, match="question"):
            reader.read(body.encode())


def test_a_classifier_cannot_be_asked(state):
    context = context_of(state, "critters-vit")
    with pytest.raises(BadOption, match="vision-language"):
        ask.answer(context, Asked(**{**ON, "model": "critters-vit"}))


def test_two_edits_at_once_wait_for_each_other(context):
    served, request = context.served, Asked(**ON, blind=(9,))

    def job(_):
        with served.borrow() as view:
            own = replace(context, view=view)
            return ask.hear(own, request), ask.answer(own, Asked(**ON))["words"]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(job, range(3)))
    assert found == [job(0)] * 3


@pytest.mark.slow
def test_the_copied_python_says_the_same(context, capsys):
    request = Asked(**ON, blind=(0, 4, 9))
    exec(ask.copy(context, request)["python"], {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == ask.answer(context, Asked(**ON))["words"][0]
    assert lines[-1] == " ".join(w.strip() for w in ask.hear(context, request)["words"])
