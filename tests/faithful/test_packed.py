"""The kernel for sequences of different lengths: where there is one, and that it is given the same
rows as attention image by image."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from seecause.faithful import attention
from seecause.faithful.interventions import packing
from tests.faithful.nets import pictures, tiny_net

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "there"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_the_kernel_is_for_half_precision_from_ampere_on(monkeypatch, capability, there):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (
        attention.has_kernel(GPU, torch.float16)
        == attention.has_kernel(GPU, torch.bfloat16)
        == there
    )
    assert not attention.has_kernel(GPU, torch.float32) and not attention.has_kernel(
        CPU, torch.bfloat16
    )


def plain(q, k, v, starts_q, starts_k, most_q, most_k, *, scale):
    """What `varlen_attn` does with rows [R, H, dh], sequence by sequence."""
    rows = [
        F.scaled_dot_product_attention(
            *(x[first:last].transpose(0, 1) for x in (q, k, v)), scale=scale
        ).transpose(0, 1)
        for first, last in starts_q.unfold(0, 2, 1).tolist()
    ]
    assert (
        torch.equal(starts_q, starts_k)
        and starts_q.dtype == torch.int32
        and max(map(len, rows)) <= most_q == most_k
    )
    return torch.cat(rows)


@pytest.mark.parametrize("there", [True, False])
@torch.no_grad()
def test_packed_rows_go_to_the_kernel_or_image_by_image(monkeypatch, there):
    net, images, calls = tiny_net(), pictures(4), []
    mask = net(images).mask
    mask[0], mask[1] = False, True
    masked = net.classify(images, mask, packed=False)

    def kernel(*given, **options):
        calls.append(given)
        return plain(*given, **options)

    monkeypatch.setattr(attention, "has_kernel", lambda device, dtype: there)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    assert_close(net.classify(images, mask), masked, atol=1e-10, rtol=0)
    assert len(calls) == (3 if there else 0)  # one for each block


@pytest.mark.parametrize(
    ("autocast", "capability", "expected"),
    [(False, (9, 0), False), (True, (9, 0), None), (True, (7, 5), False)],
)
def test_a_gpu_without_the_kernel_runs_all_tokens(monkeypatch, autocast, capability, expected):
    """Image by image is slower there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: autocast)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    there, here = (
        SimpleNamespace(
            stage1=SimpleNamespace(prototypes=SimpleNamespace(device=device, dtype=torch.float32))
        )
        for device in (GPU, CPU)
    )
    assert packing(there) is expected and packing(here) is None
