"""The public functions: `optimize_xla_compilation` and `explain_xla_compilation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from vishwamai.core.arguments import described
from vishwamai.core.config import kernel_config
from vishwamai.core.errors import KernelError
from vishwamai.core.target import Target
from vishwamai.rewrite.report import XlaReport
from vishwamai.rewrite.rewriter import rewritten, size


def optimize_xla_compilation(
    computation_graph: ClosedJaxpr | Jaxpr, target_config: str | Mapping[str, object] | None = None
) -> ClosedJaxpr:
    """The program with our operations in place of attention and norms written by hand, and without what it need not
    compute: dead equations, repeated ones, and casts to a wider dtype and back.

    The last three passes keep every value. A call of an operation takes the place of equations whose values nothing
    else reads, and is as accurate as the operation's contract says. Equations with effects stay. Inner programs of
    `jit`, `scan`, `while_loop` and `cond` are rewritten; rules of gradients (`custom_vjp`), `jax.checkpoint`,
    `shard_map` and kernels are left as they are. `explain_xla_compilation` says what was done. The compiler's options
    are no part of it.

    Args:
      computation_graph: result of `jax.make_jaxpr(f)(*args)`. Trace the function before its gradient is taken: a
        backward pass reads the weights of attention, which the operation does not keep. Then take the gradient of the
        result.
      target_config: device of the program: "v5e", "h100", "cpu". An operation is put in where a kernel of ours runs
        it there. A dict has fields of `KernelConfig`, such as `{"target": "v5e", "block_size": 256}`, which that
        choice reads. None means the ambient target, else this machine.

    Returns:
      The program; `jax.core.eval_jaxpr(new.jaxpr, new.consts, *args)` runs it, under `jax.jit` and `jax.grad`, too.

    Raises:
      KernelError: `computation_graph` is not a program, or a key of the dict is not a field of `KernelConfig`.
      DeviceError: the target is unknown.

    >>> import jax, jax.numpy as jnp
    >>> def attend(q, k, v):
    ...     logits = jnp.einsum("bhqd,bhkd->bhqk", q, k) / jnp.sqrt(64)
    ...     logits = jnp.where(jnp.tril(jnp.ones((128, 128), bool)), logits, -1e9)
    ...     return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(logits), v)
    >>> q = jnp.ones((1, 2, 128, 64))
    >>> program = optimize_xla_compilation(jax.make_jaxpr(attend)(q, q, q), "v5e")
    >>> [eqn.params["name"] for eqn in program.eqns]
    ['flash_attention']
    >>> jax.core.eval_jaxpr(program.jaxpr, program.consts, q, q, q)[0].shape
    (1, 2, 128, 64)
    """
    return _report("optimize_xla_compilation", computation_graph, target_config).program


def explain_xla_compilation(
    computation_graph: ClosedJaxpr | Jaxpr, target_config: str | Mapping[str, object] | None = None
) -> XlaReport:
    """What `optimize_xla_compilation` does to a program: each operation that it found and where, which kernel runs
    there, and why a place that looks like an operation was left as it is.

    Args, errors: those of `optimize_xla_compilation`.

    Returns:
      The report, which has the rewritten `program`.

    >>> import jax, jax.numpy as jnp
    >>> def norm(x):
    ...     return x / jnp.sqrt(jnp.mean(x * x, axis=0, keepdims=True) + 1e-6)
    >>> found = explain_xla_compilation(jax.make_jaxpr(norm)(jnp.ones((8, 128))), "v5e").findings
    >>> found[0].replaced, found[0].reason
    (False, 'it normalises over other axes than the last one')
    """
    return _report("explain_xla_compilation", computation_graph, target_config)


def _report(function: str, jaxpr: Any, config: str | Mapping[str, Any] | None) -> XlaReport:
    fields = dict(config) if isinstance(config, Mapping) else {}
    target = fields.pop("target", None) if isinstance(config, Mapping) else config
    if isinstance(jaxpr, Jaxpr):
        if jaxpr.constvars:
            raise KernelError(
                f"{function}: `computation_graph` is a Jaxpr without the values of its {len(jaxpr.constvars)} "
                "constants; pass the ClosedJaxpr that `jax.make_jaxpr(f)(*args)` gives."
            )
        jaxpr = ClosedJaxpr(jaxpr, [])
    if not isinstance(jaxpr, ClosedJaxpr):
        raise KernelError(
            f"{function}: `computation_graph` is {described(jaxpr)}; pass the program that `jax.make_jaxpr(f)(*args)` "
            "gives."
        )
    if target is not None:
        Target.parse(target)
    with kernel_config(**fields):
        program, done = rewritten(jaxpr, target)
    counts = done.counts
    return XlaReport(
        program,
        tuple(done.findings),
        dead=counts["dead"],
        repeated=counts["repeated"],
        casts=counts["casts"],
        recognised=counts["recognised"],
        before=size(jaxpr.jaxpr),
        after=size(program.jaxpr, done.calls),
    )
