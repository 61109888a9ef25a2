"""linear_cross_entropy: its memory, its errors, ignored and illegal labels, split vocabularies, tiles; see
test_contract.py for every case.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import contract
from vishwamai import ShapeError, UnsupportedError, aot, explain, kernel_config, linear_cross_entropy
from vishwamai.core import observe
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.target import Target
from vishwamai.ops.loss import gathered
from vishwamai.ops.loss.chunked import ChunkedLossConfig
from vishwamai.ops.loss.cpu import NATIVE
from vishwamai.ops.loss.tpu import LossConfig, heuristic, why_not


def inputs(tokens, words, features, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((tokens, features)), dtype)
    weight = jnp.asarray(2 * features**-0.5 * rng.standard_normal((words, features)), dtype)
    return x, weight, jnp.asarray(rng.integers(0, words, tokens), jnp.int32)


def plain(x, weight, labels):
    """The loss as it is usually written."""
    logits = jnp.einsum("td,vd->tv", x, weight, preferred_element_type=jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0])


def gradients(loss):
    return jax.jit(jax.value_and_grad(lambda x, weight, labels: loss(x, weight, labels), (0, 1)))


def temporaries(function, *structs):
    return jax.jit(function).lower(*structs).compile().memory_analysis().temp_size_in_bytes


def structs(tokens, words, features, dtype):
    shapes = ((tokens, features), dtype), ((words, features), dtype), ((tokens,), jnp.int32)
    return [jax.ShapeDtypeStruct(*s) for s in shapes]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_twentieth_of_the_memory(dtype):
    """Loss and gradients on the CPU; beside the arguments and results the plain form takes all logits and their
    gradient.
    """
    shapes = structs(2048, 65536, 256, dtype)
    logits = 4 * 2048 * 65536
    theirs, ours = (temporaries(gradients(f), *shapes) for f in (plain, linear_cross_entropy))
    assert theirs >= logits
    # XLA has no bfloat16 arithmetic on the CPU, and keeps one array of weight's size in float32: that has nothing to do
    # with the logits.
    widened = 4 * 65536 * 256 if dtype == jnp.bfloat16 else 0
    assert ours - widened <= theirs / 20


@pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
@pytest.mark.long
@pytest.mark.parametrize("target", ["v5e", "v5p"])
def test_a_twentieth_of_the_memory_on_tpu(target):
    """The last layer of Llama 3 8B over 4096 tokens, in bfloat16."""
    shapes = structs(4096, 128256, 4096, jnp.bfloat16)
    theirs, ours = (
        aot.compile_for(gradients(f), *shapes, target=target).memory.temporaries for f in (plain, linear_cross_entropy)
    )
    assert theirs >= 4 * 4096 * 128256
    assert ours <= theirs / 20


@pytest.mark.turns(3)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_values_and_gradients_are_those_of_torch(reduction):
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    x, weight, labels = inputs(40, 90, 16)
    labels = labels.at[::5].set(-100)
    tx, tw = (torch.tensor(np.asarray(a), requires_grad=True) for a in (x, weight))
    want = torch.nn.functional.cross_entropy(
        tx @ tw.T, torch.tensor(np.asarray(labels)).long(), reduction=reduction, label_smoothing=0.1
    )
    cotangent = np.cos(np.arange(want.numel(), dtype=np.float32)).reshape(want.shape)
    want.backward(torch.tensor(cotangent))
    got, pull = jax.vjp(
        lambda x, w: linear_cross_entropy(x, w, labels, reduction=reduction, label_smoothing=0.1), x, weight
    )
    np.testing.assert_allclose(got, want.detach(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(pull(jnp.asarray(cotangent)), (tx.grad, tw.grad), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "xla_chunked"])
def test_ignored_tokens_have_no_part_in_it(implementation):
    x, weight, labels = inputs(20, 30, 8)
    labels = labels.at[10:].set(7)
    loss = functools.partial(linear_cross_entropy, ignore_index=7, implementation=implementation)
    keep = np.asarray(labels) != 7
    value, (dx, dw) = gradients(loss)(x, weight, labels)
    want, (wx, ww) = gradients(loss)(x[keep], weight, labels[keep])
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(dw, ww, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dx[keep], wx, rtol=1e-4, atol=1e-6)
    assert (dx[~keep] == 0).all()
    value, (dx, dw) = gradients(loss)(x, weight, jnp.full_like(labels, 7))  # nothing is left
    assert value == 0 and (dx == 0).all() and (dw == 0).all()


@pytest.mark.parametrize("implementation", ["xla", "xla_chunked", "native_cpu", "pallas_tpu"])
def test_a_label_outside_the_vocab_makes_loss_and_gradients_nan(implementation):
    """Traced labels: its own loss and row of dx, and the whole of dweight. An ignored label does not."""
    every = contract.OPERATIONS["linear_cross_entropy"].op.implementations
    (impl,) = (impl for impl in every if impl.name == implementation)
    contract.skip_unless_built(impl)
    x, weight, _ = inputs(4, 30, 8)

    @jax.jit
    def run(x, weight, labels):
        def total(x, weight):
            losses = linear_cross_entropy(x, weight, labels, reduction="none", implementation=implementation)
            return jnp.sum(losses), losses

        return jax.grad(total, (0, 1), has_aux=True)(x, weight)

    with contract.running(impl):
        (dx, dw), losses = jax.tree.map(np.asarray, run(x, weight, jnp.array([29, 30, -1, -100])))
        (_, clean), _ = jax.tree.map(np.asarray, run(x, weight, jnp.array([29, 0, 1, -100])))
    assert np.isnan(losses).tolist() == [False, True, True, False]
    assert np.isnan(dx).all(axis=1).tolist() == [False, True, True, False]
    assert (dx[3] == 0).all() and np.isfinite(dx[0]).all()
    assert np.isnan(dw).all() and np.isfinite(clean).all()


def test_a_label_outside_the_vocab_is_an_error_where_it_is_known():
    x, weight, _ = inputs(3, 30, 8)
    for labels, named in (([29, 30, 1], r"30 at \[1\]"), ([-1, 0, 29], r"-1 at \[0\]")):
        with pytest.raises(ShapeError, match=rf"`labels` holds {named} .* vocab is 30; pass labels from 0 to 29"):
            linear_cross_entropy(x, weight, jnp.array(labels))
    with jax.enable_x64(True):  # no 64-bit label is taken for another one
        run = jax.jit(linear_cross_entropy)
        assert np.isnan(run(x, weight, jnp.array([2**32 + 3, 0, 0], jnp.int64)))
    with kernel_config(checks=True):
        run = jax.jit(linear_cross_entropy)
        with pytest.raises(Exception, match=r"`labels` holds 30 at \[1\]"):
            jax.block_until_ready(run(x, weight, jnp.array([29, 30, 1])))
        assert np.isfinite(run(x, weight, jnp.array([29, 3, 1])))  # else the failure is printed at the end


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (1, 1)])
@pytest.mark.parametrize("tokens", [P("t"), P(), P(("t", "v"))])
def test_the_gradient_where_a_mesh_axis_has_size_1(shape, tokens):
    x, weight, labels = inputs(8, 16, 4)
    mesh = jax.make_mesh(
        shape, ("t", "v"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[: np.prod(shape)]
    )
    specs = (tokens, P("v"), tokens)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, weight, labels), specs, strict=True)]
    with jax.set_mesh(mesh):
        got = gradients(linear_cross_entropy)(*placed)
    contract.close(got, gradients(linear_cross_entropy)(x, weight, labels), 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "xla_chunked"])
def test_forbidden_words(implementation):
    """A bias of -inf takes a word out: its probability and the gradient of its weight are 0."""
    x, weight, labels = inputs(12, 40, 8)
    bias = jnp.where(jnp.arange(40) < 25, 0.0, -jnp.inf)
    labels = labels % 25
    loss = functools.partial(linear_cross_entropy, implementation=implementation)
    value, (dx, dw) = gradients(functools.partial(loss, bias=bias))(x, weight, labels)
    want, (wx, ww) = gradients(loss)(x, weight[:25], labels)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(dx, wx, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dw, np.concatenate([ww, np.zeros((15, 8))]), rtol=1e-4, atol=1e-6)


def test_mixed_dtypes_promote():
    x, weight, labels = inputs(6, 20, 8, jnp.bfloat16)
    value, (dx, dw) = gradients(linear_cross_entropy)(x, weight.astype(jnp.float32), labels)
    assert (value.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)


def test_second_order():
    """The gradient of the gradient's norm, of the chunked form as of the plain one."""
    x, weight, labels = inputs(9, 700, 8)

    def norm(implementation):
        loss = functools.partial(linear_cross_entropy, implementation=implementation)
        return jax.jit(jax.grad(lambda w: jnp.sum(jnp.square(jax.grad(loss)(x, w, labels)))))(weight)

    np.testing.assert_allclose(norm("xla_chunked"), norm("xla"), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("block", [1, 64, 100, 300, 1000])
def test_any_number_of_words_at_a_time(block):
    x, weight, labels = inputs(10, 300, 8)
    how = {"implementation": "xla_chunked", "config": ChunkedLossConfig(block)}
    got = gradients(functools.partial(linear_cross_entropy, **how))(x, weight, labels)
    contract.close(got, gradients(plain)(x, weight, labels), 1e-5)


X, W, Y = jnp.zeros((2, 3, 4)), jnp.zeros((9, 4)), jnp.zeros((2, 3), jnp.int32)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda f: f(X.astype(int), W, Y), ["`x`", "int32", "float32"]),
        (lambda f: f(X, W.T, Y), ["`weight`", "(4, 9)", "4 features", "`weight.T`"]),
        (lambda f: f(X, W[:0], Y), ["`weight`", "(0, 4)"]),
        (lambda f: f(X, W, Y[0]), ["`labels`", "(3,)", "of shape (2, 3)"]),
        (lambda f: f(X, W, Y.astype(float)), ["`labels`", "float32", "integers"]),
        (lambda f: f(X, W, Y, bias=jnp.zeros(4)), ["`bias`", "(4,)", "`weight`", "vocab = 9", "(9,)"]),
        (lambda f: f(X, W, Y, softcap=0.0), ["`softcap`", "0.0", "positive"]),
        (lambda f: f(X, W, Y, label_smoothing=1.5), ["`label_smoothing`", "1.5", "from 0 to 1"]),
        (lambda f: f(X, W, Y, z_loss=-1.0), ["`z_loss`", "-1.0"]),
        (lambda f: f(X, W, Y, ignore_index=0.5), ["`ignore_index`", "0.5", "integer"]),
        (lambda f: f(X, W, Y, reduction="average"), ["`reduction`", "'average'", "'mean'"]),
    ],
)
def test_errors_name_the_argument_the_values_and_the_fix(call, words):
    with pytest.raises(ShapeError) as caught:
        call(linear_cross_entropy)
    for word in ("linear_cross_entropy", "pass", *words):
        assert word in str(caught.value)


OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "return_logsumexp": True}


def scored(loss):
    """A scalar of the loss and the logsumexp, with its gradients."""

    def total(x, weight, bias, labels):
        value, logsumexp = loss(x, weight, bias, labels)
        return value + jnp.sum(jnp.cos(logsumexp))

    return jax.jit(jax.value_and_grad(total, (0, 1, 2)))


def whole(x, weight, bias, labels):
    return linear_cross_entropy(x, weight, labels, bias=bias, **OPTIONS)


def over_devices(shape, weight_spec, check_vma, **axes):
    """`whole` inside a shard_map: tokens over "t", of which 11 count, and entries over "v"."""
    mesh = jax.make_mesh(shape, ("t", "v"), axis_types=(AxisType.Auto,) * 2)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("t"), weight_spec, P("v"), P("t")),
        out_specs=(P("t"), P("t")),
        check_vma=check_vma,
    )
    def parts(x, weight, bias, labels):
        return linear_cross_entropy(x, weight, labels, bias=bias, reduction="none", **axes, **OPTIONS)

    def split(x, weight, bias, labels):
        losses, logsumexp = parts(x, weight, bias, labels)
        return jnp.sum(losses) / 11, logsumexp

    return split


@pytest.mark.parametrize("check_vma", [True, False])
def test_vocabulary_over_a_mesh_axis(check_vma):
    """Inside a shard_map: four parts of the vocabulary, two of the tokens."""
    x, weight, labels = inputs(12, 40, 8)
    labels = labels.at[3].set(-100)
    bias = jnp.cos(jnp.arange(40.0))
    split = over_devices((2, 4), P("v"), check_vma, vocab_axis="v")
    contract.close(jax.jit(scored(split))(x, weight, bias, labels), scored(whole)(x, weight, bias, labels), 1e-5)


@pytest.mark.turns(4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("pieces", [1, 5])
def test_features_of_the_weight_are_gathered_in_pieces(check_vma, pieces, monkeypatch):
    """Over an axis that splits tokens and features, and one that splits entries; no device has the whole weight."""
    monkeypatch.setattr(gathered, "PIECE_BYTES", 4 * 32 * 40 // pieces)
    x, weight, labels = inputs(12, 80, 32)
    labels = labels.at[3].set(-100)
    bias = jnp.cos(jnp.arange(80.0))
    split = over_devices((4, 2), P("v", "t"), check_vma, vocab_axis="v", gather_axis="t")
    compiled = jax.jit(scored(split)).lower(x, weight, bias, labels).compile()
    contract.close(compiled(x, weight, bias, labels), scored(whole)(x, weight, bias, labels), 1e-5)
    assert "f32[80,32]" not in (compiled.as_text() or "").partition("ENTRY")[0]
    assert re.search(rf"f32\[(1,)?{40 // pieces},32\]\S* all-gather", compiled.as_text() or "")


@pytest.mark.turns(3)
def test_the_second_order_of_gathered_pieces(monkeypatch):
    monkeypatch.setattr(gathered, "PIECE_BYTES", 4 * 8 * 7)
    x, weight, labels = inputs(8, 28, 8)
    mesh = jax.make_mesh((4,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("t"), P(None, "t"), P("t")), out_specs=P())
    def split(x, weight, labels):
        return jax.lax.psum(linear_cross_entropy(x, weight, labels, reduction="sum", gather_axis="t"), "t")

    def norm(loss):
        return jax.jit(jax.grad(lambda w: jnp.sum(jnp.square(jax.grad(loss, 1)(x, w, labels)))))(weight)

    want = norm(lambda x, w, labels: linear_cross_entropy(x, w, labels, reduction="sum"))
    np.testing.assert_allclose(norm(split), want, rtol=1e-3, atol=1e-5)


@pytest.mark.turns(3)
def test_a_wrong_gather_axis_is_named():
    x, weight, labels = inputs(8, 28, 8)
    with pytest.raises(ShapeError, match="`gather_axis` is .*which this call is not mapped over"):
        linear_cross_entropy(x, weight[:, :2], labels, gather_axis="t")
    mesh = jax.make_mesh((4,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def split(x, weight, labels):
        return linear_cross_entropy(x, weight, labels, reduction="none", gather_axis="t")

    def run(*arrays):
        specs = (P("t"), P(None, "t"), P("t"))
        return jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=P("t"))(*arrays)

    with pytest.raises(ShapeError, match=r"`weight`.*\(28, 12\)"):
        run(x, weight[:, :4].repeat(3, axis=1), labels)
    with pytest.raises(UnsupportedError, match="`gather_axis` with labels that are probabilities"):
        run(x, weight, jnp.full((8, 28), 1 / 28))


@pytest.mark.parametrize(
    "specs, gathers",
    [
        ((P(), P("v"), P("v"), P()), False),
        ((P("t"), P("v"), P("v"), P("t")), False),
        ((P("t"), P("t"), P("t"), P("t")), True),  # an axis splits the tokens or the words, and the tokens come first
    ],
)
def test_vocabulary_on_explicit_axes(specs, gathers):
    """The weight stays where it is: no device sees all words, unless the axis is needed for the tokens."""
    arrays = (*inputs(8, 640, 16), jnp.cos(jnp.arange(640.0)))
    x, weight, labels, bias = arrays
    mesh = jax.make_mesh((2, 4), ("t", "v"), axis_types=(AxisType.Explicit,) * 2)
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, weight, bias, labels), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(scored(whole)).lower(*placed).compile()
        got = compiled(*placed)
    contract.close(got, scored(whole)(x, weight, bias, labels), 1e-5)
    assert ("f32[640,16]" in (compiled.as_text() or "")) == gathers


@pytest.mark.parametrize("chip", TPUS.values(), ids=TPUS)
@pytest.mark.parametrize("shape", [(4096, 128256, 4096), (8192, 32000, 2048), (100, 50257, 768), (4096, 256000, 3584)])
def test_tiles_fit_the_chip(shape, chip):
    with kernel_config(target=chip.name):
        tokens, words, features = shape
        (plan,) = record_plans(linear_cross_entropy, *structs(tokens, words, features, jnp.bfloat16))
    assert why_not(plan.spec, Target("tpu", chip)) is None
    config = heuristic(plan.spec, Target("tpu", chip))
    assert config.block_tokens % 128 == config.sub_vocab % 128 == config.tile_vocab % (2 * config.sub_vocab) == 0
    assert config.block_vocab % config.tile_vocab == 0
    assert config.vmem_bytes <= chip.vmem_bytes * 3 // 4


def test_features_too_many_for_vmem_are_declined_in_words():
    shapes = structs(64, 1000, 1 << 15, jnp.bfloat16)
    with kernel_config(target="v4"), pytest.raises(UnsupportedError, match="32768 features take .* bytes of VMEM"):
        jax.eval_shape(functools.partial(linear_cross_entropy, implementation="pallas_tpu"), *shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert explain(linear_cross_entropy, *shapes, target="v4").calls[0].runs == "xla_chunked"
    assert explain(linear_cross_entropy, *shapes, target="v6e").calls[0].runs == "pallas_tpu"


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "words, tokens",
    [(1300, 150), pytest.param(512, 256, marks=pytest.mark.long), pytest.param(600, 5, marks=pytest.mark.long)],
)
def test_several_panels_tiles_and_parts(words, tokens):
    """Two tiles of logits take turns across steps; parts of the vocabulary in the backward pass, the last one
    ragged.
    """
    x, weight, labels = inputs(tokens, words, 24)
    bias = jnp.cos(jnp.arange(float(words)))
    config = LossConfig(128, 256, 128, 512)

    def run(**how):
        def loss(x, w, b, y):
            return linear_cross_entropy(x, w, y, bias=b, **OPTIONS, **how)

        return jax.jit(scored(loss))(x, weight, bias, labels)

    with contract.simulated_tpu():
        got = jax.block_until_ready(run(implementation="pallas_tpu", config=config))
    contract.close(got, run(implementation="xla"), 1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_class_weights_are_those_of_torch(reduction):
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    x, weight, labels = inputs(40, 90, 16)
    labels = labels.at[::5].set(-100)
    shares = np.linspace(0, 2, 90, dtype=np.float32)
    want = torch.nn.functional.cross_entropy(
        torch.tensor(np.asarray(x @ weight.T)),
        torch.tensor(np.asarray(labels)).long(),
        torch.tensor(shares),
        reduction=reduction,
    )
    got = linear_cross_entropy(x, weight, labels, class_weights=jnp.asarray(shares), reduction=reduction)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    nothing = linear_cross_entropy(x, weight, labels, class_weights=jnp.zeros(90))
    assert nothing == 0


def test_class_weights_on_a_mesh_and_their_errors():
    x, weight, labels = inputs(8, 16, 4)
    shares = jnp.linspace(0.5, 2, 16)
    mesh = jax.make_mesh((2, 4), ("t", "v"), axis_types=(AxisType.Explicit,) * 2)
    arrays, specs = (x, weight, labels, shares), (P("t"), P("v"), P("t"), P("v"))
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]

    def loss(x, weight, labels, shares):
        return linear_cross_entropy(x, weight, labels, class_weights=shares)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 3)))
    with jax.set_mesh(mesh):
        got = run(*placed)
    contract.close(got, run(*arrays), 1e-5)
    with pytest.raises(ShapeError, match=r"`class_weights` is float32\[9\], but the vocab is 16"):
        loss(x, weight, labels, shares[:9])
    with pytest.raises(UnsupportedError, match="`class_weights` with label_smoothing = 0.1"):
        linear_cross_entropy(x, weight, labels, class_weights=shares, label_smoothing=0.1)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_probabilities_are_those_of_torch(smoothing):
    """Also those whose sum is not 1, and where the vocab is split over the devices of a shard_map or of an explicit
    mesh.
    """
    torch = pytest.importorskip("torch")
    x, weight, _ = inputs(8, 40, 16)
    q = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(40), 8) * np.linspace(0.5, 1, 8)[:, None], jnp.float32)
    there = [torch.tensor(np.asarray(a), requires_grad=True) for a in (x, weight, q)]
    wanted = torch.nn.functional.cross_entropy(there[0] @ there[1].T, there[2], label_smoothing=smoothing)
    wanted.backward()

    def check(function, placed):
        value, gradients = jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*placed)
        np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
        for ours, theirs in zip(gradients, there, strict=True):
            np.testing.assert_allclose(ours, theirs.grad, atol=1e-5)

    import vishwamai.torch as vt

    ours = [torch.tensor(np.asarray(a), requires_grad=True) for a in (x, weight, q)]
    value = vt.linear_cross_entropy(*ours, label_smoothing=smoothing)
    value.backward()
    np.testing.assert_allclose(value.item(), wanted.item(), rtol=1e-5)
    for a, b in zip(ours, there, strict=True):
        np.testing.assert_allclose(a.grad, b.grad, atol=1e-5)

    loss = functools.partial(linear_cross_entropy, label_smoothing=smoothing)
    check(loss, (x, weight, q))
    explicit = jax.make_mesh((2, 4), ("t", "v"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        specs = (P("t"), P("v"), P("t", "v"))
        check(loss, [jax.device_put(a, NamedSharding(explicit, s)) for a, s in zip((x, weight, q), specs, strict=True)])
    auto = jax.make_mesh((4,), ("v",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def part(x, weight, q):
        return loss(x, weight, q, vocab_axis="v")

    split = {"mesh": auto, "in_specs": (P(), P("v"), P(None, "v")), "out_specs": P()}
    check(jax.shard_map(part, **split), (x, weight, q))


def test_probabilities_hold_no_logits_and_say_what_they_demand():
    """The gradient of the probabilities, which has the size of the logits, costs nothing where it is not asked for."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 32), (16000, 32), (512, 16000))]
    program = jax.jit(jax.grad(linear_cross_entropy, (0, 1))).lower(*shapes).compile()
    assert program.memory_analysis().temp_size_in_bytes < 512 * 16000 * 4 / 5
    x, weight, _ = inputs(6, 20, 8)
    q = jnp.full((6, 20), 0.05)
    with pytest.raises(
        ShapeError, match=r"pass integers, one for each token, or probabilities of shape \[..., vocab\]"
    ):
        linear_cross_entropy(x, weight, q[:, 0])
    with pytest.raises(ShapeError, match=r"pass `labels` of shape \(6, 20\)"):
        linear_cross_entropy(x, weight, q[:, :10])
    with pytest.raises(UnsupportedError, match="pass `labels . class_weights`"):
        linear_cross_entropy(x, weight, q, class_weights=jnp.ones(20))


def in_two_passes(function):
    """The function where the op's gradients compute the logits again."""

    class Watching(observe.Observer):
        intercepts = True

    def run(*arguments):
        with observe.watching(Watching()):
            return jax.jit(lambda *a: function(*a))(*arguments)

    return run


EVERYTHING = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}


@pytest.mark.parametrize(("options", "reduction"), [({}, "mean"), (EVERYTHING, "sum")], ids=["plain", "everything"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_walk_that_gives_loss_and_gradients_gives_those_of_the_op(dtype, options, reduction):
    """More tokens than it holds the logits of, and some that have no loss."""
    contract.skip_unless_built(NATIVE)
    x, weight, labels = inputs(170, 131072, 16, dtype)
    labels = labels.at[::5].set(-100)
    bias = jnp.linspace(-1.0, 1.0, 131072) if options else None

    def loss(x, weight, bias):
        return linear_cross_entropy(x, weight, labels, bias=bias, reduction=reduction, **options)

    both = jax.value_and_grad(loss, (0, 1) if bias is None else (0, 1, 2))
    value, found = jax.jit(both)(x, weight, bias)
    wanted_value, wanted = in_two_passes(both)(x, weight, bias)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-6)
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(a, np.float64) for a in (one, other))
        tolerance = {jnp.float32: 4e-6, jnp.bfloat16: 2.0**-7, jnp.float16: 2.0**-11}[dtype]
        assert one.dtype == other.dtype and np.abs(one - other).max() <= tolerance * np.abs(other).max()
    assert (np.asarray(found[0])[::5] == 0).all()


def calls(function, *arguments):
    """The native calls of a function's program, and for each whether a result is not wanted."""
    text = jax.jit(function).lower(*arguments).as_text()
    lines = [line for line in text.splitlines() if "custom_call @vishwamai" in line]
    return [(line.split("@")[1].split("(")[0], "tensor<0xf32>" in line.rpartition("->")[2]) for line in lines]


@pytest.mark.turns(4)
def test_what_is_computed_at_once():
    """The sum's gradients with the sum; the weight's only where it is asked for; all else by the op."""
    contract.skip_unless_built(NATIVE)
    x, weight, labels = inputs(8, 50, 16)

    def loss(x, weight, **options):
        return jax.tree.reduce(lambda a, b: a + jnp.sum(b), linear_cross_entropy(x, weight, labels, **options), 0.0)

    bias = {"bias": jnp.ones(50)}
    assert calls(jax.grad(functools.partial(loss, **bias), (0, 1)), x, weight) == [("vishwamai_loss_total", False)]
    assert calls(jax.grad(functools.partial(loss, **bias)), x, weight) == [("vishwamai_loss_total", True)]
    assert [name for name, _ in calls(loss, x, weight)] == ["vishwamai_loss_forward"]
    for options in ({"reduction": "none"}, {"return_logsumexp": True}, {"class_weights": jnp.ones(50)}):
        found = calls(jax.grad(functools.partial(loss, **options)), x, weight)
        assert [name for name, _ in found] == ["vishwamai_loss_forward", "vishwamai_loss_backward"]


def test_tokens_without_a_loss_alone():
    x, weight, labels = inputs(8, 50, 16)
    value, slopes = gradients(linear_cross_entropy)(x, weight, jnp.full_like(labels, -100))
    assert value == 0 and all((slope == 0).all() for slope in slopes)


@pytest.mark.turns(6)
def test_the_walk_under_vmap_twice_and_over_devices():
    contract.skip_unless_built(NATIVE)
    x, weight, labels = inputs(16, 50, 8)

    def loss(x, weight, labels):
        return linear_cross_entropy(x, weight, labels, z_loss=0.1)

    reference = functools.partial(linear_cross_entropy, z_loss=0.1, implementation="xla")
    each = x.reshape(2, 8, 8), labels.reshape(2, 8)
    found, wanted = (jax.vmap(jax.grad(f, (0, 1)), (0, None, 0))(each[0], weight, each[1]) for f in (loss, reference))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)

    def slope(f):
        return jax.grad(
            lambda x, w: jnp.sum(jnp.cos(jnp.arange(128.0).reshape(16, 8)) * jax.grad(f)(x, w, labels)), (0, 1)
        )

    for one, other in zip(slope(loss)(x, weight), slope(reference)(x, weight), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(UnsupportedError, match=r"linear_cross_entropy: its kernels have a gradient .* no forward mode"):
        jax.jvp(lambda x: loss(x, weight, labels), (x,), (x,))

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, labels)]
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, found = run(split[0], weight, split[1])
    wanted_value, wanted = run(x, weight, labels)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-6)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    text = run.lower(split[0], weight, split[1]).compile().as_text() or ""
    assert "all-gather" not in text and "all-reduce" in text and "vishwamai_loss_total" in text
