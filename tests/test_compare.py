"""The comparison helpers must fail where results are wrong."""

import compare
import pytest
import torch

NAN, INF = float("nan"), float("inf")
BOUNDS = [{"atol": 1.0}, {"row": 1.0}, {"median": 1.0}, {"frobenius": 1.0}]


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda b: next(iter(b)))
@pytest.mark.parametrize(
    "actual, expected", [(NAN, 0.0), (0.0, NAN), (INF, -INF), (INF, 1.0), (NAN, INF), (0.0, -INF)]
)
def test_c11_special_values_at_other_places_fail(actual, expected, bound):
    """C11: a helper that ignores NaN hides wrong fully masked rows."""
    with pytest.raises(AssertionError, match="at other places"):
        compare.assert_close(torch.tensor([actual, 1.0]), torch.tensor([expected, 1.0]), **bound)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_c11_same_special_values_pass(value):
    """C11: NaN equals NaN in place, Inf equals Inf."""
    x = torch.tensor([value, 2.0])
    compare.assert_close(x, x.clone(), atol=0.0, row=0.0, median=0.0, frobenius=0.0)


def test_c11_negative_zero_equals_zero():
    """C11: -0 against 0 passes; only the comparison of bits tells them apart."""
    minus, plus = torch.tensor([-0.0]), torch.tensor([0.0])
    compare.assert_close(minus, plus, atol=0.0, row=0.0)
    with pytest.raises(AssertionError, match="differ in their bits"):
        compare.assert_equal_bits(minus, plus)


def test_c11_one_small_wrong_row_fails():
    """C11: a row of small magnitude that is wrong does not show in cosine, Frobenius or |Δ|."""
    expected = torch.ones(1000, 64)
    expected[7] = 1e-3
    actual = expected.clone()
    actual[7] = 0.0
    cosine = torch.cosine_similarity(actual.flatten(), expected.flatten(), dim=0)
    assert cosine > 0.999999
    compare.assert_close(actual, expected, atol=2e-3, frobenius=1e-3)
    with pytest.raises(AssertionError, match=r"\(7, 0\): got 0, expected 0.001"):
        compare.assert_close(actual, expected, row=0.5)


def test_assert_close_zero_row_must_be_zero():
    """A fully masked row is exactly 0: relative to it every other value is wrong."""
    expected = torch.zeros(2, 4)
    actual = expected.clone()
    actual[1, 2] = 1e-30
    with pytest.raises(AssertionError):
        compare.assert_close(actual, expected, row=0.5)


def test_assert_close_each_bound_can_fail():
    """Each bound alone finds an error that is twice as large."""
    expected = torch.ones(8, 8)
    actual = expected + 0.2
    for bound in BOUNDS:
        compare.assert_close(actual, expected, **bound)
        name = next(iter(bound))
        with pytest.raises(AssertionError, match="0.2"):
            compare.assert_close(actual, expected, **{name: 0.1})


def test_assert_close_shape_mismatch_fails():
    """Broadcasting would compare a row with a matrix."""
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_close(torch.ones(3), torch.ones(2, 3), atol=1.0)


def test_assert_close_without_bound_fails():
    """A call that checks nothing is a mistake."""
    with pytest.raises(AssertionError, match="needs a bound"):
        compare.assert_close(torch.ones(3), torch.ones(3))


def test_assert_equal_bits_names_the_place():
    """The message says where and what; NaN equals itself, dtypes must agree."""
    x = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    compare.assert_equal_bits(x, x.clone())
    other = x.clone()
    other[1, 0] = 2.0000002
    with pytest.raises(AssertionError, match=r"1 of 4 .*\(1, 0\)"):
        compare.assert_equal_bits(x, other)
    with pytest.raises(AssertionError, match="float64"):
        compare.assert_equal_bits(x.double(), x)
