"""`TPUv4Kernels`: attention, products, normalization and routing as methods of one object, each call measured.

Español: `TPUv4Kernels`: atención, productos, normalización y enrutamiento como métodos de un solo objeto; cada llamada
se mide.
"""

from capibara.core.kernels.tpu_v4 import TPUv4Kernels

__all__ = ["TPUv4Kernels"]
