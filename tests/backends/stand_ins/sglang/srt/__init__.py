# SPDX-License-Identifier: Apache-2.0
"""``sglang.srt``, as far as it is used."""
