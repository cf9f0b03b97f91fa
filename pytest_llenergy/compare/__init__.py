# SPDX-License-Identifier: Apache-2.0
"""Is it more: gates and, later, comparison with a baseline."""
