"""Every tolerance of the tests, with where it comes from.

Two kinds. Against reference.py (same quantisation points, float64) the bounds are tight: what is left
is fp32 arithmetic and, where a value stands at a rounding boundary, one flipped byte. Against exact
attention they are loose: they say how good MXFP8 is, and a wrong scale or mask breaks them by far.
"""

import flash_attn_mx as famx

# ---- same contract, fp32 against float64 -------------------------------------------------------

# Relative error of exp2 in the sm_100 kernels: 2.9e-6 of the polynomial, 2 ulp of MUFU.EX2 for the other keys
# (docs/forward.md). PyTorch's is rounded correctly but for an ulp, which the oracle allows anyway.
KERNEL_EXP2 = 3.2e-6


def exp2_error():
    """That of the backend under test."""
    return 0.0 if famx.get_backend() in ("auto", "portable") else KERNEL_EXP2


# Beyond the oracle's slack, which holds every payload of P that stands at a rounding boundary (one
# flip moves O by 2^-4 of that key's share: rarely 2^-9 of the row, in a row with few keys more), only
# fp32 sums are left: 2^-24 times the square root of some hundred terms.
CONTRACT_O_ROW = 1e-6
# The same without any allowance for flips: they are rare. From |LSE| = 16 on the bound grows with it,
# since x loses absolute precision.
CONTRACT_O_MEDIAN = 1e-6
# fp32 LSE near 10 has an ulp of 1e-6; x adds as much. Beyond 1 the bound is relative: 40 ulp.
CONTRACT_LSE = 1e-5
# A flipped byte of P or dS changes one of the S·32 products of a gradient row by 2^-4; flips hit
# about one byte in 10^5, their root mean square is below 1e-3.
CONTRACT_GRAD = 2e-3
# A single gradient row: one flip of 2^-4 in the largest of its products, spread over many queries.
FLIP_ROW = 2.0**-6
# Rounding of O and of the gradients to the output dtype: 7 and 10 fraction bits.
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

# ---- quality against exact attention -----------------------------------------------------------

# E4M3's three fraction bits give a uniform relative error of 2^-4/sqrt(12)·... = 2.6 % (RMS over one
# binade) per operand; two operands and P combine to the figures of a float64 simulation of the
# contract (O .053, dQ .067, dK .066, dV .056 on standard normal data, D=128, S=2048), plus 4 %.
QUALITY_O = 0.055
QUALITY_DQ = 0.070
QUALITY_DK = 0.070
QUALITY_DV = 0.058
# For small shapes, where one unlucky row weighs more, and for logits larger than normal.
QUALITY_SMALL = 0.12

# P alone quantised (operands already rounded): the simulation's figures for S=4096, D=128, last tile
# first (docs/numerics.md §3), times 1.3 for another draw of the data.
P_ONLY_NORMAL = 1.3 * 0.0264
P_ONLY_SINK_12 = 1.3 * 0.0067
P_ONLY_SINK_16 = 1.3 * 0.0005
P_ONLY_ONE_KEY_10 = 1.3 * 0.0054
P_ONLY_RAMP_20 = 1.3 * 0.0246

# ---- single clauses ----------------------------------------------------------------------------

# Half a step of three fraction bits: the most that one E4M3 value in the normal range can err.
E4M3_STEP = 2.0**-4
# O where every P and V is exact in E4M3: fp32 division and sums only.
FP32_EXACT = 1e-6
# All-ones V: sum of quantised p over the corrected row sum. p errs by at most 2^-4 each, at random
# over the keys of the row.
ONES_V = 0.01
