"""What commands say and write of a result, on made-up results: every number in its place."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from seecause.background.heads import HeadScores
from seecause.bench.plan import Shard
from seecause.bench.runner import Status
from seecause.cli import (
    app,
    audit,
    bench,
    doctor,
    explain,
    faithful,
    heads_prune,
    lvlm,
    repair,
    serve,
)
from seecause.cli.progress import INCOMPLETE, Incomplete
from seecause.critters import CLASSES
from seecause.errors import BadImage, BadOption
from seecause.models.staged_view import StagedModel
from tests.cli.spies import MODEL, reach


def state(**changed) -> Status:
    values = {
        "total": 9, "done": 4, "failed": {"f": "no memory"},
        "damaged": {"d": "cut short", "e": "empty", "h": "empty"},
        "pending": [Shard("p", "caap", 0, 3, ""), Shard("q", "caap", 3, 5, "")],
        "stale": ["s"] * 7, "holes": [SimpleNamespace(image="a.png", reason="no mask")] * 2,
        "undefined": {}, "stopped": "out of time", "gone": ["b.png"],
    }  # fmt: skip
    return Status(**{**values, **changed})


def test_where_a_run_stands(capsys):
    bench.tell_status(state())
    told = capsys.readouterr()
    assert told.out == (
        "4 of 9 shards done, 2 pending, 1 failed, 3 damaged, 7 kept from other commands\n"
    )
    assert told.err.splitlines() == [
        "b.png: gone from the data since an earlier run",
        "shard d is to be done again: cut short",
        "shard e is to be done again: empty",
        "shard h is to be done again: empty",
        "caap: not run on 5 images",
        "shard f failed: no memory",
        "a.png: 2 values missing: no mask",
        "seecause: out of time",
    ]
    gone = [f"{place}.png" for place in range(30)]
    bench.tell_status(state(gone=gone, stopped=""), quiet=True)
    told = capsys.readouterr()
    assert told.err.count("\n") == 21 and "seecause:" not in told.err
    assert told.out == "" and "and 16 more\n" in told.err and "19.png" in told.err
    bench.tell_status(state(gone=gone[:14], stopped=""))  # twenty lines in all
    told = capsys.readouterr().err
    assert told.count("\n") == 20 and "a.png: 2 values" in told and "more\n" not in told
    assert bench.status_facts(state()) == {
        "complete": False, "shards": 9, "done": 4, "pending": 2, "failed": {"f": "no memory"},
        "damaged": state().damaged, "not run": {"caap": 5}, "gone": ["b.png"],
        "holes": [{"picture": "a.png", "reason": "no mask"}] * 2, "stopped": "out of time",
    }  # fmt: skip
    with pytest.raises(Incomplete) as left:
        bench._left(state(), {"a": 1})
    assert left.value.facts == {"a": 1} and left.value.exit_code == INCOMPLETE == 1
    assert bench._left(state(done=9, holes=[]), {"a": 1}) == {"a": 1}


def test_the_command_of_a_pack_is_what_was_given_and_not_who_worked():
    flags = {
        "model": ["--model", "-m"], "max_flips": ["--max-flips"], "workers": ["--workers"],
        "work": ["--work"], "quiet": ["--quiet", "-q"], "out": ["-o", "--out"], "seed": ["--seed"],
    }  # fmt: skip
    values = {"max_flips": 0.1, "model": "timm:x", "workers": 2, "work": "w", "quiet": True}
    context = SimpleNamespace(
        info_name="gate",
        params={**values, "out": "a b", "seed": 0},
        command=SimpleNamespace(
            params=[SimpleNamespace(name=name, opts=opts) for name, opts in flags.items()]
        ),
        get_parameter_source=lambda name: SimpleNamespace(
            name="DEFAULT" if name == "seed" else "COMMANDLINE"
        ),
    )
    line = audit.command_line(context)
    assert line == "seecause gate --model timm:x --max-flips 0.1 --quiet --out 'a b'"


def test_the_files_that_weights_came_from_are_digested(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("b.safetensors", "a.bin", "config.json"):
        (folder / name).write_text(name)
    files = audit.weights_files(f"hf:{folder}", None)
    assert list(files) == ["b.safetensors", "a.bin"] and len(files["a.bin"]) == 64
    assert audit.weights_files(str(folder), None) == files
    own = folder / "a.bin"
    assert audit.weights_files("timm:x", str(own)) == {"a.bin": files["a.bin"]}
    assert audit.weights_files(str(folder), "random") == files
    assert audit.weights_files("timm:x", None) == {}


def findings(*on_object):
    kinds = [
        SimpleNamespace(is_object=held, sentence=lambda place=place: f"kind {place}")
        for place, held in enumerate(on_object)
    ]
    return SimpleNamespace(findings=kinds)


def test_pairs_are_of_the_ranks_asked_for_or_of_the_best_that_is_not_the_object():
    three = findings(True, False, False)
    assert repair._places(three, None) == [1]
    assert repair._places(findings(True), None) == repair._places(findings(), None) == []
    assert repair._places(three, [3, 1]) == [2, 0]
    for wrong in (0, 4):
        with pytest.raises(BadOption, match="ranks from 1 to 3"):
            repair._places(three, [1, wrong])


def test_grids_are_rows_then_columns(monkeypatch):
    monkeypatch.setattr(doctor, "_caap_cost", lambda model: {})
    block = SimpleNamespace(heads=3, head_dim=4)
    layout = SimpleNamespace(
        grid=(5, 7), prefix=2, class_index=0, distill_index=1, registers=range(2, 2)
    )
    model = SimpleNamespace(
        layout=layout, blocks=[block], patch=(8, 16), n_layers=6, cells="stage 3",
        stages=[SimpleNamespace(name="one"), SimpleNamespace(name="two")],
        forward_bytes=lambda layout, cells: 3 << 20, seam=SimpleNamespace(held=("neck",)),
    )  # fmt: skip
    tokens = doctor._transformer(model)["tokens"]
    assert tokens == {
        "blocks": "6 of width 12, 3 heads", "grid": "5 x 7 patches of 8 x 16 pixels", "prefix": 2,
        "class token": 0, "distillation token": 1, "registers": [],
    }  # fmt: skip
    staged = MagicMock(**vars(model))
    staged.__class__ = StagedModel
    assert doctor._cells(staged)["features"] == {
        "stages": "one, two", "grid": "5 x 7 cells of 8 x 16 pixels after stage 3",
        "one image": "3.0 MiB a cell that is patched",
    }  # fmt: skip
    assert doctor._cells(model)["places"] == {
        "read at": "stage 3", "grid": "5 x 7 cells of 8 x 16 pixels",
        "kept of the explained picture": "neck", "one image": "3.0 MiB a cell that is patched",
    }  # fmt: skip
    assert [doctor._size(size) for size in (1 << 29, 3 << 30)] == ["512.0 MiB", "3.0 GiB"]
    shown = {None: "none", 0.00012: "1.2e-04", 12345: "12,345", "text": "text"}
    assert {fact: doctor._plain(fact) for fact in shown} == shown and doctor._plain([]) == "none"


def test_the_kernel_is_asked_about_the_model_where_it_lies(monkeypatch):
    plan, probes = SimpleNamespace(tail="source", live=[0, 1]), []
    monkeypatch.setattr("seecause.attribution.caap.make_plan", lambda *_, **__: plan)
    monkeypatch.setattr("seecause.attribution.caap.row_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr("seecause.engine.trace.trace_bytes", lambda *_: 2 << 20)
    monkeypatch.setattr("seecause.engine.chunks.memory", lambda: SimpleNamespace(bytes=lambda _: 0))
    monkeypatch.setattr(
        "seecause.engine.kernel.usable", lambda probe, *_: probes.append(probe) or 1
    )
    model = SimpleNamespace(
        layout=SimpleNamespace(n_patches=3), blocks=[SimpleNamespace(heads=3, head_dim=4)],
        device=torch.device("meta"), dtype=torch.float16,
    )  # fmt: skip
    cost = doctor._caap_cost(model)
    (probe,) = probes
    assert (probe.shape, probe.device, probe.dtype) == ((1, 3, 1, 4), model.device, torch.float16)
    assert "one Triton kernel" in cost["attention"]
    assert cost["keys and values of one image"] == "2.0 MiB"
    assert cost["all patches of one image at once"] == "6.0 MiB"


def test_names_of_pictures_are_as_short_as_tells_them_apart(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert explain.short_names(["x/a.png", "y/b.png"]) == ["a.png", "b.png"]
    assert explain.short_names(["x/a.png", "y/../y/a.png"]) == ["x/a.png", "y/a.png"]
    sample = "critters:clean:test#3"
    assert explain.short_names([sample, "x/a.png"]) == [sample, "a.png"]
    with pytest.raises(BadImage, match="UTF-8"):
        explain.short_names(["a\udcff.png"])


def test_answers_are_told_and_those_of_random_weights_mean_nothing():
    rows = [{"name": "a.png", "answers": [{"name": "dog", "probability": 0.75}]}, {"name": "b.png"}]
    model = SimpleNamespace(name="toy", random_weights=False)
    answer = "a.png: dog, probability 0.750"
    assert explain._lines(rows, model) == [answer]
    model.random_weights = True
    warning = "toy has random weights: its answers mean nothing"
    assert explain._lines(rows, model) == [warning, answer]


def test_a_model_without_class_names_is_told_unless_quiet(opened, monkeypatch, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setattr(MODEL, "classes", ())
    monkeypatch.setattr("seecause.attribution.explain.explain_batches", reach)
    line = f"explain {tmp_path}/a.png --model timm:x --method sobel --out {tmp_path}/out"
    note = "note: timm:x has no class names here; --classes FILE names them"
    for quiet in ([], ["--quiet"]):
        printed = CliRunner().invoke(app, [*line.split(), *quiet]).stderr
        assert (note in printed) == (not quiet) and "Critters" not in printed
    warning = f"timm:x knows only Critters pictures, so what it says about {tmp_path}/a.png means"
    for classes, words in ((("a", "b"), ""), (CLASSES, warning)):
        monkeypatch.setattr(MODEL, "classes", classes)
        printed = CliRunner().invoke(app, line.split()).stderr
        assert (words in printed) and bool(printed) == bool(words)


def test_what_went_and_what_that_changed():
    scores = HeadScores(torch.tensor([[0.5, -0.1]]), None)
    changes = {"accuracy": (0.5, 0.75), "FIG, grey": (1.0, 2.0), "BIR, grey": (0.4, 0.1)}
    result = SimpleNamespace(
        scored=SimpleNamespace(scores=scores), heads=[(0, 0)], changes=lambda: changes
    )
    assert heads_prune._prune_lines(result) == [
        "removed 1 heads: [(0, 0)]", "accuracy: 0.500 -> 0.750", "BIR, grey: 0.400 -> 0.100",
    ]  # fmt: skip
    result.heads = []
    assert heads_prune._prune_lines(result)[0].startswith("nothing is removed")
    screen = {"verified": 4, "audited": 2, "heads": 12, "agreement": 0.5, "recall": 0.25}
    for protocol, words in (
        ({"screen": screen}, "4 verified + 2 audited of 12 heads: agreement 0.50, estimated recall"
         " 0.25"),
        ({"mediated": {1: 0.5, 4: 0.75}}, "of what the other version changes, the highest heads"
         " carry 50% by 1, 75% by 4"),
    ):  # fmt: skip
        about = SimpleNamespace(protocol=protocol)
        assert heads_prune._about_lines(about) == [words]


def test_remedies_are_told_with_their_numbers():
    report = {"transplant-worst": 0.1, "flips": 0.2, "accuracy": 0.3}
    result = SimpleNamespace(
        before=SimpleNamespace(masks=SimpleNamespace(notes=("heard",))),
        record={"notes": ["heard", "news"]},
        candidates={
            "a": SimpleNamespace(name="a", failed="", report=report),
            "b": SimpleNamespace(name="b", failed="no groups", report={}),
        },
    )
    assert repair._lines(result) == [
        "note: news", "a: transplant-worst 0.100, flips 0.200, accuracy 0.300",
        "b: not tried: no groups",
    ]  # fmt: skip


def test_a_traced_answer_is_told():
    chosen = torch.tensor([True] * 9 + [False] * 3)
    heads = [(0, place) for place in range(12)]
    fit = SimpleNamespace(
        top=lambda k: heads[:k], r2=0.876, standard_error=torch.tensor([0.1, 0.02, 0.3])
    )
    tokens = SimpleNamespace(
        effects=SimpleNamespace(pieces=[" what", "\n", " is"]), sufficiency=0.5,
        text=torch.tensor([True, True, False]),
    )  # fmt: skip
    trace = SimpleNamespace(
        engine=SimpleNamespace(answer="jade", span=2.5), tokens=tokens,
        heads=SimpleNamespace(chosen=chosen, heads=fit, left=lambda: 0.1),
    )  # fmt: skip
    first, enough, needed, words = lvlm._lines(trace)
    assert first == "answer: jade; the picture moves its logit by 2.50"
    assert enough == (
        "9 of 12 heads are enough: (0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7)"
        " ... (layer, head; R2 0.88, standard error 0.1000)"
    )
    assert needed == "needed? yes: without them 10% of the effect is left"
    assert words == (
        "words that receive the picture: 'what' 'newline' (alone 50% of the effect of those heads)"
    )


def test_the_address_holds_the_token(monkeypatch, capsys):
    runs, opened = [], []
    state = SimpleNamespace(warm=lambda: runs.append("warm"))
    monkeypatch.setattr("seecause.app.server.create_app", lambda *words, **options: options)

    def answer(server, sockets):
        runs.append(server.config)
        sockets[0].close()

    monkeypatch.setattr("uvicorn.Server.run", answer)
    monkeypatch.setattr("webbrowser.open", opened.append)
    for token, browser, quiet in (
        (None, False, False),
        ("secret", True, False),
        (None, True, True),
    ):
        serve._listen(state, "127.0.0.1", 0, token=token, browser=browser, quiet=quiet)
        warm, config = runs.pop(0), runs.pop(0)
        assert warm == "warm" and config.app["token"] == token and config.app["port"] > 0
        assert config.limit_concurrency == serve.CONNECTIONS and not config.server_header
        assert (config.log_level, config.timeout_keep_alive) == ("warning", 30)
        address = f"http://127.0.0.1:{config.app['port']}/" + ("?token=secret" if token else "")
        assert capsys.readouterr().out == f"open {address} (Ctrl+C ends it)\n" * (not quiet)
        assert opened == [address] * browser
        opened.clear()
    monkeypatch.setattr(serve, "bound_socket", lambda host, port: SimpleNamespace(
        getsockname=lambda: (host, 7, 0, 0), close=lambda: None))  # fmt: skip
    serve._listen(state, "::1", 0, token=None, browser=False, quiet=False)
    assert capsys.readouterr().out == "open http://[::1]:7/ (Ctrl+C ends it)\n"


def test_who_trained_tells_how_it_went(monkeypatch):
    result = SimpleNamespace(out="run", steps=12, best=0.56789, best_epoch=2)
    monkeypatch.setattr(
        "seecause.faithful.read_config", lambda *_, **__: SimpleNamespace(select="worst")
    )
    monkeypatch.setattr("seecause.faithful.train", lambda run, on_step: result)
    line = "run: 12 steps; best worst on validation 0.5679, after epoch 3\n"
    line += "next: seecause faithful evaluate run\n"
    for rank, told in ((None, line), ("0", line), ("1", "")):
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        assert CliRunner().invoke(app, ["faithful", "train"]).output == told
    assert faithful._settings(["epochs=30", "options.gradient=none", "losses.class1=0"]) == {
        "epochs": 30, "options": {"gradient": "none"}, "losses": {"class1": 0},
    }  # fmt: skip
    for wrong in ("epochs", "=3", "other.epochs=3"):
        with pytest.raises(BadOption, match="--option"):
            faithful._settings([wrong])


def test_a_zoo_is_listed_with_its_numbers(monkeypatch):
    recipes = {"a": SimpleNamespace(regime="clean"), "b": SimpleNamespace(regime="certified")}
    numbers = {
        "accuracy": 0.1, "balanced_accuracy": 0.2, "worst_group_accuracy": 0.3,
        "background_flip_rate": 0.4, "creature_flip_rate": 0.5,
    }  # fmt: skip
    monkeypatch.setattr("seecause.critters.train.recipes", lambda: recipes)
    monkeypatch.setattr(
        "seecause.critters.train.card",
        lambda zoo, name: {"evaluation": numbers} if name == "a" else None,
    )
    shown = CliRunner().invoke(app, ["zoo", "list"], env={"COLUMNS": "100"}).stdout
    assert [line.split() for line in shown.splitlines()[-2:]] == [
        ["a", "clean", "0.100", "0.200", "0.300", "0.400", "0.500"],
        ["b", "certified", "untrained", "-", "-", "-", "-"],
    ]
    facts = json.loads(CliRunner().invoke(app, ["zoo", "list", "--json"]).stdout)
    assert facts == {"a": {"regime": "clean", **numbers}, "b": {"regime": "certified"}}


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("shape", {"sizes": [(30, 40), (50, 60)]}),
        ("fixed", {"size": (30, 40)}),
        ("grid", {"size": (30, 40)}),
        ("mean", {}),
    ],
)
def test_a_bank_of_each_mode(monkeypatch, tmp_path, mode, options):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    made = []

    class Bank:
        def save(self, folder):
            (folder / "bank").write_text("bank")

    monkeypatch.setattr("seecause.cli.lvlm.open_lvlm", lambda *words: words)
    monkeypatch.setattr("seecause.lvlm.make_bank", lambda *w, **o: made.append((w, o)) or Bank())
    sizes = {"shape": ["--size", "30x40", "--size", "50x60"], "mean": []}
    words = ["lvlm", "bank", str(tmp_path), "--mode", mode, *sizes.get(mode, ["--size", "30x40"])]
    out = tmp_path / "bank"
    done = CliRunner().invoke(
        app, [*words, "--device", "cpu", "--dtype", "float16", "-o", str(out)]
    )
    assert done.exit_code == 0, done.output
    (((opened, pictures), given),) = made
    assert opened == ("builtin:critters-llava", "cpu", "float16") and len(pictures) == 1
    assert given == {"mode": mode, **options}
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["mode"], manifest["pictures"]) == (mode, 1) and Path(out / "bank").is_file()
