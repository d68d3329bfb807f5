"""`seecause heads` on vision-language models that answer as classifiers."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

import seecause as sc
from seecause.cli import heads as commands
from seecause.cli.heads_options import TRAIN, AskedModel, AskedRun, Scope
from seecause.cli.heads_prune import _check_form
from seecause.cli.options import Device, Dtype, grouped
from seecause.errors import BadOption
from tests.cli.calls import SMALL, heads, table
from tests.lvlm.toy import save_toy


@pytest.mark.slow
def test_a_vision_language_model_is_audited_scored_and_pruned(tmp_path):
    model, some = save_toy(tmp_path / "llava"), ("--limit", 24, "--masks", "oracle")
    for scope, shape in (("vision", (2, 2)), ("llm", (3, 4))):
        words = ("--model", model, "--classify", "name_ll", "--scope", scope)
        done = heads("score", *words, *some, "--share", 1, *SMALL, tmp_path / scope)
        assert done.exit_code == 0, done.output
        rows = table(tmp_path / scope / "scores.csv")
        assert len(rows) == shape[0] * shape[1]
        assert all(
            float(row["score"]) == 0 for row in rows if scope == "vision" and row["layer"] == "1"
        )  # LLaVA drops its last block
    done = heads("audit", *words, "--masks", "oracle", "--limit", 4, *SMALL, tmp_path / "a")
    assert done.exit_code == 0 and len(table(tmp_path / "a" / "audit.csv")) == 4, done.output
    done = heads(
        "prune",
        *words,
        *some,
        "--by",
        "weight-norm",
        "--top",
        2,
        "--share",
        1,
        "--test-limit",
        32,
        "--draws",
        1,
        *SMALL,
        tmp_path / "p",
    )
    assert done.exit_code == 0, done.output
    removed = json.loads((tmp_path / "p" / "manifest.json").read_text())["removed"]
    pruned = sc.lvlm.load(str(tmp_path / "p" / "model"))
    for layer, head in removed:
        width = pruned.blocks[layer].head_dim
        assert (
            not pruned.blocks[layer]
            .native.self_attn.o_proj.weight[:, head * width : (head + 1) * width]
            .any()
        )
    cases = {
        "--form='sliced'": ("prune", *words, "--form", "sliced"),
        "--classify name_ll or label_token beside it": ("score", "--scope", "llm"),
        "a vision-language model brings its own": ("score", *words, "--weights", "random"),
        "--classify name_ll (or label_token) beside a vision-language model": (
            "score",
            "--model",
            model,
        ),
    }
    for message, given in cases.items():
        done = heads(*given, *SMALL, tmp_path / "out")
        assert done.exit_code == 2 and message in done.stderr, done.output


def test_an_asked_model_is_opened_as_it_is_stored_and_a_classifier_in_float32(monkeypatch):
    monkeypatch.setattr("seecause.cli.lvlm_options.open_lvlm", lambda name, device, dtype: dtype)
    monkeypatch.setattr("seecause.lvlm.classifier", lambda opened, *_, **__: opened)
    monkeypatch.setattr("seecause.loading.load", lambda name, *, dtype, **_: dtype)

    def opened(model: str, dtype: Dtype | None):
        run = AskedRun(out=Path("unused"), device=Device.cpu, dtype=dtype)
        return AskedModel(model=model).ask(TRAIN, run)

    assert opened("builtin:critters-llava", None) is None
    assert opened("builtin:critters-llava", Dtype.bfloat16) is Dtype.bfloat16
    assert opened("builtin:critters-vit", None) == "float32"
    assert opened("builtin:critters-vit", Dtype.float64) == "float64"
    for command in (commands.audit, commands.score, commands.prune, commands.ablation_study):
        assert signature(grouped(command)).parameters["dtype"].default is None


@pytest.mark.parametrize("asked", [{"scope": Scope.llm}, {"question": "Why?"}])
def test_a_classifier_is_asked_nothing(monkeypatch, asked):
    monkeypatch.setattr("seecause.loading.load", lambda *_, **__: pytest.fail("it was loaded"))
    run = AskedRun(out=Path("unused"), device=Device.cpu)
    with pytest.raises(BadOption, match="a classifier is asked nothing"):
        AskedModel(model="builtin:critters-vit", **asked).ask(TRAIN, run)


def test_a_model_without_tokens_is_refused_by_what_scores_heads_and_not_by_its_form():
    _check_form(SimpleNamespace(architecture="staged"), "sliced")


def test_critters_llava_looks_at_the_creature(tmp_path):
    done = heads(
        "audit",
        "--model",
        "builtin:critters-llava",
        "--data",
        "critters:clean:test",
        "--masks",
        "oracle",
        "--limit",
        3,
        *SMALL,
        tmp_path / "a",
    )
    assert done.exit_code == 0, done.output
    rows = table(tmp_path / "a" / "audit.csv")
    assert all(row["answer"] == row["label"] and row["flips"] == "0" for row in rows)


def test_a_model_of_words_is_asked_what_it_is_told_to_be_asked(opened, called, monkeypatch):
    monkeypatch.setattr("seecause.cli.lvlm_options.open_lvlm", lambda *words: words)
    data = SimpleNamespace(classes=("a", "b"))
    monkeypatch.setattr("seecause.data.registry.open_data", lambda name, *, limit: data)
    line = "heads score --model hf:x --classify label_token --scope llm --device cpu --data"
    for words, question in (
        ("folder:x", "What is in the picture?"),
        ("folder:x --question Why?", "Why?"),
        ("critters:clean:test --question Why?", "Why?"),
    ):
        reached = called(f"{line} {words}", "seecause.lvlm.classifier")
        assert reached.words == (("hf:x", "cpu", None), ("a", "b"))
        assert reached.options == {"question": question, "by": "label_token", "scope": "llm"}
