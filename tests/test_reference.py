"""reference.py checked against other sources: torch's E4M3, rational arithmetic, exact attention."""

import math
from fractions import Fraction

import compare
import pytest
import tolerances as tol
import torch
from problems import exact, normal_problem, oracle

from flash_attn_mx import reference

NAN, INF = float("nan"), float("inf")


def test_decode_e4m3_is_torchs_table():
    """All 256 payload bytes mean what torch.float8_e4m3fn says."""
    payload = torch.arange(256).to(torch.uint8)
    compare.assert_close(
        reference.decode_e4m3(payload), payload.view(torch.float8_e4m3fn).double(), atol=0.0
    )


def test_encode_e4m3_rounds_to_nearest_even():
    """Every representable value, every midpoint, and their float neighbours, with both signs."""
    values = reference.decode_e4m3(torch.arange(0x7F).to(torch.uint8))
    midpoints = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, midpoints]).float()
    x = torch.cat(
        [x, torch.nextafter(x, torch.tensor(INF)), torch.nextafter(x, torch.tensor(-INF))]
    )
    x = torch.cat([x, -x])
    x = x[x.abs() <= 448]
    expected = x.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(reference.encode_e4m3(x.double()), expected)


@pytest.mark.parametrize("x, byte", [(449.0, 0x7E), (1e30, 0x7E), (-INF, 0xFE), (-0.0, 0x80)])
def test_encode_e4m3_clamps(x, byte):
    """Saturation at ±448 and the sign of zero (numerics §1, payload)."""
    assert reference.encode_e4m3(torch.tensor([x], dtype=torch.float64)).item() == byte


@pytest.mark.parametrize("seed", range(3))
def test_rceil_byte_is_the_smallest_power_of_two(seed):
    """RCEIL by rational arithmetic: smallest 2^e >= amax/448, over the whole fp32 range."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(1, 0x7F800000, (400,), generator=generator, dtype=torch.int32)
    edges = torch.tensor([448.0, 449.0, 224.0, 225.0, 150.0, 1e-38, 1e-45, 3.4028235e38])
    amax = torch.cat([bits.view(torch.float32), edges])
    for value, byte in zip(
        amax.tolist(), reference.rceil_byte(amax.double()).tolist(), strict=True
    ):
        need = Fraction(value) / 448
        assert byte == 0 or Fraction(2) ** (byte - 1 - 127) < need
        assert Fraction(2) ** (byte - 127) >= need


def test_rceil_byte_special_blocks():
    """Zero block 127, poisoned block 255 (numerics §1)."""
    amax = torch.tensor([0.0, NAN, INF], dtype=torch.float64)
    assert reference.rceil_byte(amax).tolist() == [127, 255, 255]


@pytest.mark.parametrize(
    "axis, scale_shape",
    [("rowwise", (2, 70, 3, 2)), ("colwise", (2, 3, 3, 40)), ("tokenwise", (2, 70, 3, 1))],
)
def test_quantise_errs_by_half_a_step(axis, scale_shape):
    """Shapes with short last blocks; every value within half a step of the block's scale."""
    x = torch.randn(2, 70, 3, 40, generator=torch.Generator().manual_seed(1))
    quantised = reference.quantise(x, axis)
    assert quantised.scale.shape == scale_shape
    scale = reference.decode_e8m0(quantised.per_element_scale())
    step = torch.maximum(x.double().abs() * tol.E4M3_STEP, scale * 2.0**-10)
    assert ((quantised.dequantise() - x).abs() <= step).all()


def test_quantise_poisons_its_block_only():
    """numerics §1: byte 255 and payload 0x7F in the block, 0x00 tokenwise."""
    x = torch.ones(1, 40, 1, 64)
    x[0, 33, 0, 5] = NAN
    for axis, payload in (("rowwise", 0x7F), ("colwise", 0x7F), ("tokenwise", 0x00)):
        quantised = reference.quantise(x, axis)
        poisoned = quantised.per_element_scale() == 255
        assert poisoned.sum().item() == {"rowwise": 32, "colwise": 8, "tokenwise": 64}[axis]
        assert (quantised.payload[poisoned] == payload).all()
        assert (quantised.dequantise()[~poisoned] == 1).all()


def test_visible_keys_against_the_definition():
    """numerics §2 as an inequality over every pair."""
    for seqlen_q, seqlen_k in ((4, 7), (7, 4), (5, 5), (3, 0)):
        for left in (-1, 0, 2, 9):
            for right in (-1, 0, 3, 9):
                for i in range(seqlen_q):
                    at = i + seqlen_k - seqlen_q
                    expected = [
                        k
                        for k in range(seqlen_k)
                        if (left < 0 or k >= at - left) and (right < 0 or k <= at + right)
                    ]
                    keys = reference.visible_keys(i, seqlen_q, seqlen_k, left, right)
                    assert list(keys) == expected


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, options",
    [
        (130, 130, {}),
        (130, 130, {"causal": True}),
        (60, 150, {"causal": True}),
        (150, 60, {"causal": True}),
        (140, 140, {"window_size": (20, 11)}),
        (20, 300, {"window_size": (200, 0)}),
    ],
    ids=str,
)
def test_reference_near_exact_attention(seqlen_q, seqlen_k, options):
    """The oracle itself is attention: E4M3's error away from float64, masked rows exactly empty."""
    problem = normal_problem(seqlen_q, seqlen_k, heads=2, heads_k=1)
    got, want = oracle(problem, **options), exact(problem, **options)
    assert torch.equal(torch.isinf(got.lse), torch.isinf(want.lse))
    compare.assert_close(got.lse, want.lse, "lse", atol=0.1)
    for name in ("out", "dq", "dk", "dv"):
        compare.assert_close(getattr(got, name), getattr(want, name), name, frobenius=0.08)
    hidden = torch.isinf(want.lse).transpose(1, 2)
    assert (got.out[hidden] == 0).all() and (got.dq[hidden] == 0).all()


def test_reference_exact_where_every_value_is():
    """P in {1/2}, V and sums exact: no error at all, on full tiles and on cut ones."""
    v = torch.tensor([1.0, 3.0, 2.0, 6.0]).view(1, 4, 1, 1).expand(1, 4, 1, 32)
    zeros = torch.zeros_like(v)
    forward = reference.attention_forward(zeros, zeros, v)
    assert (forward.out == 3).all()
    assert torch.allclose(forward.lse, torch.full_like(forward.lse, math.log(4)), rtol=1e-15)
    forward = reference.attention_forward(zeros, zeros, v, causal=True)
    assert forward.out[0, :, 0, 0].tolist() == [1, 2, 2, 3]


def test_reference_slow_path_keeps_every_tile():
    """A tile 90 bits above the first visited one moves r (n > 60); nothing may be lost or doubled."""
    q = torch.ones(1, 1, 1, 32)
    k = torch.zeros(1, 384, 1, 32)
    k[0, 128:256, 0, 0], k[0, :128, 0, 0] = 60.0, 56.0
    v = torch.ones_like(k)
    v[0, :128], v[0, 128:256], v[0, 256:] = 4.0, 2.0, 448.0
    forward = reference.attention_forward(q, k, v, softmax_scale=1.0)
    p = math.exp(-4) / (1 + math.exp(-4))
    lse = torch.tensor(60 + math.log(128 * (1 + math.exp(-4))), dtype=torch.float64)
    compare.assert_close(forward.lse, lse.view(1, 1, 1), "lse", atol=1e-9)
    compare.assert_close(forward.out, torch.full_like(forward.out, 4 * p + 2 * (1 - p)), row=0.01)


def test_reference_row_ignores_hidden_tokens():
    """numerics §3: bit for bit, NaN and huge values included."""
    problem = normal_problem(140, head_dim=32)
    clean = reference.attention_forward(*problem[:3], causal=True)
    k, v = problem.k.clone(), problem.v.clone()
    k[0, 100], v[0, 100], v[0, 120] = NAN, 2.0**20, INF
    dirty = reference.attention_forward(problem.q, k, v, causal=True)
    compare.assert_equal_bits(dirty.out[:, :100], clean.out[:, :100])
    compare.assert_equal_bits(dirty.lse[..., :100], clean.lse[..., :100])
    assert dirty.out[:, 100:].isnan().all() and dirty.lse[..., 100:].isnan().all()


def test_reference_huge_logits_keep_p_below_one():
    """numerics §4: x - LSE is rounding alone at |x| = 1e18; P must not become Inf."""
    q = torch.where(
        torch.rand(1, 4, 1, 64, generator=torch.Generator().manual_seed(0)) < 0.5, -5e8, 5e8
    )
    forward = reference.attention_forward(q, q, torch.randn_like(q))
    lse = forward.lse.float()  # as it is handed over
    gradients = reference.attention_backward(torch.ones_like(q), forward, lse=lse)
    for name in ("dq", "dk", "dv"):
        assert torch.isfinite(getattr(gradients, name)).all(), name


def test_reference_slack_holds_what_rounding_can_do():
    """Rows with a P at a rounding boundary get room for both neighbours; the others next to none."""
    q, k = torch.ones(1, 1, 1, 32), torch.zeros(1, 3, 1, 32)
    v = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1).expand(1, 3, 1, 32)
    k[0, 1, 0, 0] = -1.0
    tie = -math.log(17 / 32)  # p = 136/256 of the maximum, between 128 and 144
    free = -math.log(20 / 32)
    for scale, low, high in ((tie, 1e-3, 1e-1), (free, 0.0, 1e-5)):
        forward = reference.attention_forward(q, k, v, softmax_scale=scale)
        assert (low <= forward.slack).all() and (forward.slack <= high).all()
        nearby = [
            reference.attention_forward(q, k, v, softmax_scale=scale * factor).out
            for factor in (1 - 2.0**-24, 1 + 2.0**-24)
        ]
        for out in nearby:
            assert ((out - forward.out).abs() <= forward.slack + 1e-7).all()


def test_attention_fp64_gradcheck():
    """The exact attention differentiates, masked rows included."""
    problem = normal_problem(5, 3, heads=2, heads_k=1, head_dim=3)
    leaves = [t.double().requires_grad_() for t in problem[:3]]

    def function(q, k, v):
        return reference.attention_fp64(q, k, v, causal=True)[0]

    assert torch.autograd.gradcheck(function, leaves)
    result = exact(problem, causal=True)
    assert (result.out[:, :2] == 0).all() and (result.lse[..., :2] == -INF).all()
    assert (result.dq[:, :2] == 0).all()


def test_attention_fp64_is_torchs():
    """Same values as torch's own attention where both define the mask alike."""
    problem = normal_problem(33, heads=4, heads_k=2).to(torch.float64)
    q, k, v = (t.transpose(1, 2) for t in problem[:3])
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    out, _ = reference.attention_fp64(*problem[:3], causal=True)
    compare.assert_close(out, want.transpose(1, 2), atol=1e-12)
