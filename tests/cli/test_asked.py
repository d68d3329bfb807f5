"""What commands make of their words before and after the work: what is explained, who is asked,
what is left to do, how a study ends."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from seecause.attribution.explain import PictureRegion
from seecause.bench.plan import Shard
from seecause.cli import app, bench, explain, heads_options
from seecause.cli.audit import EyeOptions, Limits
from seecause.cli.options import Output
from seecause.cli.workers import WorkerOptions
from seecause.critters.questions import wordings
from seecause.errors import BadOption, MissingWeights, NoClassifier
from seecause.models.rows import Box, Region
from seecause.report.page import Section
from tests.cli.spies import MODEL, Reached, reach


def invoke(line: str):
    return CliRunner().invoke(app, line.split())


TARGETS = {
    "--box 3": Box(3),
    "--box 3:left": Box(3, None, "left"),
    "--box 3:cat": Box(3, "cat"),
    "--box 3 --class dog": Box(3, "dog"),
    "--region 1,2": Region((1, 2)),
    "--region 1,2,3,4 --class dog": Region((1, 2, 3, 4), "dog"),
    "--region 1,2:cat": Region((1, 2), "cat"),
    "": None,
    "--class dog": "dog",
}


def about(line: str) -> explain.AskedAbout:
    words = line.split()
    flags = zip(words[::2], words[1::2], strict=True)
    return explain.AskedAbout(**{{"--class": "class_"}.get(f, f[2:]): value for f, value in flags})


@pytest.mark.parametrize("line", TARGETS)
def test_what_is_explained(line):
    steps = SimpleNamespace()
    model = SimpleNamespace(aimed=False, preprocess=steps)
    target, expected = about(line).target(model), TARGETS[line]
    if isinstance(expected, Region):
        assert isinstance(target, PictureRegion) and target.steps is steps
        target, expected = vars(target.region), vars(expected)
    assert target == expected


def test_what_is_explained_is_named_once_and_a_class_of_many_rows_by_its_number(tmp_path):
    model = SimpleNamespace(aimed=True, preprocess=None, class_index={"dog": 5}.get)
    assert about("--class dog").target(model) == 5 and about("").target(model) is None
    for line, words in (
        ("--box 3 --region 1,2", "not both"),
        ("--box 3:cat --class dog", "--box names cat"),
        ("--region 1,2:cat --class dog", "--region names cat"),
    ):
        with pytest.raises(BadOption, match=words):
            about(line).target(model)
    mask = np.zeros((4, 6), np.uint8)
    mask[1:3, 2:] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    region = about(f"--region {tmp_path}/mask.png --class dog").target(model).region
    assert region.label == "dog" and torch.equal(region.where > 0, torch.from_numpy(mask > 0))


def test_an_option_that_no_method_has_is_told_those_there_are():
    for methods, words in ((["sobel"], "there are none"), (["caap", "rise"], "masks.*tail")):
        with pytest.raises(BadOption, match=words):
            explain._options_of(methods, ["tale=1"], seed=0, architecture="transformer")
    for wrong in ("tail", "=patched"):
        with pytest.raises(BadOption, match="key=value"):
            explain._options_of(["caap"], [wrong], seed=0, architecture="transformer")


def test_rows_of_an_answer_are_told_with_their_boxes(monkeypatch):
    monkeypatch.setattr(
        "seecause.report.explain_pictures.row_text", lambda row: f"{row['row']}: cat"
    )
    monkeypatch.setattr(
        "seecause.report.explain_pictures.box_texts", lambda row: ["box 1", "box 2"]
    )
    model = SimpleNamespace(name="toy", random_weights=False)
    rows = [{"name": "a.png", "row": "box 3", "answers": []}, {"name": "b.png", "error": "cut"}]
    assert explain._lines(rows, model) == ["a.png: box 3: cat", "  box 1", "  box 2"]


OWN_FLAGS = {
    "mask_steps": "--steps", "masks": "--masks", "baseline": "--fill", "operator": "--operator",
    "guard": "--guard", "screen": "--screen", "seed": "--seed",
}  # fmt: skip


def test_an_option_with_a_flag_of_its_own_names_it():
    for key, flag in OWN_FLAGS.items():
        with pytest.raises(BadOption, match=f"--option='{key}=1'.*expected {flag}, which is"):
            heads_options.HeadSelector(option=[f"{key}=1"]).options()
    for key, flag in (("steps", "--steps"), ("cache", "--mask-cache")):
        with pytest.raises(BadOption, match=f"--mask-option='{key}=1'.*expected {flag}, which is"):
            heads_options.SearchOptions(mask_option=[f"{key}=1"]).made()
    for wrong in ("temperature", "=2"):
        with pytest.raises(BadOption, match="such as temperature=2"):
            heads_options.HeadSelector(option=[wrong]).options()


def test_only_one_variant_of_imagenet9_has_a_twin(opened):
    twin = heads_options.same_backgrounds("imagenet9:p:mixed_rand", 3)
    assert twin == "imagenet9:p:mixed_same, 3"
    for data in ("imagenet9:p:original", "folder:p:mixed_rand", "imagenet9:mixed_rand:p"):
        assert heads_options.same_backgrounds(data, 3) is None


def test_a_screen_takes_its_own_options_and_leaves_the_others():
    options = ["verify=5", "audit=3", "half=False", "temperature=2"]
    chosen = heads_options.HeadSelector(screen=2, option=options).options()
    screen = chosen.pop("screen")
    assert chosen == {"temperature": 2}
    assert (screen.top, screen.verify, screen.audit, screen.half) == (2, 5, 3, False)
    with pytest.raises(BadOption, match="the screen of greedy"):
        heads_options.HeadSelector(by="greedy", screen=2, option=["verify=many"]).options()
    assert heads_options.HeadSelector(option=["verify=5"]).options() == {"verify": 5}


def test_a_classifier_is_asked_nothing_and_what_is_none_is_told_how(opened, monkeypatch):
    run = heads_options.AskedRun(out=Path("out"))
    for words in ({"scope": heads_options.Scope.llm}, {"question": "why"}):
        (flag,) = words
        with pytest.raises(BadOption, match=rf"--{flag}=.*--classify name_ll"):
            heads_options.AskedModel(**words).ask("d", run)

    def refuse(*_, **__):
        raise NoClassifier("hf:x")

    monkeypatch.setattr("seecause.loading.load", refuse)
    with pytest.raises(BadOption, match=r"--model='hf:x'.*--classify name_ll"):
        heads_options.AskedModel(model="hf:x").ask("d", run)
    asked = heads_options.AskedModel(model="hf:x", classify="name_ll", weights="w")
    with pytest.raises(BadOption, match="--weights='w'"):
        asked.ask("d", run)
    monkeypatch.setattr(
        "seecause.data.registry.open_data", lambda *_, **__: SimpleNamespace(classes=())
    )
    with pytest.raises(BadOption, match="class names"):
        heads_options.AskedModel(model=heads_options.ASKED).ask("d", run)


def test_the_embedded_model_of_words_is_asked_for_the_creature_by_name(opened, called, monkeypatch):
    monkeypatch.setattr("seecause.cli.lvlm_options.open_lvlm", lambda *words: words)
    limits = []

    def open_data(name, *, limit):
        limits.append(limit)
        return SimpleNamespace(classes=("a", "b"))

    monkeypatch.setattr("seecause.data.registry.open_data", open_data)
    line = "heads score --model builtin:critters-llava --device cpu"
    reached = called(line, "seecause.lvlm.classifier")
    assert reached.words == (("builtin:critters-llava", "cpu", None), ("a", "b"))
    question = wordings("creature")[0]
    assert reached.options == {"question": question, "by": "name_ll", "scope": "vision"}
    assert limits == [1]


def test_an_eye_that_is_not_here_names_the_flag(monkeypatch):
    def refuse(*_, **__):
        raise MissingWeights("timm:x", "no network", "remedy")

    monkeypatch.setattr("seecause.background.objects.eye", refuse)
    with pytest.raises(BadOption, match=r"--eye='timm:x'.*--eye-weights FILE.*no network"):
        EyeOptions(eye="timm:x").open(MODEL)
    with pytest.raises(MissingWeights):
        EyeOptions(eye="timm:x", eye_weights="w").open(MODEL)


def test_options_of_an_eye_need_one_that_looks():
    for options, cache, flag in (
        ({"eye_weights": "w"}, None, "--eye-weights"),
        ({"eye": "own", "eye_weights": "w"}, None, "--eye-weights"),
        ({"eye": "given", "eye_method": "caap"}, None, "--eye-method"),
        ({}, Path("c"), "--eye-cache"),
    ):
        with pytest.raises(BadOption, match=f"{flag}=.*--eye NAME of another network"):
            EyeOptions(**options).open(MODEL, cache)
    assert EyeOptions(eye="given").open(MODEL) == "given" and EyeOptions().open(MODEL) is None


def test_what_cannot_be_met_or_searched_is_refused_at_once(monkeypatch):
    with pytest.raises(BadOption, match="--max-flips, --max-bir, --min-accuracy, --min-worst-gr"):
        Limits().checked()
    with pytest.raises(BadOption, match="the mask search"):
        heads_options.SearchOptions(mask_option=["blur=1"]).made()
    monkeypatch.setattr("seecause.loading.load", lambda *_, **__: pytest.fail("it was loaded"))
    for line, words in (
        ("heads audit --masks oracle --mask-option rho=0.2", "give --masks discovered or both"),
        ("heads ablation-study k --guard protect", "penalty or none: studies compare masks"),
        ("heads prune --top many", "--top='many'"),
        ("heads score --option temperature", "such as temperature=2"),
    ):
        done = invoke(line)
        assert done.exit_code == 2 and words in done.stderr, done.output


def test_left_out_metrics_are_told_by_reason_and_what_is_left_is_counted(monkeypatch, tmp_path):
    shards = [Shard("p", "caap", 0, 3, ""), Shard("q", "caap", 3, 5, ""), Shard("r", "x", 0, 3, "")]
    worker = SimpleNamespace(
        plan=SimpleNamespace(shards=shards),
        left_out={"aupr1": "no masks", "saco": "no groups", "aupr0": "no masks"},
    )
    state = SimpleNamespace(complete=True)

    def run(out, worker, *, workers, advance):
        advance(2)
        return state

    monkeypatch.setattr("seecause.bench.prepare", lambda *_, **__: worker)
    monkeypatch.setattr("seecause.bench.Store.finished", lambda store, plan: shards[1:2])
    monkeypatch.setattr("seecause.bench.run", run)
    monkeypatch.setattr(bench, "tell_status", lambda state, *, quiet: typer.echo(f"quiet {quiet}"))
    monkeypatch.setattr(bench, "status_facts", lambda state: {})
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    done = invoke(f"bench run --out {tmp_path}/run")
    assert done.stderr == (
        "left out: aupr1, aupr0: no masks\nleft out: saco: no groups\nimages x methods: 2 of 6\n"
    )
    assert done.stdout == f"quiet False\nnext: seecause bench report {tmp_path}/run\n"
    done = invoke(f"bench run --out {tmp_path}/run --quiet")
    assert (done.stderr, done.stdout) == ("", "quiet True\n")


def test_an_ablation_is_told_with_its_table_and_where_it_stands(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(bench.BenchRun, "prepare", lambda *_, **__: "worker")
    monkeypatch.setattr(bench.BenchRun, "perform", lambda *_: SimpleNamespace(complete=True))
    monkeypatch.setattr("seecause.bench.ablate.save_depth", lambda *words: calls.append(words))
    monkeypatch.setattr("seecause.report.ablate.write_report", lambda store: ["files", store])
    monkeypatch.setattr(bench, "status_facts", lambda state: {"state": state.complete})
    monkeypatch.setattr(bench, "tell_report", lambda *w, **o: calls.append((w, o)) or {"out": 1})
    for study, quiet in (("layers", ""), ("tail", " --quiet")):
        calls.clear()
        done = invoke(f"bench ablate {study} --json --out {tmp_path}/run{quiet}")
        assert json.loads(done.stdout) == {"out": 1, "state": True}, done.output
        ((out, (files, store)), options) = calls.pop()
        assert (out, files, options) == (f"{tmp_path}/run", "files", {"quiet": bool(quiet)})
        assert store.folder == tmp_path / "run"
        assert [words[1] for words in calls] == ["worker"] * (study == "layers")


@pytest.fixture
def studied(monkeypatch, tmp_path):
    """`seecause study` whose run is made up; figures that were drawn."""
    figures = []

    def draw(figure, path):
        figures.append((figure, path))
        return path.with_suffix(".png")

    status = SimpleNamespace(csv=tmp_path / "s.csv", figure={"x": 1}, holes={}, missing=[], total=9)

    def run(*_, begin, **__):
        done = begin(4)
        done("a cell")
        done("another")
        return status

    monkeypatch.setattr("seecause.report.study.draw_figure", draw)
    monkeypatch.setattr("seecause.bench.study.run_study", run)
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    return status, figures


def test_a_study_that_is_done_is_drawn(studied, tmp_path):
    status, figures = studied
    done = invoke("study s.toml")
    assert done.stdout == f"{tmp_path}/s.csv\n{tmp_path}/s.png\n" and done.exit_code == 0
    assert done.stderr == "cells: 1 of 4\ncells: 2 of 4\n"
    assert figures == [({"x": 1}, tmp_path / "s.csv")]
    done = invoke("study s.toml --quiet")
    assert (done.stdout, done.stderr) == ("", "") and len(figures) == 2
    status.figure = {}
    assert invoke("study s.toml").stdout == f"{tmp_path}/s.csv\n" and len(figures) == 2


def test_a_study_that_is_not_done_leaves_with_1_and_draws_nothing(studied, tmp_path):
    status, figures = studied
    status.missing, status.holes = ["a", "b"], {"a": "no memory"}
    done = invoke("study s.toml")
    assert done.exit_code == 1 and not figures and done.stdout == f"{tmp_path}/s.csv\n"
    assert done.stderr.splitlines()[2:] == [
        "hole: a: no memory", "2 of 9 cells are missing; the same command goes on"
    ]  # fmt: skip


def test_only_the_figure_of_a_study(studied, monkeypatch, tmp_path):
    plan = SimpleNamespace(figure={"y": 2}, name="mine")
    monkeypatch.setattr("seecause.bench.study.read_study", lambda file: plan)
    done = invoke(f"study s.toml --draw --out {tmp_path}")
    assert done.stdout == f"{tmp_path}/mine.png\n"
    assert invoke(f"study s.toml --draw --quiet --out {tmp_path}").stdout == ""
    assert studied[1] == [({"y": 2}, tmp_path / "mine.csv")] * 2


def test_the_demo_is_told_job_by_job(monkeypatch, tmp_path):
    jobs = {"One": 1, "Two": 2}
    protocols, writes, ran = [], [], []

    def run_job(chapter, setting):
        ran.append(chapter)
        sections = [Section(f"{chapter} {k}", "body") for k in range(2)]
        return SimpleNamespace(sections=sections, manifests=[{chapter: 1}], lines=[f"{chapter}!"])

    section = Section("Protocol of it", "body")
    monkeypatch.setattr(
        "seecause.report.page.protocol_section", lambda runs: protocols.append(runs) or section
    )
    monkeypatch.setattr("seecause.critters.demo.JOBS", jobs)
    monkeypatch.setattr("seecause.critters.demo.run_job", run_job)
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    monkeypatch.setattr(Output, "write", lambda *words, **options: writes.append((words, options)))
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and ran == ["One", "Two"], done.output
    (_, manifest, title, sections), options = writes.pop()
    runs = [{"One": 1}, {"Two": 1}]
    assert manifest == {"command": "demo", "runs": runs} and protocols == [runs]
    titles = ["One 0", "One 1", "Two 0", "Two 1", "Protocol of it"]
    assert [part.title for part in sections] == titles and title == "seecause on Critters"
    assert sections[-1] == replace(section, chapter="Protocol")
    assert options["lead"].startswith("Small generated creatures")
    assert done.stderr == "running jobs: 1 of 2\nrunning jobs: 2 of 2\n"
    assert done.stdout == f"One!\nTwo!\npage: {tmp_path / 'out' / 'index.html'}\n"


def test_explain_hands_over_files_names_holes_and_how_to_write(opened, called, tmp_path):
    for name in ("a.png", "b.png"):
        Path(tmp_path / name).touch()
    line = f"explain {tmp_path} --method sobel"
    for more, overwrite in (("", False), (" --overwrite", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("seecause.attribution.explain.explain_batches", lambda *w, **o: (w, o))
            reached = called(f"{line}{more}", "seecause.report.explain.explain_to_folder")
        files = [str(tmp_path / name) for name in ("a.png", "b.png")]
        out, (words, options), *named = reached.words
        assert (out, named) == (tmp_path / "out", [files, ["a.png", "b.png"]])
        assert words == (MODEL, files) and options["holes"] is reached.options["holes"] == []
        assert reached.options["overwrite"] is overwrite


def test_methods_that_nobody_named_are_the_usual_ones_or_that_of_the_options(
    opened, called, monkeypatch, tmp_path
):
    (tmp_path / "a.png").touch()
    module = importlib.import_module("seecause.attribution.explain")
    monkeypatch.setattr(module, "default_methods", lambda m: ("sobel", "random") * (m is MODEL))
    place, line = "seecause.attribution.explain.explain_batches", f"explain {tmp_path}/a.png"
    reached = called(f"{line} --seed 4", place)
    assert reached.options["methods"] == ["sobel", "random"]
    assert reached.options["options"] == {"sobel": {}, "random": {"seed": 4}}
    reached = called(f"{line} --option tail=patched", place)
    assert reached.options["methods"] == ["caap"]
    assert reached.options["options"]["caap"]["tail"] == "patched"


def test_a_cluster_is_asked_for_by_an_address(monkeypatch):
    monkeypatch.setattr("seecause.bench.cluster.check_address", reach)
    with pytest.raises(Reached) as reached:
        WorkerOptions(ray="nowhere").made()
    assert reached.value.words == ("nowhere",)
    monkeypatch.setattr("seecause.bench.workers.Workers.checked", lambda workers: [workers.count])
    assert WorkerOptions(workers=3).made() == [3]


def test_frames_are_explained_by_their_film(opened, called, monkeypatch, tmp_path):
    for folder in ("film", "others/film"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.png").touch()
    film = str(tmp_path / "film")
    monkeypatch.setattr(MODEL, "preprocess", SimpleNamespace(inputs=lambda files: [film]))
    line = f"explain {film} --method sobel --without {tmp_path}/others"
    reached = called(line, "seecause.attribution.explain.explain_batches")
    assert reached.words == (MODEL, [film]) and reached.options["names"] == ["film"]
    assert reached.options["others"] == [str(tmp_path / "others" / "film")]
