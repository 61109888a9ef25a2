"""Hugging Face's models on our attention, against "eager": padded and packed batches, windows, soft-caps, sinks,
caches, dropout, errors.

Run as they are, by the native kernels of the CPU; under TRITON_INTERPRET=1 (`make test-gpu`) one forward pass,
interpreted.
"""

import contextlib
import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import contract  # noqa: E402
from triton_kernels import triton_serves  # noqa: E402
from vishwamai.core.errors import ShapeError, UnsupportedError  # noqa: E402
from vishwamai.patch import attention as ours  # noqa: E402

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")]

SIZES: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
)
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "Mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4)),
    "Gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=5.0, query_pre_attn_scalar=7)
    ),
    "GptOss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1)
    ),
    "Bert": lambda: transformers.BertModel(
        transformers.BertConfig(**{k: v for k, v in SIZES.items() if "k" not in k or k == "vocab_size"})
    ),
}


@pytest.fixture(autouse=True)
def here():
    ours.register()
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield


def pair(name) -> Any:
    """The same random model with transformers' own attention and with ours."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    both = {}
    for implementation in ("eager", "vishwamai"):
        both[implementation] = copy.deepcopy(model)
        both[implementation].set_attn_implementation(implementation)
    return both["eager"], both["vishwamai"]


IDS = torch.tensor([[7, 3, 9, 4, 1, 8, 2, 6, 5, 11, 12], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
LEFT = torch.tensor([[1] * 11, [0] * 3 + [1] * 8])
RIGHT = torch.tensor([[1] * 11, [1] * 6 + [0] * 5])


def logits(model, **inputs):
    result = model(**inputs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def same(got, want, where=None):
    got, want = (x if where is None else x[where.bool()] for x in (got, want))
    assert want.abs().max() > 0.1 and (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.skipif(contract.TRITON, reason="natively: one forward pass is interpreted, below")
@pytest.mark.parametrize("padding", [LEFT, pytest.param(RIGHT, marks=pytest.mark.long)], ids=["left", "right"])
@pytest.mark.parametrize(
    "name", ["Llama", "Gemma2", *(pytest.param(n, marks=pytest.mark.long) for n in ("Mistral", "GptOss", "Bert"))]
)
def test_padded_batches(name, padding):
    """Logits of what is no padding, and every parameter's gradient of their sum."""
    eager, model = pair(name)
    seen = []
    for m in (model, eager):
        y = logits(m, input_ids=IDS, attention_mask=padding)
        seen.append(y)
        (y[padding.bool()] * torch.linspace(-1, 1, y.shape[-1])).sum().backward()
    same(seen[0], seen[1], padding)
    parameters = zip(model.parameters(), eager.parameters(), strict=True)
    gradients = [(a.grad, b.grad) for a, b in parameters if b.grad is not None]
    largest = max(float(want.abs().max()) for _, want in gradients)
    assert gradients and all((got - want).abs().max() <= 5e-5 * largest for got, want in gradients)


@pytest.mark.parametrize("name", ["Gemma2" if contract.TRITON else "Mistral"])
def test_a_forward_pass(name):
    eager, model = pair(name)
    with torch.no_grad():
        got, want = (logits(m, input_ids=IDS, attention_mask=LEFT) for m in (model, eager))
        same(got, want, LEFT)


def masks_of(model, **inputs):
    """What reaches the attention of the layers."""
    seen = []
    attend = ours.attend

    def record(module, query, key, value, attention_mask, **options):
        seen.append(attention_mask)
        return attend(module, query, key, value, attention_mask, **options)

    transformers.AttentionInterface.register("recording", record)
    transformers.AttentionMaskInterface.register("recording", ours.make_mask)
    model.set_attn_implementation("recording")
    y = logits(model, **inputs)
    return y, seen


@pytest.mark.skipif(contract.TRITON, reason="natively")
def test_no_square_mask_is_made_for_what_a_kernel_knows():
    """Plain: none at all; padding and packing: a number for each key. Unknown patterns come as transformers' own mask,
    and give the same.
    """
    eager, model = pair("Mistral")
    with torch.no_grad():
        y, masks = masks_of(model, input_ids=IDS)
        assert [m.shape for m in masks] == [(0, 5, 1, 11)] * 2  # a window of 4
        same(y, logits(eager, input_ids=IDS))
        _, masks = masks_of(model, input_ids=IDS[:, :4])
        assert masks == [None, None]
        _, masks = masks_of(model, input_ids=IDS, attention_mask=LEFT)
        assert [m.shape for m in masks] == [(2, 5, 1, 11)] * 2
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]] * 2)  # two sequences in one row
        y, masks = masks_of(model, input_ids=IDS, position_ids=positions, use_cache=False)
        assert [m.shape for m in masks] == [(2, 5, 1, 11)] * 2
        same(y, logits(eager, input_ids=IDS, position_ids=positions, use_cache=False))
        square = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril() & (torch.arange(11) % 4 != 1)
        square[..., 0] = True
        y, masks = masks_of(model, input_ids=IDS, attention_mask=square)
        assert [m.shape for m in masks] == [(2, 1, 11, 11)] * 2
        same(y, logits(eager, input_ids=IDS, attention_mask=torch.where(square, 0.0, torch.finfo(torch.float32).min)))


@pytest.mark.skipif(contract.TRITON, reason="natively")
def test_a_window_that_the_layer_does_not_tell():
    """Some models say it by the mask alone."""
    eager, model = pair("Mistral")
    attend = ours.attend
    transformers.AttentionInterface.register("silent", lambda *a, sliding_window, **k: attend(*a, **k))
    transformers.AttentionMaskInterface.register("silent", ours.make_mask)
    model.set_attn_implementation("silent")
    with torch.no_grad():
        for padding in (None, LEFT):
            y, want = (logits(m, input_ids=IDS, attention_mask=padding) for m in (model, eager))
            same(y, want, padding)


@pytest.mark.skipif(contract.TRITON, reason="natively")
@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.long)])
def test_generation(cache):
    """Tokens from a cache, one that grows and one of a fixed size, after a prompt that is padded."""
    eager, model = pair("Mistral")
    how: dict[str, Any] = dict(attention_mask=LEFT, max_new_tokens=6, do_sample=False, cache_implementation=cache)
    if cache == "static":
        how["disable_compile"] = True
    tokens = [m.generate(IDS, **how) for m in (model, eager)]
    assert torch.equal(*tokens)


@pytest.mark.skipif(contract.TRITON, reason="natively")
def test_dropout_in_training():
    """A layer in training drops with its own rate, and on the average computes what it computes without."""
    _, model = pair("Llama")
    attention = model.model.layers[0].self_attn
    torch.manual_seed(1)
    q = torch.randn(1, 4, 6, 16)
    plain, _ = ours.attend(attention, q, q[:, :2], q[:, :2], None)
    draws = [ours.attend(attention, q, q[:, :2], q[:, :2], None, dropout=0.5)[0] for _ in range(300)]
    assert not torch.equal(draws[0], draws[1])
    assert (torch.stack(draws).mean(0) - plain).abs().mean() < 0.15 * plain.abs().mean()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    first, second = (logits(model.train(), input_ids=IDS) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(*(logits(model.eval(), input_ids=IDS) for _ in range(2)))


@pytest.mark.skipif(contract.TRITON, reason="natively")
def test_packed_sequences_by_their_starts():
    """What transformers hands to FlashAttention for flattened batches: each sequence sees itself."""
    _, model = pair("Mistral")
    attention = model.model.layers[0].self_attn
    starts = torch.tensor([0, 4, 11], dtype=torch.int32)
    more: dict[str, Any] = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=7, max_length_k=7)
    q, k, v = torch.randn(1, 4, 11, 16), torch.randn(1, 2, 11, 16), torch.randn(1, 2, 11, 16)
    out, _ = ours.attend(attention, q, k, v, None, sliding_window=3, **more)
    for at in (slice(0, 4), slice(4, 11)):
        want, _ = ours.attend(attention, q[:, :, at], k[:, :, at], v[:, :, at], None, sliding_window=3)
        assert torch.allclose(out[:, at], want, atol=1e-6)


def test_errors():
    _, model = pair("Llama")
    attention = model.model.layers[0].self_attn
    q = torch.randn(1, 4, 6, 16)
    requested: dict[str, Any] = dict(output_attentions=True, head_mask=torch.ones(4), cache=object())
    for name, option in requested.items():
        with pytest.raises(UnsupportedError, match=f"`{name}` is .*use attn_implementation='eager'"):
            ours.attend(attention, q, q, q, None, **{name: option})
    with pytest.raises(ShapeError, match=r"the mask has shape \(1, 1, 1, 4\), and there are 6 keys"):
        ours.attend(attention, q, q, q, torch.zeros(1, 1, 1, 4, dtype=torch.int64))
