# SPDX-License-Identifier: Apache-2.0
"""Any server of the OpenAI API on this host: one that is started here, or one that runs already."""
