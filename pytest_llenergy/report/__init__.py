# SPDX-License-Identifier: Apache-2.0
"""Write, read and render reports: files, journals, terminal, Markdown, CI formats and HTML."""
