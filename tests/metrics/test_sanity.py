"""Maps that ignore the class or the weights are caught, and the model that is judged is left as it
was."""

import itertools

import pytest
import timm
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import NotDefined
from seecause.metrics.sanity import (
    copied_view,
    parameter_randomisation,
    random_logit,
)
from tests.helpers import hooks, noise, ready, view
from tests.linear import GRID, SIZE, contributions, linear_model, patch_sums
from tests.tiny import tiny

CLASSES = [2, 3]


@pytest.fixture(scope="module")
def setting():
    model, images = linear_model(), noise(2, 3, *SIZE, seed=5)
    return model, images, lambda x, classes: patch_sums(contributions(model, x, classes))


def gradient_map(model, images, target):
    """Input x gradient by patch: depends on weights and class."""
    images = images.detach().requires_grad_()
    score = model(images)[range(len(images)), target].sum()
    (slope,) = torch.autograd.grad(score, images)
    return torch.nn.functional.adaptive_avg_pool2d(
        (slope * images.detach()).sum(dim=1), model.layout.grid
    )


# random logit


def test_another_class_is_drawn_and_is_never_the_same(setting):
    model, images, explain = setting
    seen = []

    def spy(x, classes):
        seen.append(classes)
        return explain(x, classes)

    for seed in range(6):
        result = random_logit(model, images, spy, torch.tensor(CLASSES), seed=seed)
        assert (result["random-logit"] < 0.9).all()
        assert (seen[-1] != torch.tensor(CLASSES)).all()
    blind = random_logit(model, images, lambda x, _: noise(2, *GRID))
    assert_close(
        blind["random-logit"], torch.ones(2, dtype=torch.float64)
    )  # a class-agnostic method is caught
    with pytest.raises(NotDefined, match="a class as target="):
        random_logit(model, images, explain, lambda logits: logits[:, 0])


def test_a_model_of_one_class_has_no_other():
    native = timm.create_model("test_vit", num_classes=1).eval()
    model = sc.wrap(native, mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(NotDefined, match="a single class"):
        random_logit(model, noise(1, 3, 160, 160), lambda x, _: noise(1, *GRID))


# parameter randomisation


def test_randomisation_leaves_the_model_as_it_was():
    native, model, images = ready("timm_deit3")
    before, key = (
        {name: tensor.clone() for name, tensor in native.module.state_dict().items()},
        model.state_key(),
    )
    result = parameter_randomisation(model, images, gradient_map, CLASSES)
    assert model.state_key() == key and hooks(native.module) == 0
    assert all(
        torch.equal(before[name], tensor) for name, tensor in native.module.state_dict().items()
    )
    assert not any(parameter.requires_grad for parameter in native.module.parameters())
    assert result["signed"].shape == result["absolute"].shape == (2, len(result["layers"]))
    assert (result["absolute"].abs() <= 1).all()


def test_every_step_changes_the_model_further(setting):
    model = view(tiny("timm_deit3"), check=False)
    images, answers = noise(2, 3, 32, 48), []

    def attribute(other, x, target):
        answers.append(other(x))
        return noise(2, 4, 6)  # sees no weights

    result = parameter_randomisation(model, images, attribute, CLASSES)
    assert_close(
        result["mprt"], torch.ones(2, dtype=torch.float64)
    )  # a method that ignores the model is caught
    assert len(answers) == 1 + len(result["layers"])
    assert all(not torch.allclose(a, b, atol=1e-6) for a, b in itertools.pairwise(answers))


@pytest.mark.parametrize(
    "family", ["timm_registers", "timm_map", "hf_vit_backbone", "hf_clip_tower", "torchvision_vit"]
)
def test_a_copy_computes_the_same_and_shares_nothing(family):
    _, model, images = ready(family)
    other = copied_view(model)
    assert_close(other(images), model(images), atol=1e-12, rtol=0)
    mine, theirs = (
        {tensor.data_ptr() for module in m._modules() for tensor in module.parameters()}
        for m in (model, other)
    )
    assert not mine & theirs


def test_a_model_that_cannot_be_wrapped_again_has_no_number(setting):
    model, images, _ = setting
    attribute = lambda other, x, classes: patch_sums(contributions(other, x, classes))  # noqa: E731
    with pytest.raises(NotDefined, match="cannot be wrapped"):
        parameter_randomisation(model, images, attribute, CLASSES)
