"""The papers' tables and figures: all are known, run, and stand beside what was printed."""

import importlib.util
import json
import re
from itertools import chain
from pathlib import Path

import pytest
import torch

import seecause as sc
from seecause.engine.trace import attention_probs
from seecause.errors import BadOption, UnknownName
from seecause.experiments import base, caap
from seecause.experiments.base import MODELS, PRINTED, Part
from tests.cli.calls import invoke

SCRIPT = Path(__file__).parents[2] / "docs" / "papers.py"
# Kept by hand, from the captions of the papers: all tables, all figures. CAAP's figures 12 to 40
# show further photos, as figure 11 does.
PUBLISHED = {
    "caap": """table 1 faithfulness, ViT-L; 2 localization, ViT-L; 3 pets, ImageNet-Hard, Food-101;
        4 faithfulness, ViT-B; 5 localization, ViT-B; 6 faithfulness, ViT-S; 7 localization, ViT-S;
        8 faithfulness, largest; 9 localization, largest; 10 E-CAAP, faithfulness; 11 E-CAAP,
        localization; 12 simple insertion and deletion, faithfulness; 13 the same, localization;
        14 CNNs, faithfulness; 15 CNNs, localization;
        figure 1 overview; 2 one photo; 3 several objects; 4 blanks; 5 selection; 6 attention of
        pairs of regions; 7 last layer; 8 insertion curves; 9 deletion curves; 10 radar;
        11 further photos""",
    "cigma": """table 1 zero-shot; 2 fine-tuned; 3 masks; 4 temperature; 5 layers; 6 three seeds;
        7 Waterbirds and CelebA, InternVL2-26B; figure 1 background influence;
        4 Brain MRI (appendix)""",
    "hear": """table 1 nine prompts; 2 fit, ten models; 3 important text tokens; figure 1 overview;
        2 example; 3 heads needed; 4 tokens; 5 thresholds; 6 share of ablated heads; 7 single
        heads; 8 logit lens; 9 DomainNet; 10 head vectors; 11 heads needed, all models; 12 how
        often a head is needed; 13 t-SNE; 14 coefficients beside attention; 15 blocked text tokens;
        16 examples, LLaVA-1.5; 17 examples, LLaVA-NeXT""",
    "ifam": """table 1 MetaShift, Waterbirds, IN-1K, IN-9; 2 CUB, Waterbird200, SIIM-ACR; 3 token
        removal; 4 worst K; 5 ablations; 6 key points; figure 1 early and late masks; 2 overview;
        3 leave-one-out; 4 parts on CUB; 5 CUB, several K; 6 Waterbirds; 7 MetaShift; 8 birds;
        9 cats and dogs; 10 insects""",
}
DRAWINGS = {"caap/figure-1", "hear/figure-1", "ifam/figure-1", "ifam/figure-2"}
MISSING: set[str] = set()  # papers whose experiments are not all built
# values of the texts, in their order, "-" is a dash. CAAP: section 4.3, tables 1 and 2; appendix
# A.1, table 9; B.1, table 10; B.3, table 14. CIGMA: tables 3 to 7. HeAr: section C.3; appendix D.
# iFAM: those of 3 and 4 are the first row plus the printed change
QUOTES = """
caap/table-1 caap: 42.67 1.16 73.42 1.07 30.75 1.18 34.35 0.99 75.88 0.85 41.52 1.02
caap/table-1 rollout: 67.69 1.06 56.11 1.24 -11.58 1.03
caap/table-2 caap: 63.40 2.01 83.40 1.99 73.44 3.90 66.42 1.78 84.86 1.89 74.22 3.87
caap/table-3 mutex: 56.12 1.03 83.59 0.62 27.47 1.05 13.57 0.79 27.48 1.16 13.90 1.01
caap/table-9 vit-cx: 51.98 2.32 75.55 2.35 58.59 4.35 45.94 2.37
caap/table-10 e-caap: 42.56 2.80 70.23 2.56 27.67 2.63 33.56 2.42
caap/table-14 caap: 13.53 0.58 55.64 1.19 42.11 1.04 15.61 0.66
cigma/table-3 default: 95.4 0.285 0.021 0.069
cigma/table-3 grid 16: 94.8 0.270 0.023 0.075
cigma/table-3 blur: 95.2 0.283 0.023 0.075
cigma/table-4 2.0: 94.9 0.093 0.010 0.073
cigma/table-5 blocks 5-12: 8 -0.035 -0.8
cigma/table-6 cigma: 0.94 0.02 1.3 7.8 0.92 0.03 1.6 8.5 0.93 0.02 1.4 8.1
cigma/table-7 cigma: 91.8 86.2 93.9 84.7
cigma/table-7 original: 87.4 68.9 90.6 62.4
hear/table-1: 0.97 0.02 0.96 0.03 0.97 0.02 0.96 0.02 0.91 0.03 0.94 0.02 0.94 0.03 0.93 0.04
hear/table-2: 0.82 0.05 0.91 0.03 0.79 0.06 0.89 0.03 0.83 0.05 0.91 0.03 0.82 0.04 0.91 0.02
hear/table-3: 0.98 0.02 0.92 0.04 0.95 0.02 0.89 0.05 0.94 0.15 0.93 0.07 0.93 0.04 0.82 0.14
ifam/table-1 early mask, found: 84.5 77.1 98.6 95.2
ifam/table-1 ifam, K = 4: 88.7 88.6 98.7 96.4
ifam/table-1 pdiscoformer, K = 8: 88.7 83.6 94.2 84.3
ifam/table-1b ifam, K = 1: 84.3 97.5 93.5 91.1 2.4
ifam/table-2 ifam, K = 8: 90.4 86.2 92.1 65.9
ifam/table-2 late mask, ground truth: 90.7 74.8
ifam/table-3 ifam, K = 16 + q = 0.97: - - 98.7 96.6 - - - 87.3
ifam/table-4 ifam, K = 8 + LOO + q = 0.99: 84.8 83.0 91.1 69.0
ifam/table-5 ifam, no shaping, K = 1: 90.3 80.2 85.4 79.1
ifam/table-6 ifam, K = 8 + q = 0.99: 7.3 72.4 86.9
"""
# printed differences that are not those of the printed columns
ODD = {("table-1", "tam"), ("table-6", "caap"), ("table-12", "simple-insertion")}


def part(**changed) -> Part:
    about = {"data": "critters:clean:test", "limit": 2, "start": 0, "stop": 2, "target": "label"}
    return Part({"spec": "builtin:critters-vit"}, **{**about, **changed}, device="cpu")


def published() -> set[str]:
    """The names of `PUBLISHED`, such as "caap/table-1"."""
    names = set()
    for paper, text in PUBLISHED.items():
        kind = ""
        for entry in text.split(";"):
            words = entry.split()
            kind = words.pop(0) if words[0] in ("table", "figure") else kind
            names.add(f"{paper}/{kind}-{int(words[0])}")
    return names


def test_the_list_has_every_table_and_figure_of_the_papers():
    rows = {row["experiment"]: row for row in base.listing()}
    papers = {name for name in rows if name.partition("/")[0] in PUBLISHED}
    numbered = {name for name in papers if re.fullmatch(r"\w+/(table|figure)-\d+", name)}
    assert numbered == published() and len(numbered) == 15 + 11 + 7 + 2 + 3 + 17 + 6 + 10
    assert "11 to 40" in rows["caap/figure-11"]["shows"]
    missing = [name for name in PRINTED if rows[name]["note"] == "not built yet"]
    print("not built yet:", *missing)  # noqa: T201  pytest -s shows it
    assert {name.partition("/")[0] for name in missing} <= MISSING
    assert {n for n in PRINTED if "drawing" in rows[n]["note"]} == DRAWINGS


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("quick")  # cells are shared


SLOW = ("critters/leaderboard", "critters/methods")  # together two minutes of a core
NAMES = [name for name in PRINTED if "run" in PRINTED[name] and name not in SLOW]
NAMES += [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize("name", NAMES)
def test_every_one_runs_without_a_download(name, quick):
    status = sc.experiments.run(name, quick, quick=True)
    assert status.complete, status.failed
    table, found = sc.experiments.read_table(quick, name), base.find_experiment(name)
    assert any(cell.n for line in table.cells.values() for cell in line.values())
    assert bool([*(quick / name).glob("figure-*.svg")]) == bool(found.figure)
    assert found.question in (quick / name / "index.html").read_text()
    assert {"table.csv", "table.md", "table.tex", "rows.csv"} <= set(
        path.name for path in (quick / name).iterdir()
    )
    printed = base.setting_of(found, quick=True, as_printed=True)["options"]
    assert found.printed.items() <= printed.items()


@pytest.mark.parametrize("quote", QUOTES.strip().splitlines())
def test_printed_values_are_those_of_the_text(quote):
    place, _, values = quote.partition(": ")
    name, _, line = place.partition(" ")
    rows = PRINTED[name]["rows"]
    every = chain(*([rows[line]] if line else rows.values()))
    numbers = [number for pair in every for number in pair or ["-"]]
    expected = [word if word == "-" else float(word) for word in values.split()]
    assert numbers[: len(expected)] == expected


def test_printed_differences_are_differences_but_for_the_known_ones():
    odd = set()
    for table in (n for n in PRINTED if PRINTED[n].get("values") == ["Del", "Ins", "Ins-Del"]):
        for line, row in PRINTED[table].get("rows", {}).items():
            assert len(row) == 3 * len(PRINTED[table]["columns"])
            for deletion, insertion, gap in zip(row[::3], row[1::3], row[2::3], strict=True):
                if abs(insertion[0] - deletion[0] - gap[0]) > 0.021:
                    odd.add((table.partition("/")[2], line))
    assert odd == ODD


def test_the_printed_number_stands_beside_ours_with_its_error(tmp_path):
    words = (
        "--models",
        "vit-l=builtin:critters-vit",
        "--data",
        "critters:clean:test",
        "--limit",
        2,
    )
    words += ("--device", "cpu", "--out", tmp_path, "--option", "steps=2", "--as-printed")
    done = invoke("reproduce", "caap/table-10", *words)
    assert done.exit_code == 0 and "(43.61 ± 2.73)" in done.stdout, done.output
    table = sc.experiments.read_table(tmp_path, "caap/table-10")
    assert table.cells["vit-l, e-caap"]["Ins"].published == (70.23, 2.56)
    assert "70.23,2.56" in (tmp_path / "caap/table-10/table.csv").read_text()
    record = json.loads((tmp_path / "caap/table-10/experiment.json").read_text())
    assert record["setting"]["options"]["approx"] == "e-caap-printed"
    cells = {path.name for path in (tmp_path / "cells").iterdir()}
    assert invoke("reproduce", "caap/table-11", *words).exit_code == 0
    assert {path.name for path in (tmp_path / "cells").iterdir()} == cells  # shared


def test_mistakes_of_a_command_are_one_line(tmp_path):
    for words, expected in (
        (("caap/table-1",), "--data imagenet-s=PATH"),
        (("caap/table-1", "--quick", "--models", "vit-x"), "vit-l"),
        (("caap/figure-2",), "seecause explain"),
        (("caap/table-1", "--quick", "--option", "tial=blank"), "tail"),
        (("caap/table-1", "--quick", "--weights", "vit-l=x"), "critters-vit"),
    ):
        done = invoke("reproduce", *words, "--out", tmp_path / "out")
        assert done.exit_code == 2 and expected in done.stderr, done.output
    with pytest.raises(UnknownName):
        sc.experiments.run("caap/table-16", tmp_path)
    with pytest.raises(BadOption, match="layers"):
        base.ExperimentJob("caap/table-1", "cpu").open()(cell_with_bad_layers())


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("caap/table-1", "imagenet-s", "validation"),
        ("hear/table-2", "coco-main", "annotations/instances_val2017.json"),
        ("hear/figure-9", "domainnet", "real_test.txt; domains are clipart"),
        ("ifam/table-1", "metashift", ""),
        ("ifam/table-2", "cub", ""),
        ("ifam/table-4", "metashift", ""),
    ],
)
def test_a_wrong_folder_is_one_line_that_says_what_was_expected(name, data, expected, tmp_path):
    words = (name, "--data", f"{data}={tmp_path}", "--device", "cpu", "--out", tmp_path / "out")
    done = invoke("reproduce", *words)
    assert done.exit_code == 2 and expected in done.stderr and str(tmp_path) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def cell_with_bad_layers():
    found = base.find_experiment("caap/table-1")
    setting = base.setting_of(found, quick=True, options={"first_layer": 9})
    return base.cells_of(found, setting, Path(), "cpu")[-1]


def test_every_model_that_the_papers_use_is_known_to_its_library():
    import open_clip
    import timm

    for known in MODELS.values():
        library, _, name = known["spec"].partition(":")
        if library == "timm":
            assert name in timm.list_models(pretrained=True)
        if library == "open_clip":
            assert tuple(name.split("/")) in open_clip.list_pretrained()
    used = {name for entry in sc.experiments.experiments().values() for name in entry.models}
    assert used <= set(MODELS)


def test_a_context_of_the_blanks_own_activations_is_the_blank():
    one = part()
    white = one.view.preprocess.normalise(torch.ones_like(one.batch.images[:1]))
    maps = caap.in_activations(one, white, zero=False)
    torch.testing.assert_close(maps, caap.explained(one, {"method": "caap"}))
    zero = caap.in_activations(one, white, zero=True)
    assert zero.shape == maps.shape and not torch.allclose(zero, maps)


def test_the_object_carries_nothing_over_where_only_pixels_move():
    rows = caap.confounding(part(limit=4, stop=4), asked={"method": "simple-insertion"})
    assert all(row["carried over"] == 0 for row in rows)
    rows = caap.confounding(part(limit=4, stop=4), asked={"method": "caap"})
    assert any(abs(row["carried over"]) > 0.1 for row in rows)


def test_attention_is_counted_by_regions():
    one = part(limit=1, stop=1)
    masks = torch.zeros(1, 96, 96, dtype=torch.int32)
    masks[:, :16, :16], masks[:, 80:, 80:] = 1, 1  # two objects of 2 x 2 patches
    vars(one)["batch"] = one.batch._replace(masks=masks)  # as if the data had it
    rows = {(row["pair"], row["layer"]): row["attention"] for row in caap.attention_by_layer(one)}
    probs = next(attention_probs(one.view, one.batch.images))[0].mean(dim=0)
    weights = probs[5:, 5:]  # a class token and four registers
    first, second = [0, 1, 12, 13], [130, 131, 142, 143]
    both = first + second
    others = [place for place in range(144) if place not in both]
    within = torch.cat([weights[first][:, first], weights[second][:, second]]).mean()
    between = torch.cat([weights[first][:, second], weights[second][:, first]]).mean()
    expected = (within, between, weights[both][:, others].mean())
    found = [rows[pair, 1] for pair in ("within object", "between objects", "object to background")]
    torch.testing.assert_close(torch.tensor(found), 100 * torch.stack(expected).double().float())
    assert len(rows) == 3 * one.view.n_layers


def test_the_page_is_current():
    spec = importlib.util.spec_from_file_location("papers", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "the page is old; run: python docs/papers.py"
