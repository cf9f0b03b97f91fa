# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor``: what is here, what may be used, what is wrong and what to do about it."""
