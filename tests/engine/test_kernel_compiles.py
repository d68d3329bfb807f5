"""Every Triton kernel compiles for GPUs, on a machine without one."""

import os
import subprocess
import sys

import pytest

from seecause.engine import kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(kernel.triton_kernels() is None, reason="needs triton"),
]
TILES = {"ROWS": 64, "KEYS": 32, "LANES": 64, "WIDTH": 64, "SHARE": 2, "EACH": 1, "USED": 64}
MASKED = {"BANK0": True, "KEEP0": True, "BANK1": True, "KEEP1": False, "ALONE": False, "OWN": True}
KERNELS = {
    "banked": [MASKED, {**MASKED, "BANK1": False, "ALONE": True, "OWN": False}],
    "soft": [{"BACK": False}, {"BACK": True}],
    "back_weights": [{}],
    "rotated": [{"HEADS": 32, "HALF": 64, "BACK": back} for back in (False, True)],
    "text_rows": [{"ROWS": 16, "BACK": False}, {"ROWS": 16, "BACK": True}],
    "shared_read_back": [{}],
}
# in a process of its own: the suite interprets kernels
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from seecause.engine import kernel_triton

name, rows, constants = sys.argv[1], *map(eval, sys.argv[2:])
function = getattr(kernel_triton, name)
def kind(argument):
    if argument in constants: return "constexpr"
    if argument in ("scale", "plain"): return "fp32"
    if argument in ("owner_ptr", "starts_ptr") or argument[:-1] in ("keep", "work"): return "*i32"
    if "lse" in argument and not argument.endswith(("_b", "_r", "_h", "_row")): return "*fp32"
    if argument in "w0 w1 w_ptr dw_ptr delta_ptr choose_ptr d_choose".split(): return "*fp32"
    return rows if argument.endswith("_ptr") or argument in "k0 v0 k1 v1 ko vo".split() else "i32"
constants = {k: v for k, v in constants.items() if k in function.arg_names}
signature = {argument: kind(argument) for argument in function.arg_names}
values = {(function.arg_names.index(k),): v for k, v in constants.items()}
made = compile(ASTSource(function, signature, values), target=GPUTarget("cuda", 90, 32))
assert len(made.asm["cubin"]) > 1000
"""


@pytest.mark.parametrize("rows", ["*bf16", "*fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name, rows):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    for own in KERNELS[name]:
        constants = {**TILES, "EXACT": rows == "*fp32", **own}
        command = [sys.executable, "-c", COMPILE, name, repr(rows), repr(constants)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]


def test_a_kernel_that_cannot_compile_is_noticed():
    command = [sys.executable, "-c", COMPILE, "rotated", repr("*bf16"), repr({"HEADS": 3})]
    assert subprocess.run(command, capture_output=True).returncode != 0
