# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU, through the server of xllamacpp: reads GGUF files, needs no torch."""
