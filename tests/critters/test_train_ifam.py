"""critters-ifam's recipe at toy size: what it writes, what it draws, and the study around it."""

from __future__ import annotations

import csv
import dataclasses
import json
import re

import pytest
import torch
import typer
from safetensors.torch import load_file

import seecause as sc
from scripts import faithful_page as page
from scripts import faithful_plan as plan
from scripts import faithful_study as study
from seecause.critters import CLASSES, Regime
from seecause.critters.demo import DemoSetting, build
from seecause.critters.train import ifam
from seecause.critters.train.ifam import balanced, choose, measure, measure_changed
from seecause.critters.train.ifam_backbone import distillation, loudest, pretrain, view
from seecause.critters.train.ifam_recipe import (
    RECIPES,
    IfamRecipe,
    backbone_shape,
    batches,
    build_backbone,
)
from seecause.report.page import render_page

CPU = torch.device("cpu")
TINY = backbone_shape() | {"img_size": 48, "embed_dim": 32, "depth": 2, "num_heads": 2}


def tiny(**changes) -> IfamRecipe:
    sizes = {
        "pretraining_samples": 32,
        "pretraining_batch": 16,
        "samples": 64,
        "batch": 16,
        "epochs": 2,
        "regime": "certified",
    }
    return dataclasses.replace(RECIPES["critters-ifam"], architecture=TINY, **(sizes | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("zoo")
    return out, ifam.train(tiny(), out=out, test_samples=32)


def test_three_files_tell_everything(trained):
    out, evaluation = trained
    card = json.loads((out / "critters-ifam.json").read_text())
    assert (
        card["evaluation"] == json.loads(json.dumps(evaluation))
        and tuple(card["classes"]) == CLASSES
    )
    assert all(
        value.dtype in (torch.float16, torch.bool)
        for value in load_file(out / "critters-ifam.safetensors").values()
    )
    rows = list(csv.DictReader((out / "critters-ifam.log.csv").read_text().splitlines()))
    assert [row["phase"] for row in rows] == ["seeing"] * 2 + ["parts"] * 4
    assert {found["quantile"] for found in card["thresholds"]} == {0.97, 0.99}
    assert (
        len(evaluation["validation"]) == 3 * 5
        and "iou" in evaluation["mask"]
        and evaluation["samples"] == 32
    )
    model = sc.load(str(out))
    assert model.layout.grid == (8, 8) and model.module.parts == 4


def test_the_shipped_shape_is_small_enough():
    recipe = RECIPES["critters-ifam"]
    net = ifam.new_net(recipe, build_backbone(recipe))
    assert net.stage1.tower.parts.layout_at(96, 96).grid == (16, 16)
    assert 2 * sum(value.numel() for value in net.state_dict().values()) < 5e6


def test_the_build_job_shows_parts_and_is_skipped_without_its_network(trained):
    out, _ = trained
    page = render_page("Demo", build(DemoSetting(), model=str(out), pictures=2).sections)
    assert (
        page.count('<article class="card') == 2
        and page.count("<figcaption>stage 2 sees") == 2
        and "of 16 answers" in page
    )
    said = re.search(r"Of 16 creatures drawn, (\d+) get another answer", page)
    assert page.count("; changes without part") == min(2, int(said[1]))  # those come first
    assert build(DemoSetting(), model="builtin:not-there").sections == []


@pytest.mark.parametrize("reads", ["everything", "creature"])
def test_reading_everything_or_the_creature_trains_stage_2_alone(reads):
    recipe = tiny(reads=reads, samples=32)
    backbone = build_backbone(recipe)
    net, start = ifam.fit(recipe, backbone, device=CPU), ifam.new_net(recipe, backbone)
    assert not torch.equal(net.stage2.tower.native.pos_embed, start.stage2.tower.native.pos_embed)
    assert torch.equal(net.stage1.tower.native.pos_embed, start.stage1.tower.native.pos_embed)
    kept = measure(net, recipe, balanced("test", 32, seed=0, size=48, device=CPU)).row()["kept"]
    assert kept == 1 if reads == "everything" else 0.02 < kept < 0.5


def test_interventions_are_calibrated_chosen_and_measured_in_one_precision(monkeypatch):
    """A threshold cuts where tokens are dense: in another precision it cuts elsewhere."""
    monkeypatch.setattr(
        ifam,
        "half",
        lambda device: torch.autocast("cpu", dtype=torch.bfloat16),
        raising=False,
    )  # as on a GPU
    recipe = tiny()
    net, scenes = (
        ifam.new_net(recipe, build_backbone(recipe)).eval(),
        balanced("val", 8, seed=0, size=48, device=CPU),
    )
    seen: list[bool] = []
    net.stage1.tower.native.patch_embed.register_forward_pre_hook(
        lambda *given: seen.append(torch.is_autocast_enabled("cpu"))
    )
    chosen = choose(net, recipe, scenes, scenes)
    measure_changed(net, recipe, scenes, chosen)
    assert seen == [False] * (
        1 + 3 + 1
    )  # calibration, three quantiles tried (none is one of them), the measurement


def test_a_finite_regime_comes_round_and_others_are_fresh():
    pool = Regime("few", train_pool=8)
    ids = [scenes.ids.tolist() for scenes in batches(pool, 4, 4, seed=0, size=32, device=CPU)]
    assert sorted(ids[0] + ids[1]) == sorted(ids[2] + ids[3]) == list(range(8))
    fresh = [scenes.ids.tolist() for scenes in batches("clean", 4, 2, seed=0, size=32, device=CPU)]
    assert fresh == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_patches_of_the_creature_are_mirrored_with_it():
    scenes = next(batches("clean", 8, 1, seed=0, size=48, device=CPU))
    torch.manual_seed(0)
    turned = scenes.mirrored()
    same = (turned.images == scenes.images).flatten(1).all(dim=1)
    assert 0 < same.sum() < 8
    assert torch.equal(turned.patches(8)[~same], scenes.patches(8)[~same].flip(-1)) and torch.equal(
        turned.masks[same], scenes.masks[same]
    )


def test_one_patch_is_enough_to_be_heard():
    scores = torch.zeros(1, 50, 2)
    scores[0, 7, 1] = 20
    assert loudest(scores)[0, 1] > 15 and loudest(scores)[0, 0] == pytest.approx(0, abs=1e-5)


def test_dino_asks_the_other_view():
    told = torch.eye(6)[[0, 1, 2, 3]]  # two views of two pictures
    crossed, right = distillation(told[[2, 3, 0, 1]], told, torch.zeros(6))
    own, wrong = distillation(told, told, torch.zeros(6))
    assert crossed < own and right == 1 and wrong == 0
    assert view(torch.rand(3, 3, 32, 32)).shape == (3, 3, 32, 32)
    heard: list[dict] = []
    model = pretrain(tiny(pretraining="dino"), device=CPU, write_row=heard.append, every=1)
    assert [row["step"] for row in heard] == [1, 2] and not model.training


def write_result(folder, job, worst, **more):
    found = {
        "row": job.row,
        "regime": job.regime,
        "seed": job.seed,
        "average": 0.75,
        "worst": worst,
        "kept": 0.5,
        "val": {"worst": worst},
    }
    extra = (
        {
            "changed": {"average": 0.75, "worst": 0.625, "kept": 0.25},
            "chosen": {"drop": [1], "quantile": None},
        }
        if job.row in plan.CHANGEABLE
        else {}
    )
    (folder / job.file).write_text(
        json.dumps(
            {
                **found,
                **extra,
                "seconds": 1.0,
                "device": "here",
                "torch": "2",
                "quick": False,
                **more,
            }
        )
    )


def test_the_study_does_the_most_important_first_and_reports_what_is_there(tmp_path, capsys):
    first, later = plan.first_plan(), plan.second_plan("simplicity 0.97")
    jobs = first + later
    assert (
        len({job.file for job in jobs}) == len(jobs) == 4 * 3 + 2 * 6 * 3 + len(plan.ABLATIONS) * 3
    )
    assert {(job.row, job.regime) for job in later[:12]} == {
        (row, "simplicity 0.97") for row in list(plan.MAIN)[1:5]
    }
    assert [job.row for job in later[24:27]] == [plan.NO_PATH] * 3
    order = [job.row for job in later]
    assert order.index("backbone: DINO") < order.index("stage-2 part dropout 0")
    assert (
        all(job.recipe.steps for job in jobs)
        and later[0].recipe.regime.background_reliability == 0.97
    )
    for job, worst in (
        (later[3], 0.5),
        *((job, 0.95 if "0.95" in job.regime else 0.25) for job in first[:6]),
    ):
        write_result(tmp_path, job, worst, digest=job.digest("cuda"))
    study.report(tmp_path, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert (
        "| `simplicity 0.95` | 95.0 ± 0.0 | 75.0 ± 0.0 | 95.0 ± 0.0 |" in text
        and "Compared with the others on `simplicity 0.97`" in text
    )
    assert (
        "| ERM ViT | 75.0 ± 0.0 | 25.0 ± 0.0 | - | 50.0 ± 0.0 |" in text
        and "with interventions (1 of 3 seeds) | 75.0 | 62.5" in text
    )
    assert (
        "**iFAM against ERM: better so far.** WGA seed by seed +25.0 points" in text
        and "## `certified`" not in text
    )
    assert (
        "**Not finished: 77 of 84 trainings are missing.**" in text
        and "iFAM, K = 4 (2 of 3 seeds)" in text
        and "at their word" not in text
    )
    assert (
        "`ste` against `none`): not measured yet" in text
        and "[1]" in (tmp_path / "page.csv").read_text()
    )
    capsys.readouterr()


def test_results_of_other_settings_are_not_reported_and_are_trained_again(
    tmp_path, monkeypatch, capsys
):
    job = plan.first_plan()[0]
    assert job.digest("cuda:1") == job.digest("cuda") != job.digest("cpu") and job.digest(
        "cuda", quick=True
    ) != job.digest("cuda")
    write_result(tmp_path, job, 0.5)
    with pytest.raises(typer.BadParameter, match="accept-old"):
        study.report(tmp_path, tmp_path / "page.md")
    study.report(tmp_path, tmp_path / "page.md", accept_old=True)
    assert "1 of 1 results carry no digest" in (tmp_path / "page.md").read_text()
    write_result(tmp_path, job, 0.5, digest=job.digest("cuda"))
    monkeypatch.setattr(plan, "RATES", ((1e-2, 1.0),))
    assert not plan.fits(json.loads((tmp_path / job.file).read_text()), "cuda", accept_old=True)
    with pytest.raises(typer.BadParameter, match="other settings"):
        study.report(
            tmp_path, tmp_path / "page.md", accept_old=True
        )  # a digest that differs is never accepted
    capsys.readouterr()


def test_a_quick_training_carries_its_digest_and_is_done_once(tmp_path):
    job, ends = plan.Training("iFAM, K = 4", "certified", 0), (0.0, float("inf"))
    assert study.follow(tmp_path, job, "cpu", ends, True, False).startswith("AA ")
    result = json.loads((tmp_path / job.file).read_text())
    assert (
        plan.fits(result, "cpu", quick=True)
        and not plan.fits(result, "cpu")
        and not plan.fits(result, "cuda", quick=True)
    )
    assert study.follow(tmp_path, job, "cpu", (0.0, 1.0), True, False) == "left for the next run"
    eyes, made = (
        tmp_path / "backbone-parts-0.pt",
        (tmp_path / "backbone-parts-0.pt").stat().st_mtime_ns,
    )
    study.learn_to_see(tmp_path, "parts", 0, "cpu", True, False)
    assert eyes.stat().st_mtime_ns == made
    old = torch.load(eyes, weights_only=True)
    del old["digest"]
    torch.save(old, eyes)
    made = eyes.stat().st_mtime_ns
    study.learn_to_see(tmp_path, "parts", 0, "cpu", True, True)
    assert eyes.stat().st_mtime_ns == made
    study.learn_to_see(tmp_path, "parts", 0, "cpu", True, False)
    assert eyes.stat().st_mtime_ns != made


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "not measured yet"),
        ([2.0, 0.5, 3.0], "better"),
        ([-2.0, -0.5], "worse so far"),
        ([5.0, 0.0, 9.0], "undecided"),
        ([0.5, 0.5, 0.5], "undecided"),
    ],
)
def test_a_difference_is_one_that_holds_in_every_seed(points, said):
    assert page.verdict(points) == said


def test_a_defeat_by_the_baseline_is_said():
    def results(ours):
        return [
            {"row": row, "regime": "simplicity 0.99", "seed": seed, "worst": worst}
            for row, worst in (("iFAM, K = 4", ours), ("PDiscoFormer, K = 4", 0.9))
            for seed in range(3)
        ]

    losing, winning = (
        " ".join(page._findings(results(ours), "simplicity 0.99")) for ours in (0.8, 1.0)
    )
    assert (
        "iFAM loses to its own baseline" in losing
        and "loses" not in winning
        and "builds on: better" in winning
    )


def test_erm_is_compared_at_the_most_reliable_background_if_it_fails_nowhere():
    found = [
        {"row": "ERM ViT", "regime": job.regime, "val": {"worst": 1.0}} for job in plan.first_plan()
    ]
    assert plan.where_erm_fails(found) == "simplicity 0.99"
