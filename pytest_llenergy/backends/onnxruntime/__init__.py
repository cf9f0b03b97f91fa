# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime GenAI on the CPU: static batches, with the loop of decoding in our hands."""
