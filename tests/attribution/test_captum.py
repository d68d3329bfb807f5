"""captum's own tools on our attributions."""

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadOption
from tests.helpers import near, view
from tests.tiny import pictures, tiny

captum = pytest.importorskip(
    "captum", reason="captum is not installed; run: pip install 'seecause[tools]'"
)
from seecause.attribution import captum as ours_for_captum  # noqa: E402


@pytest.fixture(scope="module")
def case():
    native = tiny("timm_registers")
    return view(native), pictures(native, batch=2)


def test_attributions_have_the_shape_of_the_images_and_the_sum_of_the_map(case):
    model, images = case
    maps = sc.attribute(model, images, target=[1, 2]).maps
    ours = ours_for_captum.CAAP(model).attribute(images, target=[1, 2])
    assert ours.shape == images.shape and ours.dtype == images.dtype
    high, wide = (images.shape[2] // maps.shape[1], images.shape[3] // maps.shape[2])
    patches = ours.sum(dim=1).unfold(1, high, high).unfold(2, wide, wide).sum(dim=(-1, -2))
    near(patches, maps, 1e-10)


@pytest.mark.parametrize("name", ["CAAP", "Mosaic"])
def test_a_noise_tunnel_without_noise_changes_nothing(case, name):
    model, images = case
    ours = getattr(ours_for_captum, name)(model)
    tunnel = captum.attr.NoiseTunnel(ours)
    smooth = tunnel.attribute(images, nt_samples=3, stdevs=0.0, target=torch.tensor([1, 2]))
    near(smooth, ours.attribute(images, target=[1, 2]), 1e-10)


def test_targets_and_tuples_as_captum_has_them(case):
    model, images = case
    caap = ours_for_captum.CAAP(model, score="logit")
    plain = caap.attribute(images, target=1)
    for same in (torch.tensor(1), torch.tensor([1]), [1, 1]):
        assert torch.equal(caap.attribute(images, target=same), plain)
    assert torch.equal(caap.attribute((images,), target=1)[0], plain)
    predicted = model(images).argmax(dim=1)
    assert torch.equal(caap.attribute(images), caap.attribute(images, target=predicted))


def test_what_captum_may_ask_and_a_view_cannot_answer_is_refused(case):
    model, images = case
    caap = ours_for_captum.CAAP(model)
    with pytest.raises(ValueError, match="too many values"):
        caap.attribute((images, images), target=1)
    with pytest.raises(BadOption, match="additional_forward_args"):
        caap.attribute(images, target=1, additional_forward_args=(3,))
    with pytest.raises(BadOption, match="tial"):
        ours_for_captum.CAAP(model, tial="patched")


def test_sums_are_kept_where_patches_do_not_divide_the_picture():
    """A network of stages has 3 x 3 cells for 100 pixels: some have 33 rows, one has 34."""
    maps = torch.rand(2, 3, 3, dtype=torch.float64)
    like = torch.zeros(2, 3, 100, 70, dtype=torch.float64)
    each = ours_for_captum.shares(maps, like)
    assert each.shape == like.shape
    assert_close(each.sum(dim=(1, 2, 3)), maps.sum(dim=(1, 2)))
    cells = each[:, :, :33, :23].sum(dim=(1, 2, 3))
    assert (cells <= maps[:, 0, 0] + 1e-12).all() and (cells > 0.9 * maps[:, 0, 0]).all()
