# SPDX-License-Identifier: Apache-2.0
"""Is it more: which tests of two runs belong together, whether they are comparable, and the verdict."""
