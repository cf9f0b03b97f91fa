# SPDX-License-Identifier: Apache-2.0
"""What users see, as black-box tests: they import nothing of the package but ``pytest_llenergy.api``."""
