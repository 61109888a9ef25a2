"""Attention's Triton kernels in Triton's interpreter, beyond the contract: the backward pass that adds in any order,
other tiles. Runs under TRITON_INTERPRET=1 alone.
"""

import dataclasses

import pytest

import contract
from vishwamai.core.target import Target

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not contract.TRITON, reason="needs a process of its own: make test-gpu"),
]


def choice(name):
    operation = contract.OPERATIONS["attention"]
    (case,) = (case for case in operation.cases if case.name == name)
    (triton,) = (impl for impl in operation.op.implementations if impl.platform == "cuda")
    assert triton.heuristic is not None
    return case, triton, triton.heuristic(contract.case_spec(case), Target("cuda"))


@pytest.mark.parametrize("name", ["GQA causal", "sinks window bf16", "dropout"])
def test_a_backward_pass_that_adds_in_any_order_has_the_same_gradients(name):
    case, triton, config = choice(name)
    assert config.deterministic  # point 8 of the contract, unless asked otherwise
    loose = dataclasses.replace(config, deterministic=False)
    contract.check_all(contract.evaluate(case, triton, config=loose), contract.truth(case), contract.by_reference(case))
