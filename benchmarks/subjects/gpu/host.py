"""What the host spends on a call of `vishwamai.torch` on a GPU, in microseconds; no GPU is needed.

    python benchmarks/gpu.py host                 # --ops norm,attention chooses

Tensors are small and on the CPU, and Triton has a driver that compiles and launches nothing: all that is left is
Python, torch's dispatcher and autograd. A figure is the least of many short samples.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import vishwamai.torch as vt
from vishwamai.core import gpu
from vishwamai.torch import launch

sys.path.append(str(pathlib.Path(__file__).parents[3] / "tests"))
from triton_inside import IdleHopper, driver  # pyright: ignore[reportMissingImports]

X = (64, 256)
CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "norm": (vt.rms_norm, (X, (256,))),
    "gemm": (vt.gemm, (X, (256, 128))),
    "attention": (lambda q, k, v: vt.flash_attention(q, k, v, causal=True), ((1, 2, 128, 64),) * 3),
    "gated_linear_unit": (vt.gated_linear_unit, (X, (2, 256, 128))),
    "softmax": (vt.softmax, (X,)),
    "gelu": (lambda x: vt.fused_gelu_dropout(x, deterministic=True), (X,)),
}


def serve(how: gpu.Launch, inputs: dict[str, Any], outputs: dict[str, gpu.Result]) -> list[Any]:
    """`vishwamai.torch.launch.launch` without its question whether the tensors are on a GPU."""
    first = next(iter(inputs.values()))
    results = launch.allocate(outputs, first.device)
    launch.run(how, launch.placed(inputs, first.device), outputs, results)
    return list(results.values())


def microseconds(call: Callable[[], Any], count: int = 10, rounds: int = 100) -> float:
    """The least time of a call."""
    for _ in range(5):
        call()
    least = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        least = min(least, (time.perf_counter() - start) / count)
    return least * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=lambda text: text.split(","), default=list(CALLS), help=", ".join(CALLS))
    chosen = parser.parse_args().ops
    torch.set_num_threads(1)
    driver.set_active(IdleHopper())
    torch.cuda.current_device = lambda: 0
    gpu.register_launcher("torch", serve)
    print("| operation | inference | forward | forward and backward |\n|---|--:|--:|--:|")
    for name in chosen:
        function, shapes = CALLS[name]
        plain = [torch.randn(shape).bfloat16() for shape in shapes]
        trained = [x.clone().requires_grad_() for x in plain]
        cotangent = torch.ones_like(function(*plain))
        with torch.inference_mode():
            inference = microseconds(lambda: function(*plain))  # noqa: B023
        forward = microseconds(lambda: function(*trained))  # noqa: B023
        total = microseconds(lambda: torch.autograd.grad(function(*trained), trained, cotangent))  # noqa: B023
        print(f"| {name} | {inference:.0f} | {forward:.0f} | {total:.0f} |", flush=True)
