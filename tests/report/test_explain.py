"""The explain job gives the same result however the pictures are batched."""

from __future__ import annotations

import pytest
import torch

import seecause as sc
from seecause.attribution.explain import explain, top_answers


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return sc.load("timm:test_vit", weights="random")


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 160, 160, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("target", [None, 7])
def test_batches_join_to_one_result(model, images, target):
    heard: list[int] = []
    options = {"caap": {"classes": [1, 2]}}
    found = explain(
        model,
        images,
        names="abc",
        methods=("caap", "sobel"),
        target=target,
        options=options,
        batch=2,
        advance=heard.append,
    )
    whole = sc.attribute(model, images, target, classes=[1, 2])
    torch.testing.assert_close(found.runs["caap"].maps, whole.maps, rtol=1e-4, atol=1e-8)
    assert found.runs["caap"].class_maps.shape == whole.class_maps.shape
    assert found.runs["caap"].labels == whole.labels
    assert {**found.runs["caap"].manifest, "memory_halvings": []} == {
        **whole.manifest,
        "memory_halvings": [],
    }
    assert found.runs["sobel"].native.shape == (3, 160, 160)
    assert sum(heard) == 6


def test_the_explained_class_is_always_among_the_answers(model, images):
    unlikely = int(model(images[:1]).argmin())
    answers = top_answers(model, images[:1], target=unlikely)[0]
    assert (
        len(answers) == 4
        and answers[-1].explained
        and answers[-1].name == model.class_name(unlikely)
    )
    assert [a.probability for a in answers] == sorted(
        (a.probability for a in answers), reverse=True
    )
    assert top_answers(model, images[:1])[0][0].explained
