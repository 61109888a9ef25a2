"""Block-sparse matrices: their product with dense ones, and the block masks of the known sparse patterns."""

from vishwamai.ops.sparse.api import SPARSE, block_sparse_matmul
from vishwamai.ops.sparse.patterns import bigbird, block_indices, document, local, strided

__all__ = ["SPARSE", "bigbird", "block_indices", "block_sparse_matmul", "document", "local", "strided"]
