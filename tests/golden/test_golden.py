"""The outputs of the main flows are those that were stored (`python -m tests.golden`); float64 and
what takes long is marked slow."""

import pytest
import torch

from tests.golden.record import compute, differences, entries, read

STORED_WITH = "AVX512"  # kernels of other processors round float32 differently
SEARCHED = {"discovered-masks"}  # by gradient steps in float32, which follow the last bits of torch

CASES = [
    pytest.param(entry, dtype, marks=[pytest.mark.slow] * (entry.slow or dtype == "float64"))
    for entry in entries()
    for dtype in entry.dtypes
]


@pytest.mark.parametrize(
    ("entry", "dtype"), CASES, ids=lambda v: v if isinstance(v, str) else f"{v.section}/{v.name}"
)
def test_outputs_are_those_that_were_stored(entry, dtype):
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype == "float32" and capability != STORED_WITH:
        pytest.skip(f"stored with {STORED_WITH}, this processor has {capability}")
    if dtype == "float32" and entry.name in SEARCHED and torch.__version__ < "2.8":
        pytest.skip(f"stored with a newer torch than {torch.__version__}")
    prefix = f"{entry.section}/{entry.name}/{dtype}/"
    old = {key: value for key, value in read().items() if key.startswith(prefix)}
    assert not differences(old, compute(entry, dtype), dtype)
