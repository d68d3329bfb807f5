"""A user's mistake is one line that says what was expected, exit code 2, and nothing written."""

import pytest

from tests.cli.calls import invoke, photo

SAMPLE = "critters:clean:test#3"
MISTAKES = {  # words -> what is said
    "explian": 'Did you mean "explain"?',
    "explain": "at least one image",
    f"explain {SAMPLE} --metod caap": "Did you mean --method?",
    f"explain {SAMPLE} --class tabbi": "class 'tabbi' not found",
    f"explain {SAMPLE} --class 1000": "0 to 7",
    f"explain {SAMPLE} --method capp": "caap",
    f"explain {SAMPLE} --option tale=source": "one of caap: tail",
    f"explain {SAMPLE} --option tail": "KEY=VALUE",
    f"explain {SAMPLE} --option x.tail=patched": "[NAME.]KEY=VALUE with one of caap",
    f"explain {SAMPLE} --option tail=sauce": "patched",
    f"explain {SAMPLE} --model timm:tset_vit": "test_vit",
    f"explain {SAMPLE} --model tim:test_vit": "timm:NAME",
    f"explain {SAMPLE} --model ./nowhere": "nowhere",
    f"explain {SAMPLE} --model timm:test_vit --weights nowhere.safetensors": "nowhere.safetensors",
    f"explain {SAMPLE} --classes missing.txt": "missing.txt",
    f"explain {SAMPLE} --input mean=0.5,x,1": "mean=R,G,B",
    f"explain {SAMPLE} --input size=big": "size=H[,W]",
    f"explain {SAMPLE} --input shape=3": "mean=R,G,B",
    f"explain {SAMPLE} --seed -1": "--seed",
    f"explain {SAMPLE} --device tpu": "--device",
    f"explain {SAMPLE} --workers -1": "--workers",
    "explain nowhere.png --model nowhere": "nowhere.png: no such file",
    "explain critters:clean:test#99999999": "99999999",
    "audit --data nowhere:x --limit 30": "nowhere:x",
    "audit --max-flips 2": "--max-flips",
    "audit --data critters:clean:test --masks-from timm:nothing": "nothing",
    "audit --option fils=grey --masks-from own": "fils",
    "audit --option x.y=1": "x",
    "audit --classify by_luck": "name_ll",
    "repair --option epochs=3": "REMEDY.KEY=VALUE",
    "repair --remedies prayer": "prayer",
    "discover --pairs 1,a": "--pairs",
    "discover --option colour=1 --limit 8": "colour",
    "heads score --by magic": "magic",
    "heads score --option colour=1": "colour",
    "heads score --option sample.share=2": "share",
    "heads prune --top many": "a count such as 16",
    "heads prune --top 1.5": "share",
    "heads prune --option form=round": "form",
    "heads prune --fill pink": "--fill",
    "faithful evaluate nowhere": "nowhere",
    "faithful evaluate builtin:critters-ifam --quantiles a": "numbers with commas",
    "faithful intervene builtin:critters-ifam --drop 77": "77",
    "faithful train --option learning.rate=1": "losses.KEY=VALUE",
    "faithful train --option learnin_rate=1": "learnin_rate",
    "faithful evaluate builtin:critters-ifam --option steps=1": "calibration",
    "lvlm trace critters:clean:test#3": "--question",
    "lvlm trace nowhere.png --question Q": "nowhere.png",
    "lvlm trace critters:clean:test#3 --question Q --ablated 4": "--ablated",
    "lvlm trace critters:clean:test#3 --question Q --model hf:./nowhere": "--calibration",
    "lvlm trace critters:clean:test#3 --question Q --bank nowhere": "nowhere",
    "lvlm trace critters:clean:test#3 --question Q --masks 2": "--masks",
    "lvlm edit critters:clean:test#3 --question Q --heads (0,1)": "one of --blind",
    "lvlm edit critters:clean:test#3 --question Q --heads 0.x --blind": "--heads",
    "lvlm bank critters --size big": "--size",
    "bench run --method capp": "caap",
    "bench run --metric insrtion --limit 2": "insrtion",
    "bench run --option caap.tale=1 --limit 2": "tale",
    "bench run --option run.speed=9": "threads",
    "bench run --option ray.speed=9": "num_gpus",
    "bench report nowhere": "nowhere",
    "list nonsense": "methods",
    "list methods capp": "caap",
    "list metrics aupr1": "only methods and selectors",
    "doctor --list-classes": "--model",
    "serve --runs nowhere": "nowhere",
    "serve --model a --model b --weights w": "exactly one with --weights",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "bank critters" in line:
        photo(tmp_path / "critters", format="PNG")
    done = invoke(*line.split(), "--device", "cpu") if needs_device(line) else invoke(*line.split())
    said = [text for text in done.stderr.splitlines() if text.startswith("seecause: ")]
    assert done.exit_code == 2 and len(said) == 1, done.output
    assert MISTAKES[line] in said[0], said[0]
    written = {path.name for path in tmp_path.iterdir()} - {"critters"}
    assert not [name for name in written if not name.endswith(".work")], written


def needs_device(line: str) -> bool:
    return line.startswith(("audit", "repair", "discover", "heads", "bench run"))


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    words = ("explain", SAMPLE, "--method", "center", "--out", tmp_path)
    assert "--overwrite" in invoke(*words).stderr
    assert invoke(*words, "--overwrite", "--quiet").exit_code == 0
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").touch()
    assert "a folder that can be written" in invoke(*words[:-1], tmp_path / "file").stderr
