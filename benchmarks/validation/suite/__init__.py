# SPDX-License-Identifier: Apache-2.0
"""Test files that the parts run with pytest, as a user would."""
