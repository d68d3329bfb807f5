"""`sc.doctor` and `seecause doctor`: every check that applies to a model, made anew."""

import json

import pytest
import timm
import torch

import seecause as sc
from seecause.engine.verify import verify
from seecause.errors import EditLost, ViewMismatch
from seecause.lvlm.model import verify as verify_language
from tests.cli.calls import invoke
from tests.engine.test_canary import DropsGates
from tests.faithful.nets import tiny_net
from tests.lvlm.scenes import scene

PROBES, EDITS = ["logits", "blocks", "attention", "locality"], ["gates", "patch"]


def named(model):
    return [row["name"] for row in sc.doctor(model).rows()]


def test_every_check_that_applies_is_made():
    net = tiny_net()
    parts = ["dropped parts", "hidden patches"]
    assert named(net) == named(sc.wrap(net)) == [*PROBES, *EDITS, *parts]
    assert named(tiny_net(stages=1)) == [*PROBES, *EDITS, "dropped parts"]
    assert named(scene("qwen2_vl").lvlm) == [*PROBES[:3], "edited heads"]
    assert named(timm.create_model("resnet18")) == ["logits", "stages", "resume", "locality"]


def test_a_checkup_has_numbers_and_rows():
    found = sc.doctor(tiny_net())
    numbers, rows = found.numbers(), {row["name"]: row for row in found.rows()}
    assert numbers["hidden patches"] == rows["hidden patches"]["error"] < 1e-10
    assert numbers["hidden patches, moved"] == rows["hidden patches"]["moved"] > 1e-3
    assert rows["logits"]["moved"] is None and "logits, moved" not in numbers
    assert "classes" in rows["logits"]["compared"]
    assert list(found.to_pandas().columns) == ["name", "moved", "error", "compared"]


def test_what_was_shown_before_is_shown_again():
    model = sc.load("builtin:critters-vit")
    sc.doctor(model)
    model.blocks = [DropsGates(**vars(block)) for block in model.blocks]
    with sc.background.ablate(model, [(0, 1)]):
        pass  # shown once, before it broke
    with pytest.raises(EditLost, match="gates"):
        sc.doctor(model)


def test_a_hook_that_never_fires_is_an_error(monkeypatch):
    lvlm, model = scene("llava").lvlm, sc.wrap(tiny_net())
    for run, view in ((verify, model), (verify_language, lvlm)):
        silent = view.blocks[2].native
        monkeypatch.setattr(
            silent, "register_forward_hook", torch.nn.Module().register_forward_hook
        )
        with pytest.raises(
            ViewMismatch, match=f"{len(view.blocks) - 1} of {len(view.blocks)} blocks"
        ):
            run(view)


@pytest.mark.parametrize("name", ["critters-llava", "critters-ifam"])
def test_the_command_prints_what_the_function_finds(name):
    done = invoke("doctor", "--model", f"builtin:{name}", "--device", "cpu")
    assert done.exit_code == 0 and "verified" in done.stdout, done.output
    facts = json.loads(invoke("doctor", "--model", f"builtin:{name}", "--json").stdout)
    model = (sc.lvlm.load if "llava" in name else sc.load)(f"builtin:{name}")
    assert list(facts["verified"]) == named(model)
    assert all(check in done.stdout for check in facts["verified"])
    moved = [each["moved"] for each in facts["verified"].values() if each["moved"] is not None]
    assert moved and min(moved) > 0.05


def test_a_language_model_has_no_classes_to_list():
    done = invoke("doctor", "--model", "builtin:critters-llava", "--list-classes")
    assert done.exit_code == 2 and "not a classifier" in done.stderr
