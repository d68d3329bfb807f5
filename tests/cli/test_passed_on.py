"""Every option reaches the library: each command is called with values that no default has, up to
the one function that does its work, and that function gets all of them under their names."""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from seecause.background.masks import MaskSearch
from seecause.background.prune import Background
from seecause.background.repair import CHEAP
from seecause.cli import app
from seecause.cli.serve import AUDITED
from tests.cli.spies import MODEL, Reached, given, reach

LOADED = {"weights": "w.pth", "device": "cpu", "dtype": "float64", "check": True}
READ = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "size": (96, 128)}
OWN = "--weights w.pth --dtype float64 --device cpu --mean 0.1,0.2,0.3 --std 0.4,0.5,0.6"
OWN += " --size 96,128"


def test_a_model_is_loaded_as_told_everywhere(opened, called, tmp_path):
    (tmp_path / "names.txt").write_text("x\ny\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    lines = {
        f"explain {tmp_path}/a.png": "seecause.attribution.explain.explain_batches",
        "discover": "seecause.background.discover.discover",
        "repair": "seecause.background.repair.repair",
        "audit": "seecause.background.audit.audit",
        "gate --max-flips 1": "seecause.background.audit.audit",
        "heads audit": "seecause.background._heads_audit.heads_audit",
        "heads score": "seecause.background.score_heads",
        "heads prune": "seecause.background.prune_and_test",
        "heads ablation-study k": "seecause.background.ablation_study",
    }
    for line, place in lines.items():
        torch.manual_seed(1)
        called(f"{line} --model timm:x {OWN} --classes {tmp_path}/names.txt --seed 7", place)
        assert torch.initial_seed() == 7, line
        assert opened.pop() == ("timm:x", {**LOADED, **READ, "classes": ("x", "y")}), line
    called("heads score --device cpu", "seecause.background.score_heads")
    plain = {"weights": None, "device": "cpu", "dtype": "float32", "check": True}
    assert opened.pop() == ("builtin:critters-biased", plain)


def test_explain(opened, called, tmp_path):
    for folder in ("with", "without"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "a.png")
    line = f"explain {tmp_path}/with --without {tmp_path}/without --class b --method random,sobel"
    reached = called(
        f"{line} --seed 3 --evidence --interactions", "seecause.attribution.explain.explain_batches"
    )
    assert reached.words == (MODEL, [str(tmp_path / "with" / "a.png")])
    given(
        reached,
        names=["a.png"],
        methods=("random", "sobel"),
        target="b",
        options={"random": {"seed": 3}, "sobel": {}},
        also=["evidence", "interactions"],
    )
    assert [str(other) for other in reached.options["others"]] == [
        str(tmp_path / "without" / "a.png")
    ]
    reached = called(f"{line} --interactions", "seecause.attribution.explain.explain_batches")
    given(reached, also=["interactions"])
    warned = called(f"{line} --model timm:x", "seecause.cli.explain._warn")
    assert warned.words == (MODEL, "timm:x", [str(tmp_path / "with" / "a.png")])


def test_discover(opened, called):
    line = "discover --data d --limit 5 --method caap --layers 1,2 --kinds 7 --trials 9 --seed 4"
    reached = called(line, "seecause.background.discover.discover")
    assert reached.words == (MODEL, "d, 5")
    given(reached, method="caap", layers=[1, 2], kinds=7, trials=9, seed=4)


@pytest.mark.parametrize("command", ["audit", "gate --max-flips 1"])
def test_audit_and_gate(opened, called, monkeypatch, tmp_path, command):
    eyes = []
    module = importlib.import_module("seecause.background.objects")
    monkeypatch.setattr(module, "eye", lambda *w, **o: eyes.append((w, o)) or "eye")
    line = f"{command} --data d --limit 5 --per-picture 3 --seed 4 --eye timm:x --eye-weights w"
    line += f" --eye-method mosaic --eye-cache {tmp_path}/cache"
    reached = called(line, "seecause.background.audit.audit")
    assert reached.words == (MODEL, "d, 5")
    given(reached, eye="eye", per_picture=3, seed=4)
    about = {"model": MODEL, "method": "mosaic", "cache": tmp_path / "cache", "weights": "w"}
    assert eyes == [(("timm:x",), about)]


def test_repair(opened, called, tmp_path):
    line = "repair --data d --test t --limit 5 --remedies heads,directions --option heads.top=3"
    line += " --option directions.top=1 --option heads.rule=sign"
    line += f" --groups --force --per-picture 2 --seed 4 --out {tmp_path}/mended"
    reached = called(line, "seecause.background.repair.repair")
    assert reached.words == (MODEL, "d, 5")
    given(
        reached,
        eye=None,
        test="t, 5",
        seed=4,
        work=tmp_path / "mended.work",
        remedies=("heads", "directions"),
        options={"heads": {"top": 3, "rule": "sign"}, "directions": {"top": 1}},
        groups=True,
        force=True,
        per_picture=2,
    )


SEARCH = "--steps 3 --mask-option rho=0.3 --mask-cache c"
SEARCHED = {"steps": 3, "rho": 0.3, "cache": Path("c")}


def test_heads_audit(opened, called):
    line = f"heads audit --data d --limit 5 --count all --masks discovered {SEARCH}"
    reached = called(line, "seecause.background._heads_audit.heads_audit")
    assert reached.words == (MODEL, "d, 5")
    given(reached, masks="discovered", count="all", same=None, **SEARCHED)
    for masks, limit in (("oracle", 160), ("both", 32)):
        reached = called(
            f"heads audit --data d --masks {masks}", "seecause.background._heads_audit.heads_audit"
        )
        assert reached.words[1] == f"d, {limit}"
    mixed = "heads audit --data imagenet9:p:mixed_rand --limit 4"
    given(called(mixed, "seecause.background._heads_audit.heads_audit"), same="imagenet9:p:mixed_same, 4")


SAMPLED = "--share 0.5 --cap 9 --stratified --masks discovered --fill blur"
CHOSEN = "--by taylor --option remove=2 --operator mean --guard none"


def check_scored(reached):
    sampling, background = reached.options["sampling"], reached.options["background"]
    assert (sampling.share, sampling.cap, sampling.stratified) == (0.5, 9, True)
    assert (background.masks, background.fill) == ("discovered", "blur")
    assert background.search == SEARCHED


def test_heads_score_and_prune(opened, called):
    shared = f"--data d --limit 5 {SAMPLED} {SEARCH} {CHOSEN} --seed 4"
    options = {"remove": 2, "operator": "mean", "guard": "none"}
    reached = called(f"heads score {shared}", "seecause.background.score_heads")
    assert reached.words == (MODEL, "d, 5")
    given(reached, selector="taylor", options=options, seed=4)
    check_scored(reached)
    more = "--test t --test-limit 6 --top 3 --draws 2"
    reached = called(f"heads prune {shared} {more}", "seecause.background.prune_and_test")
    assert reached.words == (MODEL, "d, 5", "t, 6")
    given(reached, selector="taylor", options=options, seed=4, top=3, draws=2, same=None)
    check_scored(reached)
    mixed = f"heads prune {shared} --test imagenet9:p:mixed_rand --test-limit 6 --top 0.5"
    given(
        called(mixed, "seecause.background.prune_and_test"),
        top=0.5,
        same="imagenet9:p:mixed_same, 6",
    )
    screened = "heads score --screen 2 --option verify=5 --option half=False"
    screen = called(screened, "seecause.background.score_heads").options["options"]["screen"]
    assert (screen.top, screen.verify, screen.half) == (2, 5, False)


def test_heads_ablation_study(opened, called):
    line = f"heads ablation-study masks --data d --limit 5 {SAMPLED} {SEARCH} --seed 4"
    more = "--test t --test-limit 6 --top 3 --draws 2"
    reached = called(f"{line} {more} --guard none", "seecause.background.ablation_study")
    assert reached.words == ("masks", MODEL, "d, 5", "t, 6")
    given(reached, top=3, draws=2, seed=4, guard=False)
    check_scored(reached)
    given(called(line, "seecause.background.ablation_study"), guard=True)


@pytest.mark.parametrize("command", ["heads score", "audit", "gate --max-flips 1"])
def test_a_vision_language_model_is_asked_as_told(opened, called, monkeypatch, command):
    monkeypatch.setattr("seecause.cli.lvlm_options.open_lvlm", lambda *words: words)
    monkeypatch.setattr(
        "seecause.data.registry.open_data", lambda *_, **__: SimpleNamespace(classes=("a", "b"))
    )
    line = f"{command} --model hf:x --data d --device cpu --dtype bfloat16 --classify label_token"
    for question in ("", "Why"):
        asked = f"--scope llm{' --question ' * bool(question)}{question}"
        reached = called(f"{line} {asked}", "seecause.lvlm.classifier")
        assert reached.words == (("hf:x", "cpu", "bfloat16"), ("a", "b"))
        expected = question or "What is in the picture?"
        assert reached.options == {"question": expected, "by": "label_token", "scope": "llm"}


def test_bench(called, monkeypatch, tmp_path):
    (tmp_path / "names.txt").write_text("x\ny\n")
    shared = f"--model timm:x {OWN} --classes {tmp_path}/names.txt --data d --limit 5 --seed 4"
    shared += " --metric-option steps=3 --target predicted --threads 2 --memory 3 --shard-size 7"
    expected = {
        "model": "timm:x", "weights": "w.pth", "reading": {**READ, "classes": ("x", "y")},
        "data": "d", "limit": 5, "target": "predicted", "threads": 2, "memory": 3 << 20,
        "shard_size": 7, "seed": 4, "device": "cpu", "dtype": "float64",
    }  # fmt: skip
    run = "--method caap,random --option caap.tail=patched --metric aupr1,insertion"
    both = {"caap": {}, "random": {}}
    for line, option, more in (
        (f"bench run {run}", ("caap", "tail", "patched"),
         {"methods": both, "metrics": ("aupr1", "insertion"), "study": ""}),
        ("bench ablate tail --option score=logit", ("", "score", "logit"),
         {"methods": {"caap": {}}, "metrics": ("paper",), "study": "tail"}),
    ):  # fmt: skip
        reached = called(f"{line} {shared}", "seecause.bench.prepare")
        (request,) = reached.words
        for name, value in {**expected, **more}.items():
            assert getattr(request, name) == value, name
        assert reached.options == {
            "options": [option], "metric_options": [("", "steps", 3)]
        }  # fmt: skip
    reached = called("bench ablate tail", "seecause.bench.prepare")
    assert reached.words[0].limit == 64 and reached.words[0].target == "label"


HANDS = "--workers 3 --ray local --cpus-per-worker 2 --gpus-per-worker 0.5 --memory-per-worker 1.5"


def test_workers(called, monkeypatch, tmp_path):
    worker = SimpleNamespace(plan=SimpleNamespace(shards=()), left_out={})
    monkeypatch.setattr("seecause.bench.prepare", lambda *_, **__: worker)
    monkeypatch.setattr("seecause.bench.workers.Workers.checked", lambda self: self)
    monkeypatch.setattr("seecause.bench.cluster.check_address", lambda address: None)
    monkeypatch.setattr("seecause.bench.Store.finished", lambda *_: [])
    places = {
        f"bench run --out {tmp_path}/run": "seecause.bench.run",
        f"study study.toml --out {tmp_path}": "seecause.bench.study.run_study",
    }
    for line, place in places.items():
        workers = called(f"{line} {HANDS}", place).options["workers"]
        assert (workers.count, workers.ray) == (3, "local")
        assert (workers.cpus, workers.gpus, workers.memory) == (2, 0.5, 1536 << 20)
    reached = called(
        f"heads score --out {tmp_path}/scores --work {tmp_path}/pieces {HANDS}",
        "seecause.bench.pieces.resumable",
    )
    folder, name, workers = reached.words
    assert (folder, name, workers.count) == (f"{tmp_path}/pieces", "heads score", 3)
    reached = called(f"audit --out {tmp_path}/audit", "seecause.bench.pieces.resumable")
    assert reached.words[:2] == (tmp_path / "audit.work", "audit")


def test_study(called, tmp_path):
    line = "study s.toml --limit 3 --device cpu --minutes 2 --only x --real r --models m --work w"
    reached = called(f"{line} --out {tmp_path}", "seecause.bench.study.run_study")
    assert str(reached.words[0]) == "s.toml"
    given(reached, limit=3, device="cpu", minutes=2, only="x", out=tmp_path, work="w")
    assert (str(reached.options["real"]), str(reached.options["models"])) == ("r", "m")
    given(called(f"study s.toml --out {tmp_path}", "seecause.bench.study.run_study"), minutes=1e9)


def test_faithful(called, monkeypatch, tmp_path):
    opens = []
    monkeypatch.setattr(
        "seecause.faithful.open_network", lambda name, **o: opens.append((name, o)) or "net"
    )
    shared = "run --data d --calibration 3 --by dot --limit 5 --batch 2 --device cpu"
    about = {"data": "d", "calibration": 3, "by": "dot", "limit": 5, "batch": 2}

    def reached_by(line, place):
        monkeypatch.setattr(place, reach)
        done = CliRunner().invoke(app, ["faithful", *line.split()])
        assert isinstance(done.exception, Reached), (done.output, done.exception)
        return done.exception

    line = f"evaluate {shared} --quantiles 0.5,0.6 --choose worst --no-keypoints --random-cuts"
    reached = reached_by(line, "seecause.faithful.evaluate")
    assert reached.words == ("net",)
    given(reached, interventions=True, quantiles=[0.5, 0.6], choose="worst", **about)
    given(reached, keypoints=False, random_cuts=True)
    plain = reached_by(f"{line} --no-interventions", "seecause.faithful.evaluate")
    given(plain, interventions=False, quantiles=[])
    line = f"intervene {shared} --drop 2,5 --quantile 0.9"
    reached = reached_by(line, "seecause.faithful.evaluate_intervention")
    given(reached, drop_parts=[2, 5], quantile=0.9, **about)
    assert reached.options["progress"].keywords == {"quiet": False}
    quiet = reached_by(f"{line} --quiet", "seecause.faithful.evaluate_intervention")
    assert quiet.options["progress"].keywords == {"quiet": True}
    line = f"parts run --data d --limit 5 --device cpu --out {tmp_path}/parts"
    given(reached_by(line, "seecause.faithful.example_parts"), data="d", limit=5)
    assert opens == [("run", {"device": "cpu"})] * 5
    line = "train --data d --backbone b --parts 3 --out o --config c --epochs 4 --batch 5"
    line += " --weights w --device cpu --seed 6 --option losses.class1=0 --option select=worst"
    reached = reached_by(line, "seecause.faithful.read_config")
    assert str(reached.words[0]) == "c" and reached.options == {
        "data": "d", "backbone": "b", "parts": 3, "out": "o", "epochs": 4, "batch": 5,
        "weights": "w", "device": "cpu", "seed": 6, "losses": {"class1": 0}, "select": "worst",
    }  # fmt: skip


def test_zoo_train(called, tmp_path):
    line = "zoo train builtin:critters-vit --samples 8 --batch 4 --test-samples 9 --device cpu"
    line += f" --seed 3 --background-reliability 0.5 --start {tmp_path} --out {tmp_path}"
    reached = called(line, "seecause.critters.train.find_recipe")
    assert reached.words == ("critters-vit",)
    given(reached, samples=8, batch=4, seed=3, background_reliability=0.5)
    line = f"zoo train critters-vit --test-samples 9 --device cpu --start {tmp_path}/s"
    reached = called(f"{line} --out {tmp_path}/o", "seecause.critters.train.train")
    given(reached, out=tmp_path / "o", start=tmp_path / "s", device="cpu", test_samples=9)


def test_demo(called):
    (_, setting) = called("demo --device cpu --seed 3", "seecause.critters.demo.run_job").words
    assert (setting.device, setting.seed) == ("cpu", 3)


def test_a_gpu_that_is_there_is_taken(called, monkeypatch, tmp_path):
    """Where Python takes the CPU unless told otherwise, what is picked must be handed on."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert called("demo", "seecause.critters.demo.run_job").words[1].device == "cuda"
    assert called("bench run", "seecause.bench.prepare").words[0].device == "cuda"
    given(called("study s", "seecause.bench.study.run_study"), device="cuda")
    given(called("zoo train critters-vit", "seecause.critters.train.train"), device="cuda")


def test_serve(called, monkeypatch, opened, tmp_path):
    shops, threads, places = [], [], []
    monkeypatch.setattr("seecause.app.state.open_state", lambda m, **o: shops.append((m, o)))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    (tmp_path / "runs").mkdir()
    line = (
        f"serve --model timm:x {OWN} --seed 7 --picture critters:clean:test#1 --data critters:clean"
    )
    line += f" --runs {tmp_path}/runs --host 127.0.0.1 --port 9 --open --quiet"

    def tried(*place):
        return SimpleNamespace(close=lambda: places.append(place))

    def listened(words):
        with monkeypatch.context() as patch:
            patch.setattr("seecause.cli.serve._listen", reach)
            patch.setattr("seecause.cli.serve.bound_socket", tried)
            return CliRunner().invoke(app, words.split()).exception

    reached = listened(line)
    assert reached.words == (None, "127.0.0.1", 9) and threads == [1]
    assert reached.options == {"token": None, "browser": True, "quiet": True}
    models, options = shops.pop()
    assert models == ["timm:x"] and options["weights"] == "w.pth" and options["reading"] == READ
    assert list(options["samples"]) == ["critters:clean:test#1"] and len(options["runs"]) == 1
    assert list(options["data"].values()) == ["critters:clean"]
    options["load"]("timm:y")
    assert opened.pop() == ("timm:y", {**LOADED, **READ})
    reached = listened("serve --host 0.0.0.0")
    assert len(reached.options["token"]) == 22 and reached.words[1:] == ("0.0.0.0", 8321)
    assert places == [("127.0.0.1", 9), ("0.0.0.0", 8321)]
    models, options = shops.pop()
    assert len(models) == 4 and list(options["data"].values()) == list(AUDITED)


def test_doctor(opened, monkeypatch):
    monkeypatch.setattr("seecause.cli.doctor.checkup", reach)
    reached = CliRunner().invoke(app, f"doctor --model timm:x {OWN} --seed 7".split()).exception
    assert reached.words == (MODEL,)
    assert opened.pop() == ("timm:x", {**LOADED, **READ, "check": False})


def usual_of(value, default):
    """What Python does by default, as the command line says it: groups, and `None` for nothing."""
    if isinstance(value, Background):
        return Background(search={"steps": MaskSearch().steps})
    return type(value)() if is_dataclass(value) else default or None


def test_commands_have_the_defaults_of_python(opened, called):
    """What is not said means the same on the command line and in Python."""
    places = {
        "discover": "seecause.background.discover.discover",
        "audit": "seecause.background.audit.audit",
        "repair": "seecause.background.repair.repair",
        "heads audit": "seecause.background._heads_audit.heads_audit",
        "heads score": "seecause.background.score_heads",
        "heads prune": "seecause.background.prune_and_test",
        "heads ablation-study k": "seecause.background.ablation_study",
        "study s": "seecause.bench.study.run_study",
        "zoo train critters-vit": "seecause.critters.train.train",
    }
    own = {"progress", "work", "out", "begin"}  # of commands: where they write, what they show
    for line, place in places.items():
        module, _, name = place.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        usual = {p.name: p.default for p in signature(function).parameters.values()}
        usual |= {"steps": MaskSearch().steps, "remedies": CHEAP[1:]}  # "nothing" is always tried
        reached = called(f"{line} --device cpu", place)
        for name in reached.options.keys() - own:
            value = reached.options[name]
            assert (value or None) == usual_of(value, usual[name]), (line, name)
    (request,) = called("bench run --device cpu", "seecause.bench.prepare").words
    differ = {f.name for f in fields(request) if getattr(request, f.name) != f.default}
    made = {"called", "measures", "reading"}  # by a factory, and empty
    assert differ - made == {"model", "data", "methods", "metrics"}
    assert not any(getattr(request, name) for name in made)
