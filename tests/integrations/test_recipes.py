"""The code of docs/recipes.md runs, against the packages that are installed (slow: imports and small models)."""

import re
import types
from pathlib import Path

import pytest
import torch
from compare import assert_equal_bits, relative_error

import flash_attn_mx as famx

pytestmark = pytest.mark.slow
DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
QUALITY = 0.12


@pytest.fixture(autouse=True)
def silent():
    famx.set_fallback("silent")
    yield
    famx.sdpa.deactivate()
    famx.set_fallback("warn")


def recipe(name):
    """The names that the document's code for a package defines."""
    found = re.search(rf"```python\n(# recipe: {name}\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found, f"docs/recipes.md has no recipe {name}"
    names = {}
    exec(compile(found[1], f"{DOCUMENT}:{name}", "exec"), names)
    return types.SimpleNamespace(**names)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_diffusers():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    inputs = dict(
        hidden_states=normal(1, 48, 4), encoder_hidden_states=normal(1, 20, 32), timestep=torch.ones(1),
        pooled_projections=normal(1, 32), img_ids=torch.zeros(48, 3), txt_ids=torch.zeros(20, 3),
    )  # fmt: skip
    with torch.no_grad():
        expected = model(**inputs).sample
        with famx.monitor() as seen:
            actual = recipe("diffusers").denoise(model, **inputs)
    assert sum(f["calls"] for f in seen.as_dict()["layers"].values()) == 2
    assert 1e-5 < relative_error(actual, expected) < QUALITY


def test_torchtitan():
    attention = pytest.importorskip("torchtitan.models.common.attention")
    before = attention.ScaledDotProductAttention.sdpa_backends
    q, k, v = (normal(1, 40, h, 32, seed=h) for h in (4, 2, 2))
    module = attention.ScaledDotProductAttention(attention.ScaledDotProductAttention.Config())
    try:
        recipe("torchtitan").use_mxfp8()
        chosen = attention.ScaledDotProductAttention(attention.ScaledDotProductAttention.Config())
        actual = chosen(q, k, v, enable_gqa=True)
    finally:
        famx.sdpa.deactivate()
        attention.ScaledDotProductAttention.sdpa_backends = before
    assert_equal_bits(actual.contiguous(), famx.flash_attn_func(q, k, v, causal=True))
    assert 0.01 < relative_error(actual, module(q, k, v, enable_gqa=True)) < QUALITY


def test_megatron():
    pytest.importorskip("megatron.core")
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    ours = recipe("megatron").MXFP8Attention
    config = types.SimpleNamespace(
        context_parallel_size=1,
        apply_query_key_layer_scaling=False,
        window_size=None,
        attention_dropout=0.1,
    )
    module = ours(config, 3, AttnMaskType.causal, "self").eval()
    q, k, v = (normal(40, 2, h, 32, seed=h).requires_grad_() for h in (4, 2, 2))
    with famx.monitor() as seen:
        out = module(q, k, v, None)
    expected = famx.flash_attn_func(*(x.transpose(0, 1) for x in (q, k, v)), causal=True)
    assert_equal_bits(out, expected.transpose(0, 1).flatten(2))
    assert list(seen.as_dict()["layers"]) == ["decoder.layers.2"]
    hidden = torch.zeros(2, 1, 40, 40, dtype=torch.bool)
    hidden[0, ..., 30:] = True
    padded = module(q, k, v, hidden, attn_mask_type=AttnMaskType.padding)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), attn_mask=~hidden, enable_gqa=True
    )
    assert relative_error(padded, exact.permute(2, 0, 1, 3).flatten(2)) < 1e-5
    cu = torch.tensor([0, 15, 40], dtype=torch.int32)
    lengths = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=25, max_seqlen_kv=25
    )
    packed = module(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=lengths)
    alone = famx.flash_attn_func(*(x[:15, :1].transpose(0, 1) for x in (q, k, v)), causal=True)
    assert_equal_bits(packed[:15], alone[0].flatten(1))
    with pytest.raises(NotImplementedError, match="attention_bias"):
        module(q, k, v, None, attention_bias=torch.zeros(1))


def test_megatron_layer_runs_with_it():
    """Inside a real SelfAttention of Megatron-Core, one process, on a CPU."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True,
            attention_dropout=0.0, hidden_dropout=0.0, perform_initialization=True, init_method=torch.nn.init.xavier_normal_,
        )  # fmt: skip
        parts = SelfAttentionSubmodules(
            linear_qkv=tensor_parallel.ColumnParallelLinear,
            core_attention=recipe("megatron").MXFP8Attention,
            linear_proj=tensor_parallel.RowParallelLinear,
        )
        layer = SelfAttention(config, parts, layer_number=1, attn_mask_type=AttnMaskType.causal)
        x = normal(40, 2, 64).requires_grad_()
        out, _ = layer(x, attention_mask=None)
        out.sum().backward()
        changed = x.detach().clone()
        changed[39] += 1
        assert torch.equal(layer(changed, attention_mask=None)[0][:39], out[:39])
        assert x.grad.isfinite().all() and x.grad.abs().max() > 0
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def test_torchao():
    formats = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = normal(2, 40, 2, 64)
    theirs = formats.MXTensor.to_mx(x, torch.float8_e4m3fn, 32, formats.ScaleCalculationMode.RCEIL)
    mx, ours = recipe("torchao").from_torchao(theirs), famx.quantize_mxfp8(x)
    assert_equal_bits(mx.data, ours.data)
    assert_equal_bits(mx.scale, ours.scale)
    v = famx.quantize_mxfp8(x, axis="colwise")
    assert_equal_bits(famx.flash_attn_mx_func(mx, mx, v), famx.flash_attn_mx_func(ours, ours, v))


def te_tensor(x):
    """A stand-in for MXFP8Tensor of (tokens, width): its attributes and padding, scales not swizzled."""
    row, column = (famx.quantize_mxfp8(x, axis=axis) for axis in ("rowwise", "colwise"))

    def padded(scale, rows, columns):
        scale = scale.view(torch.uint8)
        short = -scale.shape[0] % rows, -scale.shape[1] % columns
        return torch.nn.functional.pad(scale, (0, short[1], 0, short[0]), value=0xFF)

    return types.SimpleNamespace(
        _rowwise_data=row.data.view(torch.uint8), _rowwise_scale_inv=padded(row.scale, 128, 4),
        _columnwise_data=column.data.view(torch.uint8), _columnwise_scale_inv=padded(column.scale, 4, 128),
        _with_gemm_swizzled_scales=False,
    )  # fmt: skip


def test_transformer_engine_layouts():
    from_te = recipe("transformer-engine").from_te
    q, k, v = (normal(2, 64, 3, 32, seed=seed) for seed in range(3))
    parts = [
        from_te(te_tensor(x.flatten(0, 1).flatten(1)), 2, 3, axis)
        for x, axis in ((q, "rowwise"), (k, "rowwise"), (v, "colwise"))
    ]
    expected = [
        famx.quantize_mxfp8(x, axis) for x, axis in ((q, "rowwise"), (k, "rowwise"), (v, "colwise"))
    ]
    for part, want in zip(parts, expected):
        assert_equal_bits(part.data, want.data)
        assert_equal_bits(part.scale, want.scale)
    out = famx.flash_attn_mx_func(*parts, out_dtype=torch.float32)
    assert_equal_bits(out, famx.flash_attn_func(q, k, v))
    with pytest.raises(ValueError, match="multiples of 32"):
        from_te(te_tensor(normal(80, 96)), 2, 3, "colwise")
