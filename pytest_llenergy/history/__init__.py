# SPDX-License-Identifier: Apache-2.0
"""What tests have taken from session to session: kept, shown, and where it changed."""
