"""Every family of timm is read or refused in words, and the words name it."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close

import seecause as sc
from seecause.errors import UnsupportedModel, ViewMismatch
from seecause.models.parts import find_parts
from tests.families.native import HALF
from tests.tiny import scramble


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("xcit_nano_12_p8_224", "timm Xcit is not supported: its attention is between channels"),
        ("mvitv2_tiny", "timm MultiScaleVit is not supported: its queries and keys are pooled"),
        ("nest_tiny", "timm Nest is not supported: its attention is within blocks"),
        ("sequencer2d_s", "timm Sequencer2d is not supported: no view of this class is written"),
    ],
)
def test_what_is_not_read_is_refused_by_name(name, words):
    with torch.device("meta"):
        module = timm.create_model(name)
    with pytest.raises(UnsupportedModel, match=words):
        find_parts(module)


def test_a_class_derived_from_one_of_timm_is_read_as_that_and_compared():
    class Mine(VisionTransformer):
        pass

    class Doubled(VisionTransformer):
        def forward_features(self, *args, **options):
            return 2 * super().forward_features(*args, **options)

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    native = scramble(Mine(**sizes, num_classes=5))
    images = torch.randn(1, 3, 32, 32)
    assert_close(sc.wrap(native, **HALF)(images), native(images))
    with pytest.raises(ViewMismatch):
        sc.wrap(scramble(Doubled(**sizes, num_classes=5)), **HALF)
