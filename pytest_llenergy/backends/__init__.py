# SPDX-License-Identifier: Apache-2.0
"""Inference backends: the protocol, the registry, and one module or package per backend."""
