"""Shared set-up: one torch thread, and Triton kernels interpreted where there is no GPU, so that
they are tested everywhere."""

from __future__ import annotations

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = (
    False  # on by default: a patch embedding on a GPU would differ in the fourth digit
)
