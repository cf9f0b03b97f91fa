# SPDX-License-Identifier: Apache-2.0
"""Inference libraries that need a GPU, as small as their public classes can be.

Signatures and results are those of their documentation; an argument that they do not know is an error, as it
is there. Each starts the processes that the real one starts. Not on the search path of this suite: tests put
this directory there, for their ranks.
"""
