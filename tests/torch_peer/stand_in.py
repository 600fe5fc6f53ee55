"""A test file as PyTorch writes them, for the runner's own test; not collected by itself."""

import unittest

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_utils import TestCase


class TestStandIn(TestCase):
    def both(self, **options):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 33, 64) for _ in range(3))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            fused = F.scaled_dot_product_attention(q, k, v, **options)
        with sdpa_kernel(SDPBackend.MATH):
            return fused, F.scaled_dot_product_attention(q, k, v, **options)

    def test_values(self):
        self.assertEqual(*self.both(is_causal=True), atol=1e-5, rtol=5e-6)

    def test_shape(self):
        fused, math = self.both()
        self.assertEqual(fused.shape, math.shape)

    def test_mask(self):
        self.assertEqual(*self.both(attn_mask=torch.ones(33, 33, dtype=torch.bool).tril()))

    def test_wrong_mask(self):
        """Passes without MXFP8 only where the comparison is loose; here it compares what differs by much."""
        fused, _ = self.both(is_causal=True)
        _, other = self.both()
        self.assertNotEqual(float((fused - other).norm() > 0.5 * other.norm()), 0.0)

    @unittest.skip("needs another kernel")
    def test_skipped(self):
        pass

    def test_own_fault(self):
        self.assertEqual(1, 2)

    def test_exact_bits(self):
        """torch's flash kernel repeats itself; so does ours. A test that asks for torch's bits would fail."""
        fused, _ = self.both()
        again, _ = self.both()
        self.assertTrue(torch.equal(fused, again))

    def test_error_is_torchs(self):
        fused, math = self.both()
        self.assertTrue((fused - math).abs().max() < 1e-4)
