"""Paged attention on the CPU: the native kernel of `cpu_paged.isa.cc`, which reads pages as they lie, in whatever type
they are stored.
"""

from __future__ import annotations

import numpy as np

from vishwamai.core import ffi
from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.ops.paged_attention import reference
from vishwamai.ops.paged_attention.spec import Operands, Outputs, PagedSpec

_QUERY = ("float32", "bfloat16", "float16", "float64")
_PAGES = ("float32", "bfloat16", "float16", "int8", "int4", "float8_e4m3fn", "float8_e5m2")


def why_not(spec: PagedSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    o = spec.operands
    query, pages = o.query.dtype.name, o.k_pages.dtype.name
    if query not in _QUERY:
        return f"`query` is {query}; the CPU kernel takes {', '.join(_QUERY)}."
    if "float64" in (query, pages):
        if query != pages:
            return f"`query` is {query} and `kv_pages` {pages}; the CPU kernel takes float64 beside float64 only."
    elif pages not in _PAGES:
        return f"`kv_pages` is {pages}; the CPU kernel reads {', '.join(_PAGES)}."
    odd = next((x.shape[-1] for x in (o.k_pages, o.v_pages) if x is not None and x.shape[-1] % 2), None)
    if pages == "int4" and odd:
        return f"`kv_pages` has rows of {odd} numbers of 4 bits; the CPU kernel reads two at a time."
    if min(spec.head_dim, spec.value_dim) == 0:
        return "a head has no features."
    return ffi.why_not(target)


def forward(spec: PagedSpec, operands: Operands) -> tuple[Outputs, None]:
    """Online softmax over pages; nothing to configure: lengths are known to the kernel only, which splits the work by
    them.
    """
    o = operands
    wide = spec.accumulator
    sinks, slopes = (None if x is None else x.astype(wide) for x in (o.sinks, o.slopes))
    out, logsumexp = ffi.call(
        "vishwamai_paged_attention",
        (
            ffi.result((*o.query.shape[:3], spec.value_dim), o.query.dtype),
            ffi.result(o.query.shape[:3] if spec.return_lse else None, wide),
        ),
        *o._replace(sinks=sinks, slopes=slopes),
        scale=np.float64(spec.scale),
        softcap=np.float64(spec.softcap or 0.0),
        window=np.int64(-1 if spec.window is None else spec.window),
        value_dim=np.int64(spec.value_dim),
    )
    return Outputs(out, logsumexp), None


# Pages are what a served model remembers, and nobody trains through them; whoever asks gets the reference's gradient.
NATIVE = Implementation("native_cpu", "cpu", forward, autodiff_backward(reference.forward), why_not)
