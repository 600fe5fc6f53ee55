"""Comparisons that say where two tensors differ. NaN and Inf must stand at the same places.

A cosine or a mean alone hides one wrong row, so every check here looks at single rows too.
"""

import torch


def _host64(x):
    return torch.as_tensor(x).detach().to("cpu", torch.float64)


def _coordinates(flat_index, shape):
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_index), shape))


def _worst(error, actual, expected, count=3):
    """The places of the largest errors, as text."""
    flat = error.flatten()
    top = flat.topk(min(count, flat.numel())).indices.tolist()
    return "; ".join(
        f"{_coordinates(i, error.shape)}: got {float(actual.flatten()[i]):.9g}, "
        f"expected {float(expected.flatten()[i]):.9g}"
        for i in top
    )


def check_special_values(actual, expected, name="tensor"):
    """Asserts equal shapes, and NaN, +Inf and -Inf at the same places."""
    actual, expected = _host64(actual), _host64(expected)
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    for kind, test in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        wrong = test(actual) != test(expected)
        assert not wrong.any(), (
            f"{name}: {kind} at other places than expected, {int(wrong.sum())} of {wrong.numel()}; "
            + _worst(wrong.double(), actual, expected)
        )


def relative_error(actual, expected):
    """|actual - expected| / |expected| in the Frobenius norm over the finite values."""
    actual, expected = _host64(actual), _host64(expected)
    finite = torch.isfinite(expected)
    difference = torch.linalg.vector_norm((actual - expected)[finite])
    return float(difference / torch.linalg.vector_norm(expected[finite]).clamp(min=1e-300))


def assert_close(
    actual, expected, name="tensor", *, atol=None, row=None, median=None, frobenius=None, slack=None
):
    """Asserts that actual is near expected; rows are the last dimension.

    Args:
      atol: bound on |Δ|.
      row: bound on |Δ| relative to the largest magnitude of the same row of expected; where that row
        is all zero, actual must be zero.
      median: bound on the median over all elements of the same ratio.
      frobenius: bound on the relative Frobenius error.
      slack: tensor like expected, subtracted from |Δ| before the bounds atol and row are applied.
    NaN and Inf must agree in place and sign. At least one bound is needed.
    """
    assert not (atol is row is median is frobenius is None), "assert_close needs a bound"
    check_special_values(actual, expected, name)
    actual, expected = _host64(actual), _host64(expected)
    if expected.numel() == 0:
        return
    finite = torch.isfinite(expected)
    error = torch.where(finite, (actual - expected).abs(), torch.zeros_like(expected))
    excess = error if slack is None else (error - _host64(slack).nan_to_num(0.0)).clamp(min=0.0)
    if atol is not None:
        worst = float(excess.max())
        assert worst <= atol, (
            f"{name}: |error| {worst:.4g} > {atol:.4g}; {_worst(excess, actual, expected)}"
        )
    if row is not None or median is not None:
        magnitude = torch.where(finite, expected.abs(), torch.zeros_like(expected))
        magnitude = magnitude.reshape(-1 if expected.dim() == 0 else expected.shape)
        scale = magnitude.amax(dim=-1, keepdim=True).clamp(min=1e-300)
        ratio = excess.reshape(magnitude.shape) / scale
        worst = float(ratio.max())
        middle = float((error.reshape(magnitude.shape) / scale).median())
        assert row is None or worst <= row, (
            f"{name}: error {worst:.4g} of the row's largest magnitude > {row:.4g}; "
            + _worst(ratio, actual, expected)
        )
        assert median is None or middle <= median, (
            f"{name}: median error {middle:.4g} of the row's largest magnitude > {median:.4g}"
        )
    if frobenius is not None:
        error_all = relative_error(actual, expected)
        assert error_all <= frobenius, (
            f"{name}: relative Frobenius error {error_all:.4g} > {frobenius:.4g}; "
            + _worst(error, actual, expected)
        )


def assert_equal_bits(actual, expected, name="tensor"):
    """Asserts the same dtype, shape and bytes (so -0 differs from 0, and a NaN equals itself)."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if actual.numel() == 0:
        return
    left = actual.detach().cpu().contiguous()
    right = expected.detach().cpu().contiguous()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    wrong = left.reshape(-1).view(integer) != right.reshape(-1).view(integer)
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ in their bits; "
        + _worst(
            wrong.double().reshape(left.shape), left.to(torch.float64), right.to(torch.float64)
        )
    )
