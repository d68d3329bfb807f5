"""Dropout, autocast and inference mode of the caller change no result."""

from functools import cache

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import seecause as sc
from seecause.attribution.registry import methods
from seecause.errors import BadOption, NotDefined
from seecause.models.view import VisionModel
from tests.tiny import scramble

FRAME = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
METHODS = sorted(methods())
QUICK = {"rise": {"masks": 8}, "integrated-gradients": {"steps": 3}, "smoothgrad": {"samples": 2}}


def vit() -> VisionTransformer:
    """With dropout everywhere."""
    rates = {"drop_rate": 0.5, "proj_drop_rate": 0.5, "attn_drop_rate": 0.5, "pos_drop_rate": 0.5}
    module = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, num_classes=5, **rates
    )
    scramble(module)
    return module


@cache
def view() -> VisionModel:
    model = sc.wrap(vit(), size=32, **FRAME)
    assert isinstance(model, VisionModel)
    return model


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def maps(method: str, pictures: torch.Tensor | None = None) -> torch.Tensor:
    pictures = images() if pictures is None else pictures
    return sc.attribute(view(), pictures, 1, method, **QUICK.get(method, {})).maps


@pytest.mark.parametrize("method", METHODS)
def test_a_model_in_training_mode_is_run_in_eval_mode(method):
    plain, module = maps(method), view().module
    try:
        module.train()
        module.blocks[1].eval()  # a caller's own choice
        torch.testing.assert_close(maps(method), plain, rtol=0, atol=0)
        assert module.training
        assert module.blocks[0].training
        assert not module.blocks[1].training
    finally:
        module.eval()


@pytest.mark.parametrize("method", ["caap", "gae", "integrated-gradients", "rise", "rollout"])
def test_autocast_and_inference_mode_change_no_map(method):
    plain = maps(method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(maps(method), plain, rtol=0, atol=0)
        assert torch.is_autocast_enabled("cpu")
    with torch.inference_mode():
        torch.testing.assert_close(maps(method, images().clone()), plain, rtol=0, atol=0)
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("around", ["train", "autocast"])
@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: model(x),
        lambda model, x: sc.run(model, x, cache=["blocks.1.heads"])[1]["blocks.1.heads"],
        lambda model, x: sc.patch(model, x, x.flip(0), [[sc.Site(1, "heads", heads=[1])]]),
        lambda model, x: sc.explain(model, x).first.maps,
    ],
    ids=["model", "run", "patch", "explain"],
)
def test_every_run_is_that_of_the_verified_view(call, around):
    model, x = view(), images()
    plain = call(model, x)
    try:
        model.module.train(around == "train")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around == "autocast"):
            torch.testing.assert_close(call(model, x), plain, rtol=0, atol=0)
        assert model.module.training == (around == "train")
    finally:
        model.module.eval()


def test_what_is_below_the_public_calls_refuses_in_words():
    model = view()
    try:
        model.module.blocks[0].train()
        with pytest.raises(BadOption, match=r"module\.eval\(\)"):
            model.check(images())
    finally:
        model.module.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(BadOption, match="autocast"):
        model.check(images())


def labelled(x):
    return sc.background.LabelledImages(x, torch.tensor([1, 2]), x[:, 0] > 0)


def test_what_is_no_view_is_refused_in_words():
    with pytest.raises(BadOption, match=r"model=a VisionTransformer cannot be used"):
        sc.background.information_gains(view().module, labelled(images()))


def flags(module: torch.nn.Module) -> tuple:
    """What training depends on beside numbers."""
    weights = module.named_parameters()
    return (
        {name: part.training for name, part in module.named_modules()},
        {name: (w.requires_grad, w.dtype, w.device, w.data_ptr()) for name, w in weights},
        {name: [*part._forward_hooks] for name, part in module.named_modules()},
    )


def numbers(module: torch.nn.Module) -> list:
    grads = [weight.grad for weight in module.parameters()]
    tensors = [None if grad is None else grad.clone() for grad in grads]
    return [*tensors, *(value.clone() for value in module.buffers()), torch.get_rng_state()]


def trained(steps: int, *, explained: bool) -> tuple[list[float], torch.nn.Module]:
    """Losses of a short training, with maps in between or without."""
    torch.manual_seed(0)
    module = vit().train()
    module.blocks[0].requires_grad_(False)  # a caller's own choice
    module.blocks[1].register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD([w for w in module.parameters() if w.requires_grad], lr=0.05)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(module(images()), torch.tensor([1, 2]))
        if explained:  # between forward and backward
            before = flags(module), numbers(module)
            model = sc.wrap(module, size=32, **FRAME)
            for method in ("caap", "gae", "t-attr"):
                sc.attribute(model, images(), 1, method)
            assert flags(module) == before[0]
            torch.testing.assert_close(numbers(module), before[1], rtol=0, atol=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module


def test_explaining_inside_a_training_loop_changes_nothing_of_it():
    losses, plain = trained(3, explained=False)
    with_maps, module = trained(3, explained=True)
    assert with_maps == losses
    for expected, weight in zip(plain.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def test_a_view_can_be_trained_through():
    """`model(images)` freezes nothing: a loss on it reaches the caller's weights."""
    module = vit().train()
    sc.wrap(module, size=32, **FRAME)(images()).sum().backward()
    assert module.blocks[0].attn.qkv.weight.grad is not None


def test_a_head_of_the_callers_stays_as_it_is():
    module = timm.create_model("test_vit", num_classes=0).double()
    head = torch.nn.Linear(module.num_features, 3)
    model = sc.wrap(module, head=head, pool="mean", **FRAME)
    assert head.weight.dtype == torch.float32 and head.weight.requires_grad and head.training
    assert model.dtype == torch.float64 and model.n_classes == 3


def test_weights_made_in_inference_mode_are_refused_in_words():
    with torch.inference_mode():
        model = sc.wrap(vit(), size=32, **FRAME)
    with pytest.raises(NotDefined, match=r"torch\.inference_mode"):
        sc.attribute(model, images(), 1, "gae")
    assert sc.attribute(model, images(), 1, "rollout").maps.isfinite().all()
