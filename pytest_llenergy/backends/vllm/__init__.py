# SPDX-License-Identifier: Apache-2.0
"""vLLM: continuous batching, processes of its own for the shards of a model; CUDA and CPU by one class."""
