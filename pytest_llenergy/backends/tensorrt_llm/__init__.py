# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM: continuous batching, MPI processes. Written from its documentation; see ``spec``."""
