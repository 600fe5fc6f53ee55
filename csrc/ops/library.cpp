// The operator schemas. `quantize` runs natively on CPU (quantize.cpp); fwd and bwd get their
// implementations from flash_attn_mx/ops.py. No Python.h: one binary serves every Python.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flash_attn_mx, m) {
#define FAMX_SCHEMA(schema) m.def(schema);
#include "schemas.def"
#undef FAMX_SCHEMA
}
