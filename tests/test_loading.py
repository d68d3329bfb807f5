"""Names, files and options of `sc.load`: what cannot be honoured is refused, in one clear line."""

import json

import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close
from torchvision.models import get_model_weights

import seecause as sc
from seecause.errors import BadImage, BadOption, UnknownName
from seecause.loading import imagenet_names, open_source
from tests.families.native import HALF
from tests.tiny import scramble


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("builtin:critters-vit", {"weights": "nowhere.safetensors"}, "weights"),
        ("builtin:critters-vit", {"weights": "random"}, "weights"),
        ("builtin:critters-vit", {"size": 128}, "size"),
        ("builtin:critters-wit", {}, "Did you mean critters-vit"),
        ("torchvision:vit_b_16", {"weights": "random", "size": (224, 320)}, "square"),
        (
            "timm:vit_tinny_patch16_224",
            {"weights": "random"},
            r"Did you mean vit_tiny_patch16_224.*Known: \d+ names\.",
        ),
        ("vit_tiny_patch16_224", {}, "Did you mean timm:vit_tiny_patch16_224"),
        ("timm:test_vit", {"weights": "missing.safetensors"}, "does not exist"),
        ("timm:test_vit", {"weights": "random", "dtype": "fp16"}, "bfloat16"),
        ("timm:test_vit", {"weights": "random", "device": "gpu"}, "cuda:N"),
        ("nothing", {}, "timm:NAME"),
    ],
)
def test_what_cannot_be_honoured_is_refused(spec, options, said):
    with pytest.raises(sc.SeecauseError, match=said) as caught:
        sc.load(spec, **options)
    assert len(str(caught.value)) < 1500


def test_a_file_without_weights_is_named(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "c.pth")
    with pytest.raises(sc.SeecauseError, match=r"c\.pth"):
        sc.load("timm:test_vit", weights=tmp_path / "c.pth")


def test_torch_files_and_transformers_folders_are_read(tmp_path):
    import timm
    from transformers import ViTConfig, ViTForImageClassification

    module = timm.create_model("test_vit")
    torch.save(
        {name: value.half() for name, value in module.state_dict().items()}, tmp_path / "plain.pth"
    )
    model = sc.load("timm:test_vit", weights=tmp_path / "plain.pth")
    images = torch.rand(1, 3, *model.preprocess.size)
    assert model.dtype == torch.float32 and model.classes == imagenet_names()
    torch.testing.assert_close(model(images), module.half().float().eval()(images))

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 48, "image_size": 32, "patch_size": 8, "num_labels": 3}
    config = ViTConfig(**sizes)
    native = ViTForImageClassification(config).eval()
    for dtype in (torch.float32, torch.float16):
        native.to(dtype).save_pretrained(tmp_path / str(dtype))
        for spec, weights in (
            (f"hf:{tmp_path / str(dtype)}", None),
            ("hf:any-name", tmp_path / str(dtype)),
        ):
            found = sc.load(spec, weights=weights, mean=(0.5,) * 3, std=(0.5,) * 3, size=32)
            assert (
                found.dtype == torch.float32 and found.n_classes == 3 and not found.random_weights
            )
            picture = torch.rand(1, 3, 32, 32)
            torch.testing.assert_close(found(picture), native.float()(picture).logits)


def test_a_head_of_ones_own_does_not_inherit_names():
    model = sc.load("builtin:critters-vit", head=torch.nn.Identity(), pool="cls")
    assert model.classes == () and model.n_classes == model.module.embed_dim


def vit(**changes):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return VisionTransformer(**{**sizes, "num_classes": 5, **changes}).eval()


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {"size": 64}, r"\(32, 32\), which VisionTransformer is built for"),
        ({}, {"size": "large"}, "height, width"),
        ({"num_classes": 0}, {"pool": "max"}, "expected cls or mean or cls[+]mean"),
        ({"num_classes": 0}, {"pool": "latent"}, "the pools of"),
        ({"num_classes": 0, "class_token": False, "global_pool": "avg"}, {"pool": "cls"}, "mean"),
        ({"num_classes": 0}, {"head": torch.ones(24)}, r"a matrix \[classes, width\]"),
        ({}, {"classes": range(5)}, "names in the order of the outputs"),
        ({}, {"templates": ["a {}"]}, "tokenizer="),
        ({"in_chans": 1}, {}, "one number for each channel"),
    ],
)
def test_a_wrap_refuses_what_it_cannot_honour_in_one_line(changes, options, said):
    options = {"head": torch.ones(5, 24), **options} if "num_classes" in changes else options
    with pytest.raises(sc.SeecauseError, match=said):
        sc.wrap(vit(**changes), **HALF, **options)


def test_a_path_a_device_and_a_dtype_are_looked_at_before_weights_are(tmp_path):
    with pytest.raises(UnknownName, match="nowhere"):
        sc.load(tmp_path / "nowhere")
    missing = tmp_path / "missing.safetensors"
    for options, said in (
        ({"dtype": "int8"}, "float32, bfloat16"),
        ({"dtype": torch.int8}, "float32, bfloat16"),
        ({"device": "cuda:99"}, "can use such a GPU"),
    ):
        with pytest.raises(BadOption, match=said):
            sc.load("timm:test_vit", weights=missing, **options)
    with pytest.raises(BadOption, match="a function or a module"):
        sc.load(3)
    for no_module in (sc.wrap(vit(), **HALF), "timm:test_vit"):
        with pytest.raises(BadOption, match="takes names"):
            sc.wrap(no_module)


def test_one_logit_is_read_by_a_sigmoid():
    """A softmax over one class is 1 whatever is seen: every map would be constant."""
    model = sc.wrap(scramble(vit(num_classes=1)), **HALF)
    assert model.sigmoid and not sc.wrap(vit(num_classes=1), sigmoid=False, **HALF).sigmoid
    maps = sc.attribute(model, torch.randn(1, 3, 32, 32).clamp(-1, 1), target=0).maps
    assert maps.std() > 1e-4


def test_a_model_of_grey_pictures_takes_pictures_in_colour():
    model = sc.wrap(vit(in_chans=1), mean=[0.5], std=[0.5])
    photo = Image.linear_gradient("L").convert("RGB")
    images = model.prepare([photo])
    assert images.shape == (1, 1, 32, 32)
    assert model.preprocess.shown(images).shape == (1, 3, 32, 32)
    assert_close(
        model.preprocess.raw(images)[0, 0, :, 0], torch.linspace(0, 1, 32), atol=0.05, rtol=0
    )
    assert sc.attribute(model, photo, target=1).maps.shape == (1, 4, 4)
    four = sc.wrap(vit(in_chans=4), mean=[0.5] * 4, std=[0.5] * 4)
    with pytest.raises(BadImage, match="takes 4 channels"):
        four.prepare([photo])
    assert four(torch.zeros(1, 4, 32, 32)).shape == (1, 5)


@pytest.mark.parametrize("name", ["swin_t", "resnet18", "convnext_tiny"])
def test_pictures_for_torchvision_are_framed_by_its_own_transforms(name):
    steps = open_source("torchvision", name, weights="random").wrap_options["preprocess"]
    generator = torch.Generator().manual_seed(0)
    photo = Image.fromarray(torch.randint(256, (260, 330, 3), generator=generator).byte().numpy())
    native = get_model_weights(name).DEFAULT.transforms()(photo)
    assert_close(steps(photo)[0], native, atol=1e-5, rtol=0)


def test_code_of_a_repository_runs_only_where_it_is_allowed(tmp_path, monkeypatch, caplog):
    from transformers import ViTConfig, ViTForImageClassification, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    shape = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = ViTConfig(**shape, intermediate_size=48, image_size=32, patch_size=8, num_labels=3)
    folder, ran = tmp_path / "repo", tmp_path / "ran"
    ViTForImageClassification(config).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForImageClassification": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(
        "from pathlib import Path\nfrom transformers import ViTForImageClassification\n"
        f"Path({str(ran)!r}).touch()\nclass Mine(ViTForImageClassification):\n    pass\n"
    )
    plain = sc.load(folder, **HALF)
    assert type(plain.module) is ViTForImageClassification and not ran.exists()
    assert "code of its repository" not in caplog.text
    trusted = sc.load(folder, **HALF, trust_remote_code=True)
    assert type(trusted.module).__name__ == "Mine" and ran.exists()
    assert "code of its repository is run" in caplog.text
    images = torch.rand(1, 3, 32, 32)
    assert_close(trusted(images), plain(images))
