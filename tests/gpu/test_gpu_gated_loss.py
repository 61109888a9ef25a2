"""Gated units and the linear cross entropy on GPUs: torch tensors, other tiles than the heuristic's, what the backward
pass holds.

Run as they are, tensors on the CPU are served by what serves JAX there; under TRITON_INTERPRET=1 (`make test-gpu`) by
the Triton kernels, interpreted.
"""

import contextlib
import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from test_gpu_torch import ACTIVATIONS, agree, tensors  # noqa: E402
from triton_kernels import triton_serves  # noqa: E402
from vishwamai.bench import numbers  # noqa: E402
from vishwamai.bench.candidates import theirs  # noqa: E402
from vishwamai.bench.gradient import gradient_case  # noqa: E402
from vishwamai.bench.subject import subject  # noqa: E402
from vishwamai.core import gpu  # noqa: E402
from vishwamai.core.errors import ShapeError, UnsupportedError  # noqa: E402
from vishwamai.core.observe import record_plans  # noqa: E402
from vishwamai.core.target import Target  # noqa: E402
from vishwamai.ops.gated.gpu import GatedGpuConfig  # noqa: E402
from vishwamai.ops.loss.gpu import TRITON, LossGpuConfig  # noqa: E402
from vishwamai.torch import bridge  # noqa: E402

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")]
needs_interpreter = pytest.mark.skipif(not contract.TRITON, reason="needs a process of its own: make test-gpu")
needs_compiler = pytest.mark.skipif(
    contract.TRITON or gpu.why_not() is not None, reason="needs triton, and not its interpreter"
)


@pytest.fixture(autouse=True)
def kernels():
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield


def unit(x, gate, up, activation):
    return (ACTIVATIONS[activation](x @ gate) * (x @ up),)


@pytest.mark.parametrize(
    "activation", ["silu", *(pytest.param(a, marks=pytest.mark.long) for a in ACTIVATIONS if a != "silu")], ids=str
)
def test_gated(activation):
    args = tensors((2, 5, 24), (24, 40), (24, 40))
    agree(
        lambda x, gate, up: (vt.gated_linear_unit(x, (gate, up), activation),),
        lambda x, gate, up: unit(x, gate, up, activation),
        args,
    )


def test_gated_of_one_tensor_and_of_views():
    x, both = tensors((24, 7), (2, 40, 24))
    agree(
        lambda x, both: (vt.gated_linear_unit(x.T, both.mT, "gelu_tanh"),),
        lambda x, both: unit(x.T, both[0].T, both[1].T, "gelu_tanh"),
        (x, both),
    )


@pytest.mark.turns(5)
@pytest.mark.parametrize("joint", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gated_opcheck(joint):
    x, gate, up, both = tensors((3, 8), (8, 16), (8, 16), (2, 8, 16))
    weights = (None, None, both) if joint else (gate, up, None)
    arguments = (x, *weights, None, None, *(("gelu", "default") if joint else (None, "high")), True)
    assert set(torch.library.opcheck(torch.ops.vishwamai.gated_linear_unit.default, arguments).values()) == {"SUCCESS"}


def test_nothing_is_kept_where_no_gradient_is_asked_for():
    x, gate, up = tensors((3, 8), (8, 16), (8, 16))
    with torch.no_grad():
        kept = torch.ops.vishwamai.gated_linear_unit(x, gate, up, None, None, None, "silu", "default", False)[1:]
        assert not vt.gated_linear_unit(x, (gate, up)).requires_grad
    assert [t.numel() for t in kept] == [0, 0]


@pytest.mark.parametrize("format, axis", [("int8", -2), ("fp8", -2), ("int8", None)])
def test_gated_of_quantized_weights(format, axis):
    """What the same numbers give in float32 products, and x's gradient."""
    x, gate, up = tensors((2, 5, 24), (24, 40), (24, 40))
    pair = tuple(vt.quantize(w.detach(), format, axis=axis) for w in (gate, up))
    plain = [w.dequantize() for w in pair]
    agree(
        lambda x: (vt.gated_linear_unit(x, pair, "gelu"),),
        lambda x: unit(x, plain[0], plain[1], "gelu"),
        (x,),
    )
    with torch.no_grad():
        assert vt.gated_linear_unit(x.bfloat16(), pair).dtype == torch.bfloat16


def test_the_benchmark_calls_gated_units_of_torch():
    """Every case but those whose tiles are given, or whose bytes are not the numbers. int8 weights are right, and
    their scales have no gradient.
    """
    about, cases = subject("gated_linear_unit"), {c.name: c for c in contract.OPERATIONS["gated_linear_unit"].cases}
    left_out = {name for name, case in cases.items() if about.in_torch(case) is None}
    assert left_out == {"several tiles", "int8 weights, several tiles", "int4 weights", "fp8 weights"}
    case = cases["int8 weights"]
    peer, gradients = about.in_torch(case), gradient_case(case)
    assert peer is not None and gradients is not None
    for run in (case, gradients):
        arrays, backward = run.make(), run is gradients
        sample = about.gradient_sample(run, arrays) if backward else about.sample(run, arrays)
        call, outputs, _ = theirs(peer, case, backward).build(arrays)
        found = numbers.check(outputs(call()), sample, numbers.truth(sample, backward), 1.0)
        assert found.right, found


def test_gated_errors():
    x = torch.ones(3, 8)
    q = vt.quantize(torch.ones(8, 2), axis=-2)
    for weights, words in (
        ((q, torch.ones(8, 2)), r"not `weights\[1\]`; quantize both"),
        ((q, vt.quantize(torch.ones(8, 2), axis=-1)), r"`weights\[1\]` is .*axis=-2"),
        ((q, vt.quantize(torch.ones(8, 2), "fp8", axis=-2)), "quantize both to one format"),
        ((vt.quantize(torch.ones(4, 2), axis=-2), q), r"gated_linear_unit: `weights\[0\]` has shape \(4, 2\)"),
    ):
        with pytest.raises(ShapeError, match=words):
            vt.gated_linear_unit(x, weights)
    with pytest.raises(ShapeError, match=r"`weights\[0\]` has shape \(4, 2\)"):
        vt.gated_linear_unit(x, (torch.ones(4, 2), torch.ones(8, 2)))
    with pytest.raises(ShapeError, match="a sequence of 3"):
        vt.gated_linear_unit(x, (x, x, x))


LABELS = torch.tensor([3, -100, 0, 49, 7, 7, -100, 20])


def by_torch(x, weight, bias, labels=LABELS, softcap=None, smoothing=0.0, z_loss=0.0, reduction="mean", shares=None):
    """(loss, logsumexp) with all logits; `shares` are the class weights."""
    logits = x @ weight.T + bias
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    lse = logits.logsumexp(-1)
    loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    counted = labels != -100
    loss = loss + z_loss * torch.where(counted, lse, 0.0) ** 2
    shares = counted if shares is None else torch.where(counted, shares[labels.clamp(0)], 0.0)
    loss = shares * loss
    loss = loss if reduction == "none" else loss.sum() / (shares.sum() if reduction == "mean" else 1)
    return loss, lse


@pytest.mark.parametrize(
    "softcap, smoothing, z_loss, reduction", [(None, 0.0, 0.0, "mean"), (2.0, 0.1, 0.01, "none")], ids=str
)
def test_loss(softcap, smoothing, z_loss, reduction):
    x, weight, bias = tensors((8, 24), (50, 24), (50,))

    def ours(x, weight, bias):
        return vt.linear_cross_entropy(
            x,
            weight,
            LABELS,
            bias=bias,
            softcap=softcap,
            label_smoothing=smoothing,
            z_loss=z_loss,
            reduction=reduction,
            return_logsumexp=True,
        )

    agree(
        ours,
        lambda *args: by_torch(*args, softcap=softcap, smoothing=smoothing, z_loss=z_loss, reduction=reduction),
        (x, weight, bias),
    )


@pytest.mark.turns(4)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_class_weights(reduction, dynamic):
    """Of eager calls (None) and of one graph; the gradient reaches the weights too."""
    args = tensors((8, 24), (50, 24), (50,), (50,))

    def ours(x, weight, bias, shares):
        options = {"class_weights": shares, "softcap": 3.0, "z_loss": 0.01, "return_logsumexp": True}
        return vt.linear_cross_entropy(x, weight, LABELS, bias=bias, reduction=reduction, **options)

    def theirs(*args):
        return by_torch(*args[:3], softcap=3.0, z_loss=0.01, reduction=reduction, shares=args[3])

    if dynamic is not None:
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    agree(ours, theirs, args)


def test_class_weights_of_nothing_of_float64_and_mapped():
    x, weight, shares = (t.detach() for t in tensors((3, 8, 24), (50, 24), (50,)))
    loss = functools.partial(vt.linear_cross_entropy, labels=LABELS)
    assert loss(x[0], weight, class_weights=torch.zeros(50)) == 0
    if not contract.TRITON:
        leaves = [t.double().requires_grad_() for t in (x[0], weight, shares)]
        assert torch.autograd.gradcheck(lambda x, w, s: loss(x, w, class_weights=s), leaves, fast_mode=True)
    mapped = torch.vmap(lambda x: loss(x, weight, class_weights=shares))(x)
    torch.testing.assert_close(mapped, torch.stack([loss(each, weight, class_weights=shares) for each in x]))


def test_loss_of_16_bits_beside_float32_and_of_two_axes():
    x, weight = tensors((2, 4, 24), (50, 24), dtype=torch.bfloat16)
    loss = vt.linear_cross_entropy(x, weight.float(), LABELS.reshape(2, 4), reduction="sum")
    want, _ = by_torch(x.float().reshape(8, 24), weight.float(), 0.0, reduction="sum")
    assert loss.dtype == torch.float32 and abs(loss - want) < 1e-5 * want
    (dx,) = torch.autograd.grad(loss, x)
    (wanted,) = torch.autograd.grad(want, x)
    assert dx.dtype == torch.bfloat16 and (dx - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_labels_that_nobody_knows():
    """Ignored alone: a loss of 0 and gradients of 0. Outside the vocabulary: NaN, and an error where it is known."""
    x, weight = tensors((2, 16), (10, 16))
    loss = vt.linear_cross_entropy(x, weight, torch.tensor([-100, -100]))
    assert loss == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, (x, weight)))
    outside = functools.partial(vt.linear_cross_entropy, x, weight, torch.tensor([10, -1]), ignore_index=-1)
    if bridge.platform_of(x) == "cpu":
        with pytest.raises(ShapeError, match=r"`labels` holds 10 at \[0\]"):
            outside(reduction="none")
    else:
        each = outside(reduction="none")
        assert each[0].isnan() and each[1] == 0


@pytest.mark.parametrize("everything", [pytest.param(False, marks=pytest.mark.long), True])
def test_loss_opcheck(everything):
    x, weight, bias, targets = tensors((2, 4, 8), (20, 8), (20,), (2, 4, 20))
    labels = LABELS.reshape(2, 4) % 20
    arguments = (x, weight, None, labels, None, None, "default", False)
    if everything:
        arguments = (x, weight, bias, labels, None, 3.0, "high", True)
        if not contract.TRITON:  # the kernel has no targets
            arguments = (x, weight, bias, labels, targets, 3.0, "high", True)
    assert set(torch.library.opcheck(torch.ops.vishwamai.linear_cross_entropy.default, arguments).values()) == {
        "SUCCESS"
    }


@pytest.mark.turns(5)
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_language_model_compiles_in_one_graph(dynamic):
    def model(x, gate, up, down, words):
        x = vt.gemm(vt.gated_linear_unit(x, (gate, up)), down)
        return (vt.linear_cross_entropy(x, words, LABELS, softcap=5.0, label_smoothing=0.1),)

    args = tensors((8, 16), (16, 24), (16, 24), (24, 16), (50, 16))
    fast = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    agree(fast, model, args)


def test_loss_errors():
    x, weight = torch.ones(3, 8), torch.ones(20, 8)
    with pytest.raises(ShapeError, match="`labels` has shape"):
        vt.linear_cross_entropy(x, weight, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ShapeError, match="`reduction` is 'total'"):
        vt.linear_cross_entropy(x, weight, torch.zeros(3, dtype=torch.int64), reduction="total")
    weighted = functools.partial(vt.linear_cross_entropy, x, weight, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"`class_weights` is float32\[9\], but the vocab is 20"):
        weighted(class_weights=torch.ones(9))
    with pytest.raises(ShapeError, match=r"`class_weights` is int64\[20\].*floating-point"):
        weighted(class_weights=torch.ones(20, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="`class_weights` with label_smoothing = 0.1"):
        weighted(class_weights=torch.ones(20), label_smoothing=0.1)
    with pytest.raises(UnsupportedError, match="pass `labels . class_weights`"):
        vt.linear_cross_entropy(x, weight, torch.ones(3, 20), class_weights=torch.ones(20))
    compiled = torch.compile(vt.linear_cross_entropy, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="`reduction` is 'total'"):
        compiled(x, weight, torch.zeros(3, dtype=torch.int64), reduction="total")


@pytest.mark.skipif(contract.TRITON, reason="the rules are the same")
def test_mapped_operators_are_one_call():
    """torch.vmap over rows folds into the rows; over a weight, the elements are computed one after the other."""
    x, gate, up = (t.detach() for t in tensors((3, 4, 8), (8, 16), (8, 16)))
    mapped = torch.vmap(lambda x: vt.gated_linear_unit(x, (gate, up)))(x)
    torch.testing.assert_close(mapped, vt.gated_linear_unit(x, (gate, up)))
    labels = torch.arange(12).reshape(3, 4)
    weights = torch.stack([gate.T, up.T])
    losses = torch.vmap(lambda w: vt.linear_cross_entropy(x, w, labels))(weights)
    torch.testing.assert_close(losses, torch.stack([vt.linear_cross_entropy(x, w, labels) for w in weights]))
    each = torch.vmap(functools.partial(vt.linear_cross_entropy, reduction="sum"), (0, None, 0))(x, gate.T, labels)
    torch.testing.assert_close(
        each, torch.stack([vt.linear_cross_entropy(a, gate.T, b, reduction="sum") for a, b in zip(x, labels)])
    )


def found(op, name):
    operation = contract.OPERATIONS[op]
    (case,) = (case for case in operation.cases if case.name == name)
    (triton,) = (impl for impl in operation.op.implementations if impl.platform == "cuda")
    return case, triton


def right(op, name, config):
    case, triton = found(op, name)
    contract.check_all(
        contract.evaluate(case, triton, config=config), contract.truth(case), contract.by_reference(case)
    )


@needs_interpreter
def test_gated_tiles_that_few_programs_share():
    right("gated_linear_unit", "one array bfloat16", GatedGpuConfig(16, 32, 32, 4, 3, group_m=2, num_programs=3))


def loss_tiles(name, *config, marks=()):
    return pytest.param(name, LossGpuConfig(*config, warps=4, group_m=2), id=f"{name} {config}", marks=marks)


@needs_interpreter
@pytest.mark.parametrize(
    "name, config",
    [
        # Uneven splits forward; backward a first part, whole parts and a last one that ends early, each of them added
        # to what is there.
        loss_tiles("everything bfloat16", 64, 64, 32, 4, 128),
        loss_tiles("everything float32", 64, 64, 32, 4, 128, marks=pytest.mark.long),
        # Tiles that are taken apart before their slope: into halves, and with a cap into quarters.
        loss_tiles("float16", 16, 256, 32, 1, 256),
        loss_tiles("everything bfloat16", 64, 256, 16, 2, 256, marks=pytest.mark.long),
        loss_tiles("700 words bfloat16", 64, 256, 64, 1, 512, marks=pytest.mark.long),
    ],
)
def test_loss_tiles(name, config):
    right("linear_cross_entropy", name, config)


@needs_interpreter
@pytest.mark.parametrize("shared", ["x", pytest.param("weights", marks=pytest.mark.long)])
def test_groups_that_share_an_operand(shared):
    """Under vmap the gradient of what the groups share is a sum over them, in the kernel: the same as one after the
    other.
    """
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((1, 5, 16)).astype(np.float32), rng.standard_normal((1, 16, 8)).astype(np.float32)
    x, gate = (np.repeat(a, 1 if name == shared else 2, 0) for name, a in (("x", x), ("weights", gate)))
    from vishwamai.core.spec import array_spec
    from vishwamai.ops.gated import gpu as implementation
    from vishwamai.ops.gated import reference
    from vishwamai.ops.gated.spec import GatedSpec, Operands, Outputs

    operands = Operands(jnp.asarray(x), jnp.asarray(gate), jnp.asarray(gate[..., ::-1]), None)
    spec = GatedSpec(Operands(*(None if a is None else array_spec(a) for a in operands)), "silu", "highest")
    config = implementation.heuristic(spec, Target("cuda"))
    outputs, kept = implementation.forward(spec, config, operands, True)
    assert kept is not None
    want, kept_there = reference.forward(spec, operands, True)
    assert kept_there is not None
    np.testing.assert_allclose(outputs.h, want.h, atol=1e-4)
    dh = Outputs(jnp.asarray(rng.standard_normal(want.h.shape), jnp.float32))
    ours = implementation.backward(spec, operands, kept, dh)
    theirs = reference.backward(spec, operands, kept_there, dh)
    for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, atol=2e-4)


@needs_interpreter
@pytest.mark.long
def test_loss_of_groups_with_a_weight_or_a_bias_of_their_own():
    from vishwamai.core.spec import array_spec
    from vishwamai.ops.loss import chunked
    from vishwamai.ops.loss import gpu as implementation
    from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs

    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    labels = jnp.asarray(rng.integers(0, 40, (2, 6)), jnp.int32)
    for groups_w, groups_b in ((1, 2), (2, 1)):
        operands = Operands(normal(2, 6, 16), normal(groups_w, 40, 16), normal(groups_b, 40), labels, None)
        specs = Operands(*(None if x is None else array_spec(x) for x in operands))
        spec = LossSpec(specs, 3.0, "highest", True)
        assert not spec.shared
        config = dataclasses.replace(
            implementation.heuristic(spec, Target("cuda")), tile_vocab=16, block_vocab=32, splits=2
        )
        outputs, _ = implementation.forward(spec, config, operands)
        plain = chunked.heuristic(spec, Target("cpu"))
        want, _ = chunked.forward(spec, plain, operands)
        cotangents = Outputs(*(normal(2, 6) for _ in range(3)))
        ours = implementation.backward(spec, config, operands, outputs, cotangents)
        theirs = chunked.backward(spec, plain, operands, want, cotangents)
        for got, wanted in zip(jax.tree.leaves((outputs, ours)), jax.tree.leaves((want, theirs)), strict=True):
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, atol=1e-4)


def arrays_of(jaxpr):
    """Every array that a program makes, those of its inner programs too."""
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars if hasattr(v.aval, "shape"))
        for inner in jaxprs_in_params(equation.params):
            yield from arrays_of(inner)


@pytest.mark.skipif(contract.TRITON, reason="the program is the same")
def test_no_array_has_all_logits():
    """Beside the results: one part's gradient, and x's in float32, as `explain` says; a twentieth of the logits and
    their gradient in float32.
    """
    tokens, words, features = 4096, 128256, 512
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, features), (words, features))]
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def run(x, weight, labels):
        return vishwamai.linear_cross_entropy(x, weight, labels, label_smoothing=0.1, implementation="triton")

    program = jax.make_jaxpr(jax.value_and_grad(run, (0, 1)))(*shapes, labels)
    sizes = {(a.shape, a.size * a.dtype.itemsize) for a in arrays_of(program.jaxpr)}
    rows = [size for shape, size in sizes if tokens in shape]
    part = max(rows)
    assert part >= tokens * features * 4  # it is seen
    assert part <= 2 * tokens * words * 4 / 20
    assert max(size for shape, size in sizes if tokens not in shape) == words * features * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (plan,) = record_plans(run, *shapes, labels)
    (note,) = TRITON.notes(plan.spec, Target("cuda"))
    said = int(re.search(r"([\d,]+) bytes", note)[1].replace(",", ""))
    assert said == part + tokens * features * 4


@needs_compiler
@pytest.mark.long
def test_the_sums_grow_in_place():
    """In a program for CUDA the parts of the vocabulary are a loop, whose products write onto what they are given."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 64), (4096, 64))]
    labels = jax.ShapeDtypeStruct((256,), jnp.int32)
    gradient = jax.grad(lambda x, w, y: vishwamai.linear_cross_entropy(x, w, y, config=128), (0, 1))
    text = jax.jit(gradient).trace(*shapes, labels).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.while") == 1
    aliased = [line for line in text.splitlines() if "operand_index = 3" in line or "operand_index = 2" in line]
    assert {name for name in ("gradient_of_x", "gradient_of_weight") for line in aliased if name in line} == {
        "gradient_of_x",
        "gradient_of_weight",
    }
