"""Sequences of products: the reference, the limits, and which launches wait."""

from typing import Any

import pytest
import torch

from kernels import cuda
from kernels.chained import cases, cost, torch_bf16
from kernels.chained.reference import reference
from kernels.common import Workload
from kernels.nvfp4 import cost as of_product
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.ring_config import in_form
from lab.check import accuracy
from tests.kernels import stub_driver

CHECKS = [w for w in cases.WORKLOADS if w.role == "check"]


def rounded(inputs: Any, dtype: torch.dtype) -> torch.Tensor:
    """The sequence with exact weights, each result in `dtype`."""
    y, number = inputs["x"].double(), 0
    while f"w{number}_packed" in inputs:
        parts = [inputs[f"w{number}_{part}"] for part in ("packed", "scale", "tensor_scale")]
        y = (y @ fmt.dequantise(fmt.Nvfp4(*parts)).double().T).to(dtype).double()
        number += 1
    return y


@pytest.mark.parametrize("workload", CHECKS, ids=lambda w: w.id)
def test_the_limit_holds_what_rounds_between_and_refuses_what_skips_a_product(workload: Workload) -> None:
    inputs = cases.inputs(workload, 3)
    wanted, limit = reference(inputs)["y"], cases.tolerance(workload, "nvfp4-w4a16")["y"]
    torch.testing.assert_close(rounded(inputs, torch.float64), wanted)
    right = rounded(inputs, torch.bfloat16).to(torch.bfloat16)
    assert accuracy.compare("y", right, wanted, limit).ok
    for wrong in (torch.zeros_like(right), -right, rounded(inputs, torch.float8_e4m3fn).to(torch.bfloat16)):
        assert not accuracy.compare("y", wrong, wanted, limit).ok


@pytest.mark.parametrize("workload", CHECKS, ids=lambda w: w.id)
def test_torch_is_within_its_limit(workload: Workload) -> None:
    inputs = cases.inputs(workload, 3)
    out = cases.outputs(workload, inputs)
    torch_bf16.run(torch_bf16.prepare(inputs), out)
    limit = cases.tolerance(workload, "bf16")["y"]
    assert accuracy.compare("y", out["y"], reference(inputs)["y"], limit).ok


def test_the_cost_is_that_of_every_product() -> None:
    layer = next(w for w in cases.WORKLOADS if w.role == "measure")
    each = [of_product.cost(Workload("", {"M": 1, "N": n, "K": k, "dtype": "bf16"}), "nvfp4-w4a16")
            for n, k in ((6144, 5120), (5120, 6144), (17408, 5120), (5120, 17408))]  # fmt: skip
    assert cost.cost(layer, "nvfp4-w4a16").bytes == sum(c.bytes for c in each)
    assert cost.cost(layer, "nvfp4-w4a16").flops == sum(c.flops for c in each)


@pytest.mark.parametrize(("name", "launched"), [("waiting", [0, 0, 0]), ("chained", [0, 1, 1])])
def test_the_first_product_waits_in_every_arm(name: str, launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    chain = pytest.importorskip("kernels.chained.cuda_products")
    candidate = next(c for c in chain.CANDIDATES if c.name == name)
    workload = CHECKS[1]
    inputs = cases.inputs(workload, 3)
    args, out = candidate.prepare(inputs), cases.outputs(workload, inputs)
    monkeypatch.setattr(
        chain.cuda_decode, "configured", lambda m, n, k, dtype, device, form: in_form(m, n, k, dtype, form)
    )
    seen: list[tuple[int, int, int]] = []
    driver = stub_driver.Driver([8, 8, 8, 8, 4, 4, 4, 4])

    def launch(config: Any, function: Any, pointers: Any, extra: Any) -> int:
        seen.append((config._obj.count, *stub_driver.addresses(pointers, (0, 3))))
        return 0

    driver.cuLaunchKernelEx = launch  # type: ignore[method-assign]
    with stub_driver.stubbed(driver, {}):
        candidate.run(args, out)
    assert [count for count, _, _ in seen] == launched
    assert [read for _, read, _ in seen] == [inputs["x"].data_ptr(), *(wrote for *_, wrote in seen[:-1])]
    assert seen[-1][2] == out["y"].data_ptr()
    assert len({wrote for *_, wrote in seen}) == 3
    assert cuda.RECORDED.get() is None
