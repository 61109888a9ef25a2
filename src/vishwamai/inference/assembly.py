"""The programs of a model with their pools: of one that is loaded, or of shapes on devices that need not be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vishwamai.inference.head_memory import head_memory, pool_dtype
from vishwamai.inference.memory import ring_pages, rings_of
from vishwamai.inference.pools import make_pools
from vishwamai.inference.programs import Programs
from vishwamai.inference.sharding import adapter_shapes, place_of, put
from vishwamai.models.next_token import NextTokenHead

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from vishwamai.inference.limits import Limits
    from vishwamai.models import Decoder
    from vishwamai.models.adapters import AdapterSizes
    from vishwamai.parallel.optimization import Optimization


def window_rings_of(model: Decoder, draft: Decoder | None, limits: Limits) -> dict[int, int]:
    """Pages of a sequence's ring by window, of the layers of both models; a window has the same ring in both."""
    decoders = (model,) if draft is None else (model, draft)
    return {window: ring for decoder in decoders for window, ring in rings_of(decoder.config, limits).items()}


def assemble(
    model: Decoder,
    draft: Decoder | None,
    limits: Limits,
    *,
    num_pages: int,
    kv_dtype: Any,
    sample: Sequence[int],
    mesh: Mesh | None,
    num_states: int,
    optimization: Optimization,
    adapters: AdapterSizes | None,
    matrices: Mapping[Any, Any] | None = None,
    **options: Any,
) -> Programs:
    """Makes the pools and compiles the programs.

    Args:
      model, draft: decoders, or decoders of shapes (`models.shapes`).
      num_pages: pages of one layer.
      kv_dtype: result of `kv_dtype_of`.
      sample: tokens that the scales of 8-bit pools are measured on.
      num_states: slots of states.
      optimization: keys whose kernels hold.
      adapters: places of adapters, whose arrays are `matrices`.
      options: further arguments of `Programs`.

    Raises:
      ShapeError, UnsupportedError: as `Engine`.
    """
    pools: list[tuple[Any, ...]] = [(), ()]
    with optimization.kernels():
        for i, decoder in enumerate((model, draft)):
            if decoder is not None:
                rings = ring_pages(rings_of(decoder.config, limits), limits)
                dtype = pool_dtype(kv_dtype, decoder.dtype) if isinstance(decoder, NextTokenHead) else kv_dtype
                pools[i] = make_pools(decoder, limits.page_size, num_pages, dtype, sample, mesh, rings, num_states)
    draft_pages = pools[1]
    if isinstance(draft, NextTokenHead):
        draft.share(model)
        draft_pages = head_memory(draft, pools[1], limits, num_pages, options.get("drafts", 0), mesh)
    place = place_of(model)
    if adapters is not None and place is not None:
        shapes = adapter_shapes(model.config, adapters, model.dtype, mesh)
        matrices = shapes if mesh is not None else put(shapes, place)
    return Programs(
        model,
        limits,
        pools[0],
        mesh=mesh,
        draft=draft,
        draft_pages=draft_pages,
        windows=window_rings_of(model, draft, limits),
        kernels=options.pop("kernels", optimization.kernels),
        sizes=adapters,
        matrices=matrices,
        **options,
    )
