"""A user's own project: a module around a transformer, its data and its preprocessing."""

import io
import re
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, Subset

import seecause as sc
from seecause.app.state import open_state
from seecause.errors import BadOption, DataMissing, UnknownName, UnsupportedModel
from seecause.models.preprocess import preprocess_of
from tests.cli.calls import invoke

HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
TRAIN, TEST = "critters:certified:train", "critters:certified:test"
PROJECT = '''
import copy
import torch
import torch.nn.functional as F
from torch import nn
import seecause as sc

def trained():
    """Backbone and head of a trained network, as a project has them."""
    view = sc.load("builtin:critters-biased")
    module, head = copy.deepcopy(view.module), copy.deepcopy(view.module.head)
    module.head = nn.Identity()
    return module, head, {"classes": view.classes, "preprocess": view.preprocess}

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.options = trained()
    def forward(self, x):
        return self.head(self.backbone(x))

class MLP(Linear):
    def __init__(self):
        super().__init__()
        width = self.head.in_features
        first = nn.Linear(width, width)
        with torch.no_grad():
            first.weight.copy_(torch.eye(width)), first.bias.fill_(9.0)
            self.head.bias.sub_(self.head.weight.sum(dim=1) * 9)
        self.head = nn.Sequential(first, nn.ReLU(), self.head)

class Cosine(Linear):
    def forward(self, x):
        rows = F.normalize(self.backbone(x), dim=-1)
        return 20 * rows @ F.normalize(self.head.weight, dim=-1).T

class Two(Linear):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(self.head.in_features, 3)
    def forward(self, x):
        features = self.backbone(x)
        return self.other(features), self.head(features)

def made(module):
    return module, module.options

def linear(): return made(Linear())
def mlp(): return made(MLP())
def cosine(): return made(Cosine())
def two(): return Two(), {**Two().options, "output": 1}
def compiled():
    module = Linear()
    module.backbone = torch.compile(module.backbone)
    return torch.compile(module), module.options
def lora():
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(0)
    module = Linear()
    return get_peft_model(module, LoraConfig(r=2, target_modules=["qkv"])), module.options
def hf():
    from transformers import ViTConfig, ViTModel
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                       intermediate_size=64, image_size=96, patch_size=16)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit, self.fc = ViTModel(config), nn.Linear(32, 8)
        def forward(self, pixel_values):
            return self.fc(self.vit(pixel_values).last_hidden_state[:, 0])
    net = Net()
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in net.parameters():  # the same in every release
            weight.normal_(std=0.2)
    return net, Linear().options
'''
FORCED = ("--remedies", "last-layer", "--force", "--limit", 64, "--max-loss", 1.0)
SHAPES = ("linear", "mlp", "cosine", "two", "compiled", "lora", "hf", "lightning")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working folder of a user: project.py, and a checkpoint of Lightning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("project.py").write_text(PROJECT)
    state = {
        f"model.{name}": v for name, v in sc.load("project.py:linear").module.state_dict().items()
    }
    about = {"pytorch-lightning_version": "2.5.0", "hyper_parameters": Namespace(lr=1e-3)}
    torch.save({"state_dict": state, "epoch": 3, "optimizer_states": [], **about}, "last.ckpt")
    return tmp_path


def words(shape: str) -> tuple[str, ...]:
    """How a shape is named on the command line."""
    if shape == "lightning":
        return ("--model", "project.py:linear", "--weights", "last.ckpt")
    return ("--model", f"project.py:{shape}")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_project_is_explained_benchmarked_audited_repaired_and_loaded(shape, project):
    own = words(shape)
    small = (*own, "--option", "per_image=2")
    for line in (
        ("explain", f"{TEST}#0", *own, "--method", "rollout", "--out", "e"),
        ("bench", "run", *own, "--data", TEST, "--limit", 2, "--method", "rollout", "--out", "b"),
        ("audit", *small, "--limit", 30, "--data", TEST, "--out", "a"),
        ("repair", *small, "--data", TRAIN, *FORCED, "--out", "r"),
    ):
        done = invoke(*line)
        assert done.exit_code == 0, (line, done.output)
        assert "images: 96 x 96 pixels (" in done.stdout and "Traceback" not in done.stderr
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("model = sc.load(")]
    names = {"sc": sc}
    exec(line, names)  # the printed line
    images = sc.data.to_batch(names["model"], sc.data.open_data(TEST, limit=4)).images
    before = sc.load(own[1], weights=own[3] if len(own) > 2 else None)
    assert (names["model"](images) - before(images)).abs().max() > 1e-3  # it is the repaired one
    again = ("--model", own[1], "--weights", "r/model")
    assert (
        invoke("explain", f"{TEST}#0", *again, "--method", "rollout", "--out", "e2").exit_code == 0
    )
    card = Path("r/model/README.md").read_text()
    if "head.safetensors" not in card:  # all of it is in the user's own module: plain torch
        made = sc.load(own[1]).module
        code = card.partition("```python\n")[2].partition("\n\n#")[0]
        code = code.replace("model = ...", "model = made").replace("'model.s", "'r/model/model.s")
        exec(code, {"made": made})
        assert_close(sc.wrap(made, output=before.output, **HALF)(images), names["model"](images))


def test_a_function_is_served_reproduced_and_called_again_by_ray(project):
    state = open_state(["project.py:linear"])
    (served,) = state.models.values()
    images = torch.rand(2, 3, 96, 96)
    assert_close(served.view(images), sc.load("project.py:linear")(images))
    state.close()
    own = ("--models", "own=project.py:linear", "--data", "critters=critters:certified")
    done = invoke("reproduce", "cigma/table-1", *own, "--quick", "--out", "r")
    assert done.exit_code == 0 and "own, critters, cigma" in done.stdout, done.output
    pytest.importorskip("ray", reason="the cluster extra is not installed")
    task = ("--data", TEST, "--limit", 2, "--method", "rollout", "--out", "b", "--ray", "local")
    done = invoke("bench", "run", "--model", "project.py:linear", *task)
    assert done.exit_code == 0 and "1 of 1 cells done" in done.stdout, done.output


@pytest.mark.parametrize("shape", ["linear", "mlp", "cosine", "two", "hf"])
def test_a_wrapped_module_in_python_is_pruned_and_comes_back(shape, project):
    from project import Linear  # noqa: F401  the user's import works, too

    module, options = getattr(__import__("project"), shape)()
    model = sc.wrap(module.eval(), **options)
    images = sc.data.to_batch(model, sc.data.open_data(TEST, limit=4)).images
    native = module(images)
    assert_close(
        model(images), native[1] if isinstance(native, tuple) else native, atol=1e-4, rtol=0
    )
    folder = sc.background.export(model, [(0, 0)], project / "pruned")
    fresh, _ = getattr(__import__("project"), shape)()
    line = re.search(r"model = (sc\.load\(.*\))", (folder / "README.md").read_text())
    with pytest.raises(DataMissing, match="Name the code"):
        sc.load(folder)
    loaded = eval(line[1], {"sc": sc, "module": fresh, "FOLDER": folder})
    with sc.background.ablate(model, [(0, 0)]):
        assert_close(loaded(images), model(images), atol=1e-4, rtol=0)
    assert loaded.classes == model.classes and loaded.preprocess == model.preprocess


# ---------------------------------------------------------------- shapes of modules


class Around(nn.Module):
    """A module around timm's transformer whose forward is a function of it."""

    def __init__(self, run, pool="token"):
        super().__init__()
        import timm

        torch.manual_seed(1)
        self.backbone = timm.create_model("test_vit", num_classes=0, global_pool=pool)
        self.head, self.run = nn.Linear(64, 5), run

    def forward(self, x):
        return self.run(self, x)


MEAN, STD = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.2, 0.3, 0.4)))
RUNS = {
    "temperature": lambda m, x: m.head(m.backbone(x)) / 1.7,
    "normalisation inside": lambda m, x: m.head(m.backbone((x - MEAN) / STD)),
    "pixels of 0-255": lambda m, x: m.head(m.backbone((x - 255 * MEAN) / (255 * STD))),
    "mean of all tokens": lambda m, x: m.head(m.backbone.forward_features(x).mean(dim=1)),
    "dict of logits": lambda m, x: {"logits": m.head(m.backbone(x)), "x": x},
}


@pytest.mark.parametrize("shape", RUNS)
def test_the_view_of_a_module_of_ones_own_gives_its_output_and_gradient(shape):
    module = Around(RUNS[shape]).eval()
    model = sc.wrap(module, output="logits" if shape.startswith("dict") else None)
    if shape == "normalisation inside":
        assert model.preprocess.mean == (0.0,) * 3 and model.preprocess.std == (1.0,) * 3
    if shape == "pixels of 0-255":
        assert model.preprocess.std == pytest.approx((1 / 255,) * 3)
    images = torch.rand(2, 3, 160, 160, generator=torch.Generator().manual_seed(2))
    images = model.preprocess.normalise(images).requires_grad_()
    native = module(images)
    native = native["logits"] if isinstance(native, dict) else native
    assert_close(model(images), native, atol=1e-4, rtol=1e-4)
    gradients = [torch.autograd.grad(out[:, 2].sum(), images)[0] for out in (model(images), native)]
    assert_close(*gradients, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        module.head.bias += 1  # new weights are noticed
    assert_close(
        model(images), native + (1 / 1.7 if shape == "temperature" else 1), atol=1e-4, rtol=0
    )


def test_probabilities_are_read_as_logits_by_their_logarithm():
    module = Around(lambda m, x: m.head(m.backbone(x)).softmax(dim=-1)).eval()
    images = torch.randn(2, 3, 160, 160)
    assert_close(sc.wrap(module)(images).softmax(dim=-1), module(images), atol=1e-6, rtol=1e-4)


def test_what_cannot_be_read_is_refused_with_a_hint_that_works():
    two = Around(lambda m, x: (lambda f: (m.head(f), f))(m.backbone(x))).eval()
    with pytest.raises(BadOption, match=r"output=0 \(--input output=0\)"):
        sc.wrap(two)
    assert sc.wrap(two, output=0).n_classes == 5
    power = Around(lambda m, x: m.head(m.backbone.forward_features(x).square().mean(dim=1))).eval()
    with pytest.raises(UnsupportedModel, match="view_parts"):
        sc.wrap(power)
    both = nn.ModuleDict({"a": two.backbone, "b": Around(None).backbone})
    with pytest.raises(UnsupportedModel, match="it holds 2 models"):
        sc.wrap(both)


def test_mistakes_in_own_code_are_one_line(project):
    Path("broken.py").write_text(
        "def build():\n    return undefined\ndef number():\n    return 3\n"
    )
    for name, kind, said in (
        ("project.py:liner", UnknownName, "Did you mean linear"),
        ("nowhere.py:build", DataMissing, "no such file"),
        ("broken.py:build", DataMissing, "NameError.*broken.py, line 2"),
        ("broken.py:number", BadOption, "returned a int"),
    ):
        with pytest.raises(kind, match=said):
            sc.load(name)
    assert sc.load("project:linear").name == "project:linear"


def test_the_page_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "own.md").read_text(encoding="utf-8")
    project, *blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("project.py").write_text(project)
    names: dict = {}
    printed = io.StringIO()
    with redirect_stdout(printed):
        for block in (project, *blocks):
            exec(compile(block, "own.md", "exec"), names)
    assert names["maps"].shape == (2, 10, 10)
    assert "160 x 160 pixels (short side 176, " in printed.getvalue()
    pruned = names["pruned"]  # another random module, with the weights of the folder
    assert pruned.classes == ("cat", "dog", "frog")
    written = load_file("pruned/model.safetensors")
    assert all(
        torch.equal(value, written[name]) for name, value in pruned.module.state_dict().items()
    )


# ---------------------------------------------------------------- torch's datasets


class Items(Dataset):
    """Critters as a torch dataset of (image, label, mask)."""

    def __init__(self, form):
        self.data, self.form = sc.data.open_data(TEST, limit=24), form
        self.classes = list(self.data.classes)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index]
        return self.form(sample.image), sample.label, sample.mask


def test_datasets_and_loaders_of_torch_give_what_a_dataset_of_ours_gives(tmp_path):
    model = sc.load("builtin:critters-biased")
    expected = sc.audit(model, sc.data.open_data(TEST, limit=24), per_image=1)
    normal = Items(model.preprocess.normalise)
    forms = [Items(sc.data.to_pil), Items(lambda image: image), normal]
    for data in (*forms, DataLoader(normal, batch_size=4), Subset(normal, range(24))):
        result = sc.audit(model, data, per_image=1)
        assert result.verdict == expected.verdict
        if data is forms[1]:  # other pixels, though by a rounding, draw other backgrounds
            assert (result.flips, result.interval) == (expected.flips, expected.interval)
        assert result.numbers()["accuracy"] == expected.numbers()["accuracy"]
    repaired = sc.repair(model, normal, test=normal.data, per_image=2, remedies="last-layer")
    assert repaired.record["train"] == 18 and repaired.record["test"] == 24
    tables = []
    for place, asked in enumerate(((model, normal), ("builtin:critters-biased", TEST))):
        request = sc.bench.Request(*asked, ["rollout"], metrics=("aupr1",), limit=3)
        folder = tmp_path / str(place)
        assert sc.bench.run(folder, request).complete
        tables.append(sc.bench.table(folder).cells["rollout"]["aupr1"].n)
    assert tables == [3, 3]
    with pytest.raises(BadOption, match=r"FILE\.py:FUNCTION"):
        sc.bench.run(tmp_path / "2", sc.bench.Request(model, TEST, ["gae"], limit=2), workers=2)
    with pytest.raises(BadOption, match="a torch Dataset"):
        sc.audit(model, iter([1]))
    images = DataLoader([(normal[i][0], normal[i][1]) for i in range(4)], batch_size=2)
    assert len(sc.explain(model, images, methods=["rollout"]).names) == 4


# ---------------------------------------------------------------- preprocessing


def pipelines():
    """Evaluations as users write them: image -> [1, 3, h, w], and what `--input FILE` is given."""
    import timm
    from torchvision import transforms
    from transformers import CLIPImageProcessor, ViTImageProcessor

    torch_like = transforms.Compose(
        [
            transforms.Resize(176),
            transforms.CenterCrop(160),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    timm_like = timm.data.create_transform(160, crop_pct=0.9, interpolation="bicubic")
    squash = transforms.Compose(
        [
            transforms.Resize((160, 160)),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    hf = ViTImageProcessor(size={"height": 160, "width": 160})
    clip = CLIPImageProcessor(size={"shortest_edge": 160}, crop_size={"height": 160, "width": 160})

    def processed(processor):
        return lambda image: processor(image, return_tensors="pt")["pixel_values"]

    return {
        "torchvision": (lambda image: torch_like(image)[None], torch_like),
        "timm": (lambda image: timm_like(image)[None], timm_like),
        "squash": (lambda image: squash(image)[None], squash),
        "hf": (processed(hf), hf),
        "clip": (processed(clip), clip),
    }


@pytest.mark.parametrize("pipeline", ["torchvision", "timm", "squash", "hf", "clip"])
def test_own_evaluation_and_seecause_agree_to_the_last_image(pipeline, tmp_path, monkeypatch):
    import timm
    from torchvision.datasets.folder import pil_loader

    monkeypatch.chdir(tmp_path)
    own, told = pipelines()[pipeline]
    given = "steps"
    if hasattr(told, "save_pretrained"):
        told.save_pretrained(given)
    else:
        torch.save(told, "steps.pt")
        code = "steps = lambda: torch.load('steps.pt', weights_only=False)"
        Path("steps.py").write_text(f"import torch\n{code}\n")
        given = "steps.py:steps"
    torch.manual_seed(3)
    module = timm.create_model("test_vit", num_classes=7).eval()
    files, generator = [], np.random.default_rng(4)
    for place in range(24):  # odd sizes, smooth colours; some lie on their side or are transparent
        small = generator.integers(0, 256, (5, 7, 3 + place % 2), np.uint8)
        size = tuple(int(side) for side in generator.integers(150, 330, 2))
        image, file = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC), f"{place}.png"
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(file, exif=exif if place % 3 == 0 else None)
        files.append(file)
    with torch.no_grad():
        pixels = torch.cat([own(pil_loader(file)) for file in files])
        module.head.bias -= module(pixels).mean(dim=0)  # so that predictions differ
        expected = module(pixels)
        torch.save(module.state_dict(), "own.pth")
        model = sc.wrap(module, preprocess=told)
        logits = torch.cat([model(model.preprocess(file)) for file in files])
    same = logits.argmax(dim=1) == expected.argmax(dim=1)
    assert len(expected.argmax(dim=1).unique()) > 2
    if pipeline in ("torchvision", "timm", "squash"):
        assert same.all()
        assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    else:  # processors resize tensors, not images, so that some pixels differ by a level
        assert same.sum() >= len(files) - 1
        assert (logits - expected).abs().max() < 0.02 * expected.std()
    done = invoke(
        "explain", *files[:3], "--model", "timm:test_vit", "--weights", "own.pth",
        "--input", given, "--method", "center", "--out", "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert model.preprocess.sentence() in done.stdout
    for line, row in zip(done.stdout.splitlines()[1:4], expected[:3], strict=True):
        assert f"class {int(row.argmax())}," in line


def test_implausible_preprocessing_is_refused():
    import timm

    module = timm.create_model("test_vit", num_classes=3)
    with pytest.raises(BadOption, match=r"\[0.5, 0.5, 0.5\] if these are of 0-255"):
        sc.wrap(module, mean=(127.5,) * 3)
    with pytest.raises(
        BadOption, match=r"multiples of the patch, \(16, 16\), such as \(256, 256\)"
    ):
        sc.wrap(module, size=250)
    changed = sc.wrap(module, preprocess={"crop": 0.5, "filter": "nearest", "squash": True})
    assert changed.preprocess.sentence() == (
        "160 x 160 pixels (320 x 320, centre crop, nearest), mean 0.5,0.5,0.5, std 0.5,0.5,0.5"
    )
    with pytest.raises(BadOption, match="evaluation, not of training"):
        sc.wrap(module, preprocess=timm.data.create_transform(160, is_training=True))


def test_transforms_with_other_pixels_than_their_steps_say_are_refused():
    import torchvision.transforms as v1
    from torchvision.transforms import v2

    half, shrink, cut = v1.Normalize([0.5], [0.5]), v1.Resize(96), v1.CenterCrop(80)
    inner = v1.Compose([shrink, cut])
    assert preprocess_of(v1.Compose([inner, v1.ToTensor(), half])).mean == (0.5,) * 3
    for steps in (
        [cut, shrink, v1.ToTensor(), half],
        [shrink, cut, v1.ToTensor(), half, half],
        [shrink, cut, v1.PILToTensor()],
        [shrink, cut, v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize([120.0], [60.0])],
        [shrink, cut, v1.ToTensor(), v1.Lambda(lambda rgb: rgb.flip(0)), half],
        [shrink, cut, v1.RandomHorizontalFlip(), v1.ToTensor(), half],
    ):
        with pytest.raises(BadOption, match="Resize, CenterCrop, Normalize"):
            preprocess_of(v1.Compose(steps))


def test_weights_of_an_own_function_are_not_called_random(project):
    with pytest.raises(BadOption, match="makes its own weights"):
        sc.load("project.py:linear", weights="random")
