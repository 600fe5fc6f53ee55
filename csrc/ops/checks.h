// Host checks. The typed errors that users see are raised in Python first; these are the backstop,
// because the stable ABI carries every C++ exception as RuntimeError.
#pragma once

#include <torch/headeronly/util/Exception.h>

// FAMX_CHECK(condition, "argument", "what was expected", got...): "argument: expected ..., got ..."
#define FAMX_CHECK(condition, argument, expected, ...) \
  STD_TORCH_CHECK(condition, argument, ": expected ", expected, ", got ", __VA_ARGS__)
