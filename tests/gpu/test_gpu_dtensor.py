"""DTensor: two processes over gloo give the values of one, forward and backward, and talk to each other only where they
must.

pytest starts this file twice as a program; each process checks every case and writes what it saw, which the (long)
tests judge. By default the rules are asked in one process that plays the first of eight, without values.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import contract  # noqa: E402
import scripts  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from vishwamai.core.errors import ShapeError  # noqa: E402

pytestmark = pytest.mark.skipif(contract.INTERPRETED, reason="the rules are the same")
R = None  # whole on both; a number: split along that axis
SEED = torch.tensor([5, -7])
NORM = (4, 6, 16), (4, 6, 16), (16,), (16,)
ROWS = (4, 6), (6, 8), (8,), (4,), (8,)


def normed(x, residual, scale, offset):
    return vt.layer_norm(x, scale, offset, residual=residual)


def product(a, b, bias, scale_a, scale_b):
    return (vt.gemm(a, b, bias=bias, scale_a=scale_a, scale_b=scale_b, activation="gelu"),)


def turned(query, key):
    return vt.apply_rope((query, key), torch.arange(6) * 3)


def attended(query, key, value, bias, sinks):
    """With everything that knows of places: dropout and slopes by heads, segments by batch."""
    ids = torch.arange(6) // 3 + torch.zeros(2, 6, dtype=torch.long)
    seed = torch.arange(2 * query.shape[1] * 2).reshape(2, -1, 2) * 77
    slopes = torch.linspace(0.5, 0.1, query.shape[1])
    extras = [replicated(x, query) for x in (ids, ids, seed, slopes)]
    options: Any = {"segment_ids": extras[:2], "dropout_rate": 0.3, "dropout_seed": extras[2]}
    options["alibi_slopes"] = extras[3]
    return vt.flash_attention(query, key, value, bias, sinks=sinks, causal=True, return_lse=True, **options)


def packed(query, key, value):
    starts = replicated(torch.tensor([0, 2, 6], dtype=torch.int32), query)
    return (vt.flash_attention_varlen(query, key, value, starts, starts, 4, 4, causal=True),)


def replicated(x, like):
    from torch.distributed.tensor import DTensor

    mesh = getattr(like, "device_mesh", None)
    return x if mesh is None else DTensor.from_local(x, mesh)


def losses(x, weight, bias):
    labels = replicated(torch.tensor([3, -100, 0, 1]), x)
    return (vt.linear_cross_entropy(x, weight, labels, bias=bias, label_smoothing=0.1, reduction="none"),)


def weighted_losses(x, weight):
    labels, shares = (replicated(t, x) for t in (torch.tensor([3, -100, 0, 1]), torch.linspace(0.5, 2, 10)))
    return (vt.linear_cross_entropy(x, weight, labels, class_weights=shares, reduction="none"),)


def grouped(lhs, rhs):
    return (vt.grouped_gemm(lhs, rhs, replicated(torch.tensor([2, 0, 3]), lhs)),)


def some_groups(lhs, rhs):
    return (vt.grouped_gemm(lhs, rhs, replicated(torch.tensor([1, 2, 0, 2]), lhs), group_offset=1),)


def sparse(dense, values):
    places = replicated(torch.tensor([[0, 1], [1, 0]]), dense)
    return (vt.block_sparse_matmul(dense, values, places, shape=(8, 8)),)


HEADS = (2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)
TOKENS = (6, 4, 8), (6, 2, 8), (6, 2, 8)

# name: (function, shapes of its tensors, how they are split); all of these split without a word between the processes.
SILENT: dict[str, tuple[Any, Any, Any]] = {
    "norm rows": (normed, NORM, (0, 0, R, R)),
    "norm of an uneven axis": (normed, ((4, 5, 16), (4, 5, 16), (16,), (16,)), (1, 1, R, R)),
    # The same shapes and flags, but other arguments: what DTensor remembers of one call must not serve the other.
    "norm with a scale": (lambda x, p: (vt.rms_norm(x, p),), ((4, 16), (16,)), (0, R)),
    "norm with an offset": (lambda x, p: (vt.rms_norm(x, None, p),), ((4, 16), (16,)), (0, R)),
    "gemm rows": (product, ROWS, (0, R, R, 0, R)),
    "gemm columns": (product, ROWS, (R, 1, 0, R, 0)),
    "gemm contraction": (lambda a, b, s: (vt.gemm(a, b, scale_b=s),), ((4, 6), (6, 8), (8,)), (1, 0, R)),
    "gemm contraction of a part": (lambda a, b: (vt.gemm(a, b),), ((4, 6), (6, 8)), (1, R)),
    "gemm batch": (lambda a, b: (vt.gemm(a, b),), ((4, 3, 6), (4, 6, 8)), (0, 0)),
    "gemm shared batch": (lambda a, b: (vt.gemm(a, b, activation="relu"),), ((4, 3, 6), (6, 8)), (0, R)),
    "gemm square": (lambda a, b: (vt.gemm(a, b),), ((8, 8), (8, 8)), (0, R)),
    "gemm square, transposed": (lambda a, b: (vt.gemm(a, b, transpose_a=True),), ((8, 8), (8, 8)), (0, 0)),
    "softmax": (lambda x: (vt.softmax(x, axis=1),), ((4, 6, 8),), (2,)),
    "log softmax": (lambda x: (vt.log_softmax(x),), ((4, 6, 8),), (0,)),
    "rope batch": (turned, ((2, 4, 6, 8), (2, 2, 6, 8)), (0, 0)),
    "rope heads": (turned, ((2, 4, 6, 8), (2, 2, 6, 8)), (1, 1)),
    "rope one kv head": (turned, ((2, 4, 6, 8), (2, 1, 6, 8)), (1, R)),
    "rope positions": (turned, ((2, 4, 6, 8), (2, 2, 6, 8)), (2, 2)),
    "gelu": (lambda x: (vt.fused_gelu_dropout(x, deterministic=True),), ((4, 6),), (1,)),
    "dropout rows": (lambda x: (vt.fused_gelu_dropout(x, 0.5, seed=SEED),), ((4, 6, 8),), (0,)),
    "dropout features": (lambda x: (vt.fused_gelu_dropout(x, 0.5, seed=SEED),), ((4, 6, 8),), (2,)),
    "attention batch": (attended, (*HEADS, (1, 4, 6, 6), (4,)), (0, 0, 0, R, R)),
    "attention heads": (attended, (*HEADS, (1, 4, 6, 6), (4,)), (1, 1, 1, 1, 0)),
    "attention heads, one key head": (
        lambda q, k, v: (vt.flash_attention(q, k, v, layout="bshd"),),
        ((2, 6, 4, 8), (2, 6, 1, 8), (2, 6, 1, 8)),
        (2, R, R),
    ),
    "packed sequences": (packed, TOKENS, (1, 1, 1)),
    "gated rows": (lambda x, g, u: (vt.gated_linear_unit(x, (g, u)),), ((4, 6), (6, 8), (6, 8)), (0, R, R)),
    "gated columns": (lambda x, g, u: (vt.gated_linear_unit(x, (g, u)),), ((4, 6), (6, 8), (6, 8)), (R, 1, 1)),
    "gated in one": (lambda x, w: (vt.gated_linear_unit(x, w),), ((4, 6), (2, 6, 8)), (R, 2)),
    "loss": (losses, ((4, 8), (10, 8), (10,)), (0, R, R)),
    "loss with class weights": (weighted_losses, ((4, 8), (10, 8)), (0, R)),
    "grouped columns": (grouped, ((5, 6), (3, 6, 8)), (R, 2)),
    "grouped contraction": (grouped, ((5, 6), (3, 6, 8)), (1, 1)),
    "grouped columns of some groups": (some_groups, ((5, 6), (3, 6, 8)), (R, 2)),
    "block-sparse rows": (sparse, ((4, 8), (2, 4, 4)), (0, R)),
}
# These cannot be computed by parts: something is gathered (and the values are right).
GATHERED: dict[str, tuple[Any, Any, Any]] = {
    "norm features": (normed, NORM, (2, 2, 0, 0)),
    "gemm contraction with an activation": (lambda a, b: (vt.gemm(a, b, activation="silu"),), ((4, 6), (6, 8)), (1, 0)),
    "softmax along its axis": (lambda x: (vt.softmax(x),), ((4, 6),), (1,)),
}


def evaluate(case, mesh):
    """(largest error relative to the largest value, over outputs and gradients; how many messages; placements of the
    outputs).
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    function, shapes, splits = case
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    wanted = function(*whole)
    weights = [torch.randn(y.shape, generator=generator) for y in wanted]
    gradients = torch.autograd.grad(wanted, whole, weights)
    spread = [
        distribute_tensor(x.detach(), mesh, [Replicate() if d is R else Shard(d)]).requires_grad_()
        for x, d in zip(whole, splits, strict=True)
    ]
    # What the gradient of the results is split like is known from a run beforehand.
    first: Any = function(*spread)
    where = [y.placements for y in first]
    cotangents = [
        distribute_tensor(w, mesh, [Replicate() if isinstance(p, Partial) else p for p in ps])
        for w, ps in zip(weights, where, strict=True)
    ]
    with CommDebugMode() as messages:
        outputs = function(*spread)
        got = torch.autograd.grad(outputs, spread, cotangents)
    errors = [
        float((g.full_tensor() - w).abs().max() / w.abs().max())
        for g, w in zip((*outputs, *got), (*wanted, *gradients), strict=True)
    ]
    return max(errors), messages.get_total_counts(), [str(p) for ps in where for p in ps]


def main(rank: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    vt.register_sharding()
    found = {name: evaluate(case, mesh) for name, case in {**SILENT, **GATHERED}.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of the two processes saw."""
    folder = tmp_path_factory.mktemp("dtensor")
    command = [sys.executable, __file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            env=scripts.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("name", [*SILENT, *GATHERED])
def test_two_processes_compute_what_one_does(seen, name):
    for found in seen:
        error, messages, _ = found[name]
        assert error < 1e-5
        assert (messages == 0) == (name in SILENT), messages


@pytest.mark.long
def test_results_stay_split(seen):
    """Along the axis that the operands are split along; a contraction gives parts of the sum."""
    where = {name: found[2] for name, found in seen[0].items()}
    assert where["norm rows"] == ["S(0)"] * 2 and where["gemm columns"] == ["S(1)"] and where["softmax"] == ["S(2)"]
    assert where["gemm contraction"] == where["gemm square, transposed"] == ["P(sum)"]
    assert where["gemm square"] == ["S(0)"] and where["rope heads"] == ["S(1)"] * 2


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    vt.register_sharding()
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "model"))
    torch.distributed.destroy_process_group()


def spread(mesh, shape, *placements):
    """A DTensor of that global shape of which this process has its own part."""
    from torch.distributed.tensor import distribute_tensor

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()


def test_a_layer_on_two_axes(mesh):
    """Rows over one axis of the mesh, columns and then the contraction over the other: no message till the sum,
    gradients of the weights Partial over rows.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    whole = Replicate()
    x, scale = spread(mesh, (8, 16), Shard(0), whole), spread(mesh, (16,), whole, whole)
    up, down = spread(mesh, (16, 32), whole, Shard(1)), spread(mesh, (32, 16), whole, Shard(0))
    with CommDebugMode() as messages:
        y: Any = vt.gemm(vt.gemm(vt.rms_norm(x, scale), up, activation="silu"), down)
        assert y.placements == (Shard(0), Partial()) and y.to_local().shape == (4, 16)
        gradients = torch.autograd.grad(y, (scale, up, down, x), spread(mesh, (8, 16), Shard(0), whole))
    # Only the gradient of the norm's result is a sum over the columns; DTensor adds and spreads it over more rows in
    # one message.
    assert {str(op): n for op, n in messages.get_comm_counts().items()} == {"c10d_functional.reduce_scatter_tensor": 1}
    assert [g.placements for g in gradients] == [
        (Partial(), Partial()),
        (Partial(), Shard(1)),
        (Partial(), Shard(0)),
        (Shard(0), Shard(0)),
    ]


@pytest.mark.parametrize("heads, kv_heads, silent", [(8, 4, True), (8, 1, True), (12, 6, False)])
def test_heads_stay_with_their_key_head(mesh, heads, kv_heads, silent):
    """Over four devices 6 key heads would not stand beside their query heads: they are gathered; one key head is
    everywhere.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    query: Any = spread(mesh, (2, heads, 6, 8), Shard(0), Shard(1))
    key = spread(mesh, (2, kv_heads, 6, 8), Shard(0), Shard(1) if kv_heads > 1 else Replicate())
    with CommDebugMode() as messages:
        turned, _ = vt.apply_rope((query, key))
    assert (messages.get_total_counts() == 0) == silent
    assert (turned.placements == query.placements) == silent


def test_no_device_is_left_without_a_part(mesh):
    """Five rows over four devices would be 2, 2, 1 and none, of which a kernel could not make an output: they are
    gathered; seven are split.
    """
    from torch.distributed.tensor import Replicate, Shard

    five: Any = vt.rms_norm(spread(mesh, (5, 16), Replicate(), Shard(0)))
    assert five.placements == (Replicate(), Replicate())
    seven: Any = vt.rms_norm(spread(mesh, (7, 16), Replicate(), Shard(0)))
    assert seven.placements == (Replicate(), Shard(0))


def test_what_each_process_would_draw_for_itself_is_declined(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x = spread(mesh, (8, 16), Shard(0), Shard(1))
    with pytest.raises(ShapeError, match="`seed` is None and `x` is a DTensor"):
        vt.fused_gelu_dropout(x, 0.5)
    with pytest.raises(ShapeError, match="`positions` is a DTensor"):
        positions = DTensor.from_local(torch.arange(6), mesh, [Replicate()] * 2)
        vt.apply_rope(spread(mesh, (2, 4, 6, 8), Shard(0), Shard(1)), positions)


def test_every_operator_has_a_rule():
    from vishwamai.torch.sharding import RULES

    operators = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("vishwamai::")
    }
    assert operators - set(RULES) == UNRULED


UNRULED = {"paged_attention", "update_pages", "constants", "rounded"}
"""Operators that DTensor rejects by name: which pages a device would hold is the server's to say. `constants` takes no
tensor, and `rounded` is stochastic: its numbers are a function of the place in the whole array.
"""


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
