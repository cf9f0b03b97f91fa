# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: static batches, one process for each device."""
